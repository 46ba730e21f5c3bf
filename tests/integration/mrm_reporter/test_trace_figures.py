"""The figures of runs, and their numbers."""

from __future__ import annotations

import functools
import itertools
import subprocess
import sys
import threading

import matplotlib
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from exported_runs import (
    process_samples,
    reference_names,
    texts_of,
)
from llm_instrumentation._pages import drawing, units
from llm_instrumentation.mrm.reporter import (
    generate_all_figures,
    looks,
    plot_retention_histogram,
    plot_working_set,
    plot_write_once,
    summarise_trace,
)
from llm_instrumentation.mrm.reporter.figures import (
    FIGURES,
    draw_process_memory,
    draw_working_set_over_time,
)
from llm_instrumentation.mrm.schema import RegionType
from synthetic_traces import make_trace, reference_distributions, reference_tables

pytestmark = pytest.mark.usefixtures("plain_pages")


@functools.cache
def tables_of(**shape: float) -> dict[str, pd.DataFrame]:
    """All tables of a made-up trace. No figure changes them."""
    trace = make_trace(**shape)
    return {
        **reference_tables(trace), **reference_distributions(trace),
        "kv_growth": summarise_trace(trace).kv_growth,
    }  # fmt: skip


@pytest.fixture(scope="module")
def everything(trace, tables) -> dict[str, pd.DataFrame]:
    """What all figures need."""
    return {
        **tables, "kv_growth": summarise_trace(trace).kv_growth,
        "process_samples": process_samples(),
    }  # fmt: skip


# ---- figures ----------------------------------------------------------------------------


def test_every_figure_is_drawn_in_every_format(everything, tmp_path):
    paths = generate_all_figures(everything, tmp_path, ("pdf", "svg"))
    assert {path.name for path in paths} == {
        f"{spec.name}.{kind}" for spec in FIGURES for kind in ("pdf", "svg")
    }
    for path in paths:
        assert path.read_bytes().startswith({".pdf": b"%PDF", ".svg": b"<?xml"}[path.suffix])
    pdf = (tmp_path / "working_set.pdf").read_bytes()
    assert b"/Type3" not in pdf and b"/Type 3" not in pdf
    assert "kv_cache" in (tmp_path / "retention_cdf.svg").read_text()  # SVG keeps text as text


def test_the_ten_tables_alone_give_the_documented_figures(tables, tmp_path):
    ten = {name: tables[name] for name in reference_names()}
    names = [path.name for path in generate_all_figures(ten, tmp_path)]
    assert names == ["retention_histogram.png", "working_set.png", "write_once.png"]
    for draw, table in (
        (plot_retention_histogram, "retention_per_region"),
        (plot_working_set, "working_set_summary"),
        (plot_write_once, "write_once"),
    ):
        path = draw(pa.Table.from_pandas(ten[table]), tmp_path / "alone")
        assert path.read_bytes() == (tmp_path / path.name).read_bytes()


@pytest.mark.parametrize("spec", FIGURES, ids=lambda spec: spec.name)
def test_an_empty_table_gives_a_figure_that_says_so(spec, everything):
    with drawing.settings():
        full = spec.draw(everything)
        empty = spec.draw({name: everything[name].iloc[:0] for name in spec.needs})
    said = [text.get_text() for text in empty.texts]
    assert "No data" in said
    assert "No data" not in [text.get_text() for text in full.texts]
    assert said[0] == full.texts[0].get_text()  # the title


def test_empty_tables_have_the_documented_figures_alone(trace, tables, tmp_path):
    everything = {**tables, "kv_growth": summarise_trace(trace).kv_growth}
    empty = {name: table.iloc[:0] for name, table in everything.items()}
    names = [path.name for path in generate_all_figures(empty, tmp_path)]
    assert names == ["retention_histogram.png", "working_set.png", "write_once.png"]


@pytest.mark.parametrize("spec", FIGURES, ids=lambda spec: spec.name)
@pytest.mark.parametrize(
    "shape", [{"tokens": 1, "weights": 1}, {"activation_life_s": 0.0}, {"runtime_pages": 0}]
)
def test_odd_traces_are_drawn_too(spec, shape, tmp_path, recwarn):
    everything = {**tables_of(**shape), "process_samples": process_samples(1)}
    weights = {
        name: table[table["region_type"] == "weight"] if "region_type" in table else table
        for name, table in everything.items()
    }
    for number, tables in enumerate((everything, weights)):
        with drawing.settings():
            drawing.save(spec.draw(tables), tmp_path / f"{number}.png")
    assert [str(warning.message) for warning in recwarn] == []


@pytest.mark.parametrize("spec", FIGURES, ids=lambda spec: spec.name)
@pytest.mark.parametrize(
    "shape",
    [{}, {"tokens": 1, "weights": 1}, {"weight_window_s": 1.0}, {"weight_window_s": 4000.0}],
)
def test_no_text_of_a_figure_is_cut_off_or_covers_another(spec, shape):
    everything = {
        **tables_of(spread=1.0, rewritten=3, **{"tokens": 12, **shape}),
        "process_samples": process_samples(),
    }
    with drawing.settings():
        figure = spec.draw(everything)
        figure.draw_without_rendering()
        boxes = {text: text.get_window_extent() for text in texts_of(figure)}
    page = figure.bbox
    for text, box in boxes.items():
        inside = page.x0 <= box.x0 and box.x1 <= page.x1 and page.y0 <= box.y0 <= box.y1 <= page.y1
        assert inside, text.get_text()
    for (one, a), (other, b) in itertools.combinations(boxes.items(), 2):
        apart = a.x1 <= b.x0 or b.x1 <= a.x0 or a.y1 <= b.y0 or b.y1 <= a.y0
        assert apart, (one.get_text(), other.get_text())


