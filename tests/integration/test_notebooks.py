"""The notebooks run, and what a notebook shows of captures: progress, tables and figures."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))

pytestmark = pytest.mark.timeout(15 * 60)  # a busy machine takes minutes to start a kernel


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_valid(path):
    nbformat = pytest.importorskip("nbformat")
    nbformat.validate(nbformat.read(path, as_version=4))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_and_was_saved_without_outputs(tmp_path, monkeypatch, path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setenv("MPLBACKEND", "Agg")
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    names: dict = {"__name__": "__main__"}
    for number, cell in enumerate(cells):
        if cell["cell_type"] != "code":
            continue
        assert cell["outputs"] == []
        source = "".join(cell["source"])
        exec(compile(source, f"{path.name}, cell {number}", "exec"), names)


# A notebook in a real kernel.

CELLS = {
    "capture": """
import time
import torch
from llm_instrumentation import ActivationReader, capture_activations

model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU())
end = time.monotonic() + 2
with torch.no_grad(), capture_activations(model, "run.stream") as capture:
    while time.monotonic() < end:
        model(torch.randn(4, 8))
        time.sleep(0.01)
""",
    "stats": "capture.stats()",
    "reader": "reader = ActivationReader('run.stream')\nreader",
    "view": "reader['0']",
    "activation": "reader['0'][0]",
    "long": """
from llm_instrumentation.progress.bars import bytes_bar, steps_bar

with steps_bar("training") as told:
    for step in range(1, 101):
        time.sleep(0.01)
        told(step, 100, "loss <0.5>")
""",
    "bytes": """
with bytes_bar("shuffling") as told:
    for step in range(1, 11):
        time.sleep(0.1)
        told(step << 20, 10 << 20)
""",
    "chosen": """
from llm_instrumentation.progress.bars import reported

heard = []
for choice in (None, False, lambda done, total: heard.append((done, total))):
    with reported(choice, "comparing") as told:
        time.sleep(0.6)
        told(3, 3)
print(heard)
""",
    "short": "with steps_bar('training') as told:\n    told(1, 1, '')",
    "silent": "with steps_bar('training', False) as told:\n    time.sleep(0.6)\n    told(1, 1, '')",
    "rows": """
from dataclasses import fields
from llm_instrumentation._native.trace import Counts
from llm_instrumentation.progress.bars import rows_bar

with rows_bar("reading") as told:
    time.sleep(0.6)
    told(Counts(**{field.name: 1234 for field in fields(Counts)}))
""",
    "figure, first in the notebook": """
from llm_instrumentation.analysis.visualization import *

packets = build_packet_dataframe(load_stream_packets("run.stream")[:60])
packets["token_index"] = packets["step"]
plot_token_progression(packets)
""",
    "axes": "axes = plot_token_progression(packets)",
    "two axes": "plot_token_progression(packets)\nvisualize_attention_patterns(packets)",
    "figure": """
import numpy as np
from llm_instrumentation.analysis.figures.canvas import small_heat_maps

small_heat_maps(np.eye(3)[None], ["head 0"], "abc", "abc", "Blues", "weight", "layer")
""",
    "open figures": "import matplotlib.pyplot as plt\nplt.get_fignums()",
}
# matplotlib's Figure has a picture only if the notebook's backend was loaded.
BARE = """
import pandas as pd
from llm_instrumentation.probes.blocks.figures import draw_timeline

columns = ["captured_mb_s", "file_mb_s", "disk_mb_s", "stall_share", "write_share",
           "write_blocked_share", "cpu_throttled_share", "disk_mean_us", "disk_p99_us",
           "io_pressure", "memory_pressure", "cpu_pressure"]