@pytest.mark.parametrize("spec", FIGURES, ids=lambda spec: spec.name)
def test_every_figure_names_its_axes(spec, everything):
    with drawing.settings():
        figure = spec.draw(everything)
    assert figure.axes[-1].get_xlabel()
    names = [text.get_text() for text in figure.texts if text.get_rotation() == 90]
    rows_are_named = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    panels_are_named = [text.get_text() for text in figure.axes[0].texts]
    assert names or "weight" in rows_are_named or "resident memory" in panels_are_named


def test_short_traces_have_an_axis_of_small_units():
    trace = make_trace(weight_window_s=0.003, activation_life_s=1e-6)
    with drawing.settings():
        figure = draw_working_set_over_time(reference_distributions(trace))
    axes = figure.axes[-1]
    assert axes.get_xlabel() == "time since the first access (ms)"
    assert axes.get_xlim()[1] == pytest.approx(3, rel=0.05)


def test_figures_leave_pyplot_and_settings_alone(tables, tmp_path):
    with matplotlib.rc_context({"font.size": 33.0, "axes.facecolor": "black"}):
        first = plot_write_once(tables["write_once"], tmp_path / "a").read_bytes()
        assert matplotlib.rcParams["font.size"] == 33.0
    second = plot_write_once(tables["write_once"], tmp_path / "b").read_bytes()
    assert first == second
    code = (
        "import sys; import llm_instrumentation.mrm.reporter as r; "
        "assert 'matplotlib' not in sys.modules and 'pandas' not in sys.modules; "
        "r.generate_all_figures; assert 'matplotlib.pyplot' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": ":".join(sys.path)})


def test_figures_can_be_drawn_in_threads(tables, tmp_path):
    ten = {name: table for name, table in tables.items() if name in reference_names()}
    failures = []

    def draw(number):
        try:
            generate_all_figures(ten, tmp_path / str(number))
        except Exception as error:  # pass a thread's error on to the test
            failures.append(error)

    threads = [threading.Thread(target=draw, args=(n,)) for n in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    for path in (tmp_path / "0").iterdir():
        assert path.read_bytes() == (tmp_path / "2" / path.name).read_bytes()


def test_an_unknown_format_is_named(tables, tmp_path):
    with pytest.raises(ValueError, match="png, pdf, svg, not 'gif'"):
        generate_all_figures(tables, tmp_path, ("gif",))


def test_region_types_keep_their_colours_and_can_be_told_apart():
    types = [region.value for region in RegionType]
    assert types == ["weight", "kv_cache", "activation", "runtime", "unknown"]
    assert len({looks.color(name) for name in types}) == 5
    assert len({str(looks.line(name)) for name in types}) == 5
    assert looks.color("weight") == "#0072b2"


# ---- numbers as people read them --------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "told"),
    [
        (0, "0 s"), (1e-9, "1 ns"), (2.5e-6, "2.5 µs"), (0.00999996, "10 ms"), (0.9999, "1 s"),
        (12.345, "12.3 s"), (599, "599 s"), (3600, "60 min"), (86400, "24 h"),
        (float("nan"), "–"),
    ],
)  # fmt: skip
def test_seconds(value, told):
    """Durations are printed with the fitting unit."""
    assert units.seconds(value) == told


def test_sizes_counts_and_ratios():
    """Sizes, counts and ratios are printed with few digits."""
    assert [units.size(n) for n in (0, 512, 4096, 1.5 * 2**30, 2**20 - 1)] == [
        "0 B", "512 B", "4 KiB", "1.5 GiB", "1 MiB",
    ]  # fmt: skip
    assert [units.count(n) for n in (1, 12345, 123_000_000, 2e10)] == [
        "1", "12,345", "123 million", "20 billion",
    ]  # fmt: skip
    assert [units.ratio(n) for n in (0.0, 1.0, 0.65, 0.9996, 0.00001)] == [
        "0.00", "1.00", "0.65", "0.9996", "1e-05",
    ]  # fmt: skip


def test_the_processor_s_share_of_a_short_interval_is_left_out(tmp_path):
    samples = process_samples(20)
    end = samples.t_s.max() + 0.001
    last = pd.DataFrame({"t_s": [end], "pid": [7], "rss_mb": [5000.0], "cpu_pct": [900.0]})
    with drawing.settings():
        figure = draw_process_memory({"process_samples": pd.concat([samples, last])})
        drawing.save(figure, tmp_path / "process_memory.png")
    memory, processor = (axes.lines[0].get_ydata() for axes in figure.axes)
    assert memory[-1] == 5000 * 2**20
    assert np.isnan(processor[-1])
    assert np.nanmax(processor) < 100