table = pd.DataFrame({name: [1.0, 2.0] for name in columns}, index=[1.0, 2.0])
table["interval_s"], table["bottleneck"] = 1.0, ["", "disk"]
draw_timeline(table)
"""


class Run:
    """An executed notebook.

    Attributes:
        notebook: the notebook with its outputs, as it would be saved.
        outputs: the outputs of each cell, by its name.
        sent: the HTML that the kernel sent to show or to replace, by the name of the cell.
    """

    def __init__(self, folder: Path, cells: dict[str, str]) -> None:
        nbclient = pytest.importorskip("nbclient")
        nbformat = pytest.importorskip("nbformat")
        pytest.importorskip("ipykernel")
        new = nbformat.v4
        self.notebook = new.new_notebook(
            cells=[new.new_code_cell(source.strip()) for source in cells.values()]
        )
        names = list(cells)
        self.sent: dict[str, list[str]] = {name: [] for name in names}
        sent = self.sent

        class Client(nbclient.NotebookClient):  # type: ignore[misc]
            def process_message(self, msg: Any, cell: Any, cell_index: int) -> Any:
                if msg["msg_type"] in ("display_data", "update_display_data"):
                    sent[names[cell_index]].append(msg["content"]["data"].get("text/html", ""))
                return super().process_message(msg, cell, cell_index)

        Client(
            self.notebook, timeout=240, kernel_name="python3",
            resources={"metadata": {"path": str(folder)}},
        ).execute()  # fmt: skip
        self.outputs = {
            name: cell.outputs for name, cell in zip(names, self.notebook.cells, strict=True)
        }

    def texts(self, name: str) -> list[str]:
        return [output["data"]["text/plain"] for output in self.outputs[name]]

    def pictures(self, name: str) -> int:
        return sum("image/png" in output.get("data", {}) for output in self.outputs[name])


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return Run(tmp_path_factory.mktemp("notebook"), CELLS)


def test_a_capture_shows_one_line_that_ends_with_its_last_counters(ran):
    (shown,) = ran.texts("capture")
    (stats,) = ran.texts("stats")
    packets = int(stats.partition("packets=")[2].partition(",")[0])
    assert shown.startswith(f"{packets:,} packets") and shown.endswith("queue 0 B")
    assert len(ran.sent["capture"]) >= 3, "it was replaced while the capture ran"


def test_a_bar_is_replaced_in_place_and_leaves_a_line(ran):
    (shown,) = ran.texts("long")
    assert shown.startswith("training: 100 of 100, loss <0.5> in ")
    *bars, last = ran.sent["long"]
    assert len(bars) >= 2
    assert all('<progress aria-label="training" value="' in bar for bar in bars)
    assert "s left, loss &lt;0.5&gt;" in bars[0]
    assert "<progress" not in last
    (shown,) = ran.texts("bytes")
    assert shown.startswith("shuffling: 10 MiB of 10 MiB in ")
    (shown,) = ran.texts("rows")
    assert shown.startswith("reading: 1,234 rows in 0.")
    assert "<progress" in ran.sent["rows"][0] and "value=" not in ran.sent["rows"][0]


def test_progress_goes_to_a_bar_or_to_the_function_of_the_caller(ran):
    shown, heard = ran.outputs["chosen"]
    assert shown["data"]["text/plain"].startswith("comparing: 3 of 3 in ")
    assert heard["text"] == "[(3, 3)]\n"


def test_short_work_and_progress_that_is_switched_off_show_nothing(ran):
    assert ran.outputs["short"] == ran.outputs["silent"] == []


@pytest.mark.parametrize("name", ["stats", "reader", "view", "activation"])
def test_an_object_is_shown_as_html_once(ran, name):
    (output,) = ran.outputs[name]
    assert "<table>" in output["data"]["text/html"]


def test_a_figure_is_shown_once_and_closed(ran):
    assert ran.pictures("figure, first in the notebook") == 1
    assert ran.pictures("axes") == 1
    assert ran.pictures("two axes") == 2
    assert ran.pictures("figure") == 1
    assert ran.texts("open figures") == ["[]"]


def test_a_figure_without_pyplot_is_shown(tmp_path):
    assert Run(tmp_path, {"timeline": BARE}).pictures("timeline") == 1


# What it looks like.


@pytest.fixture(params=["light", "dark"])
def page(request, browser, ran, tmp_path) -> Iterator[Any]:
    """The executed notebook in a browser, and a bar as it is while the work runs."""
    exporters = pytest.importorskip("nbconvert.exporters")
    nbformat = pytest.importorskip("nbformat")
    notebook = nbformat.from_dict(ran.notebook)
    bar = nbformat.v4.new_output("display_data", {"text/html": ran.sent["long"][0]})
    notebook.cells.append(nbformat.v4.new_code_cell("", outputs=[bar]))
    html, _ = exporters.HTMLExporter(theme=request.param).from_notebook_node(notebook)
    (tmp_path / "notebook.html").write_text(html, encoding="utf-8")
    opened = browser.new_page(viewport={"width": 1280, "height": 900})
    opened.route("http*://**", lambda route: route.abort())  # the page asks for MathJax
    opened.goto((tmp_path / "notebook.html").as_uri())
    yield opened
    opened.close()


def test_outputs_are_accessible_in_light_and_dark(page):
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    found = axe.run(page, context=".jp-OutputArea-output.jp-RenderedHTML").response
    assert found["passes"], "there are outputs"
    assert [(rule["id"], rule["nodes"][0]["html"][:200]) for rule in found["violations"]] == []


def test_a_histogram_has_the_colour_of_the_text(page):
    text, bars = page.evaluate(
        """[getComputedStyle(document.querySelector('.jp-RenderedHTML b')).color,
            getComputedStyle(document.querySelector('.jp-RenderedHTML svg')).fill]"""
    )
    assert text == bars
    assert page.locator("progress").is_visible()
