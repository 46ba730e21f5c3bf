"""A damaged or hostile file is read, or gives an error of the package: soon, in little memory."""

from __future__ import annotations

import contextlib
import json
import random
import resource
import shutil
import signal
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from causal_graphs import induction
from damage import damaged
from hypothesis import settings
from llm_instrumentation import (
    ActivationReader,
    InstrumentationConfig,
    InstrumentationFramework,
    capture_activations,
)
from llm_instrumentation._files import created_beside
from llm_instrumentation.analysis.causal_graph import load_graph, save_graph
from llm_instrumentation.analysis.dataset import ActivationDataset
from llm_instrumentation.analysis.imports import import_activations
from llm_instrumentation.analysis.reading import summary
from llm_instrumentation.analysis.reading.verify import verify
from llm_instrumentation.analysis.sae.feature_folder import FeatureFolder
from llm_instrumentation.analysis.salvage import salvage_ring
from llm_instrumentation.cli import main
from llm_instrumentation.cli.exit_codes import ExitCode
from llm_instrumentation.core.token_files import finished_state
from llm_instrumentation.core.tokens import CheckpointFile, TokenTracker
from llm_instrumentation.errors import StrapError
from llm_instrumentation.flight import flight_recorder
from llm_instrumentation.mrm import compute_all, compute_in_tokens
from llm_instrumentation.mrm.collector import TorchTracer
from llm_instrumentation.mrm.collector.torch.recover import read_spool
from llm_instrumentation.mrm.collector.torch.spool import SPOOL
from llm_instrumentation.mrm.collector.write_sets import read_write_sets
from llm_instrumentation.mrm.config import load_experiment, load_prompts
from llm_instrumentation.mrm.config.schema import PromptsConfig
from llm_instrumentation.mrm.events import read_events
from llm_instrumentation.mrm.labeller import load_rules
from llm_instrumentation.mrm.parser import parse_lackey, parse_perf_script
from llm_instrumentation.mrm.reporter.metrics_csv import METRIC_COLUMNS, read_metrics_csv
from llm_instrumentation.mrm.reporter.run_data import load_metadata, load_tables
from llm_instrumentation.mrm.runs import RunFolder
from llm_instrumentation.probes import export_snapshots, read_snapshots
from llm_instrumentation.probes.blocks.analysis import parse_trace
from llm_instrumentation.probes.correlation import timeline as waits
from llm_instrumentation.storage import _record
from llm_instrumentation.storage._reader import _packets_of
from llm_instrumentation.timeline import write_timeline
from safetensors.torch import save_file
from synthetic_traces import make_trace

SECONDS, MEGABYTES = 5, 500
LONG = settings.default.max_examples > 1000
MUTANTS = 10_000 if LONG else 560


class Hangs(BaseException):
    """The reader was interrupted. No reader may catch this."""


class Case(NamedTuple):
    """A file of the corpus, and a function that reads it, which is given its folder."""

    file: str
    read: Callable[[Path], Any]


# ---- a good file of each kind ---------------------------------------------------------------


class _Embedding(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(100, 4)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.embed(input_ids)


def _capture(path: str, model: torch.nn.Module) -> None:
    framework = InstrumentationFramework(InstrumentationConfig.balanced())
    framework.instrument_model(model)
    options = {"track_per_token": True, "checkpoint_interval_tokens": 1}
    with contextlib.suppress(KeyError), torch.no_grad():
        with framework.capture_activations(path, **options) as tracker:
            for step in range(3):
                model(torch.full((2, 5), step))
                tracker.record_token(step, f" {step}")
            raise KeyError  # so that the checkpoint stays


def _snapshot(window: int) -> dict[str, Any]:
    device = {"device_id": 7, "device_name": "vda"}
    bucket = {"slot": 3, "count": 2, "bucket_low": 8, "bucket_high": 15}
    counts = ("inflight", "errors", "requeues", "merges", "was_queued", "queued_ns")
    operation = {
        **device, **dict.fromkeys(counts, 1), "operation": "read", "completed": 2, "bytes": 8192,
        "latency_ns": 50, "latency_histogram": [bucket], "queue_histogram": [bucket],
        "size_histogram": [bucket],
    }  # fmt: skip
    losses = ("no_room", "no_device", "unseen_start", "unseen_end", "expired", "missed")
    return {
        "timestamp": 1.7e9 + window, "iso_timestamp": f"2023-11-14T22:13:2{window}.000000+00:00",
        "interval_s": 1.0, "monotonic_ns": window * 10**9, "operations": [operation],
        "latency_histogram": [{**device, "total": 2, "buckets": [bucket]}],
        "inflight": [{**device, "count": 1}], "losses": dict.fromkeys(losses, 0),
    }  # fmt: skip


def _counters(number: int) -> dict[str, Any]:
    """A line of the counters of a capture."""
    counts = (
        "queued_bytes", "queued_packets", "memory_bytes", "stalls", "dropped", "file_bytes",
        "raw_bytes", "stall_seconds", "yield_seconds", "write_seconds", "write_blocked_seconds",
    )  # fmt: skip
    stamp = {"timestamp": 1.7e9 + number, "monotonic_ns": number * 10**9, "interval_s": 1.0}
    about = {"began_ns": 0, "pid": 7, "device_id": 7, "writer_cpu_s": 0.5, "cpu_throttled_s": None}
    return {**stamp, **about, "counters": dict.fromkeys(counts, number)}


def _make(folder: Path) -> None:
    """Writes the corpus."""
    model = _Embedding()
    _capture(f"{folder}/a.stream", model)
    _capture(f"{folder}/run/", model)
    with torch.no_grad(), capture_activations(model, f"{folder}/plain.stream"):
        model(torch.ones(2, 7, dtype=torch.int64))
    with torch.no_grad(), capture_activations(model, f"{folder}/whole/"):
        model(torch.ones(2, 7, dtype=torch.int64))
    _shuffled(folder)
    _left_ring(folder / "ring")
    save_graph(induction(), folder / "graph.json")
    save_graph(induction(), folder / "graph.graphml")
    torch.save([{"h": torch.ones(1, 3, 4), "input_ids": torch.ones(1, 3).long()}], folder / "a.pt")
    states = {"hidden_states": torch.ones(3, 2, 4), "token_ids": torch.arange(3)}
    save_file(states, folder / "a.safetensors")
    lines = [json.dumps(_snapshot(window)) for window in range(3)]
    for name in ("block.jsonl", "a.stream.block.jsonl"):
        (folder / name).write_text("\n".join(lines) + "\n")
    export_snapshots(folder / "block.jsonl", folder / "block.parquet")
    lines = [json.dumps(_counters(number)) for number in range(1, 4)]
    (folder / "a.stream.capture.jsonl").write_text("\n".join(lines) + "\n")
    proof = {"size_bytes": 3, "sha256": "ab", "etag": None}
    record = {"upload_version": 1, "files": {"a": proof}, "complete": True}
    (folder / "upload.json").write_text(json.dumps(record))

    runs = folder / "mrm"
    (runs / "tables").mkdir(parents=True)
    pq.write_table(make_trace(tokens=4, weights=1, layers=1), runs / "trace.parquet")
    table = pa.table({"region_type": ["weight"], "extent": [1]})
    pq.write_table(table, runs / "tables" / "extent.parquet")
    (runs / "metadata.json").write_text(json.dumps({"run_id": "r", "trace": {"kind": "accesses"}}))
    files = [{"path": "metadata.json", "size_bytes": 50, "sha256": "ab"}]
    manifest = {"manifest_schema_version": "1.0", "run_id": "r", "files": files}
    (folder / "mrm.json").write_text(json.dumps(manifest))
    mark = {"state": "failed", "reason": "x", "run_id": "r", "created_at_utc": "2026-01-01"}
    (folder / "INCOMPLETE").write_text(json.dumps(mark))
    event = {
        "event": "token_emitted",
        "timestamp_utc": "",
        "wall_ns": 1,
        "mono_ns": 1,
        "metadata": {},
    }
    (folder / "events.jsonl").write_text(f"{json.dumps(event)}\n{json.dumps(event)}\n")
    cells = ["weight", *["1"] * (len(METRIC_COLUMNS) - 1)]
    (folder / "metrics.csv").write_text(f"{','.join(METRIC_COLUMNS)}\n{','.join(cells)}\n")
    (folder / "rules.yaml").write_text("rules:\n- {region_type: weight, symbol_re: gemm}\n")
    experiment = "experiment: {name: x}\nmodels:\n- {id: a, engine: transformers, path: /tmp}\n"
    (folder / "experiment.yaml").write_text(experiment)
    (folder / "prompts.json").write_text(json.dumps({"a": ["text", {"prompt": "more"}]}))
    (folder / "lackey.txt").write_text("I  04000000,3\n L 1ffefff8,8\n S 1ffefff0,8\n" * 20)
    sample = "python 12/13 [000] 1.000000001: mem-loads: 7f00 gemm+0x1 (/lib/x.so)\n"
    (folder / "perf.txt").write_text(sample * 20)

    regions = np.zeros(3, np.dtype([(name, "<i8") for name in ("time", "pid", "start", "end")]))
    regions["start"], regions["end"] = 4096, 3 * 4096
    (folder / "write_sets.bin").write_bytes(regions.tobytes())
    _spool(folder)

    (folder / "features").mkdir()
    feature = {
        "layer": "embed", "feature": 1, "fired": 2, "density": 0.5, "maximum": 1.0,
        "histogram": [1, 2], "contexts": [], "promoted": None, "suppressed": None,
    }  # fmt: skip
    (folder / "features" / "features.jsonl").write_text(f"{json.dumps(feature)}\n" * 3)
    (folder / "features" / "features.json").write_text(json.dumps({"layer": "embed"}))
    (folder / "table").mkdir()
    table = pa.Table.from_pylist([feature] * 3)
    pq.write_table(table, folder / "table" / "features.parquet")


def _spool(folder: Path) -> None:
    """Leaves a spool, as a killed process does."""
    tracer, layer = TorchTracer(folder / "t.parquet"), torch.nn.Linear(4, 4)
    with tracer.attach(layer), torch.no_grad():
        layer(torch.ones(2, 4))
    (spool,) = created_beside(folder / "t.parquet", SPOOL)
    content = spool.read_bytes()
    tracer.close()
    (folder / "t.spool").write_bytes(content)


# ---- how each is read -----------------------------------------------------------------------


def _stream(folder: Path) -> None:
    with ActivationReader(folder / "a.stream", warn=False) as reader:
        for activation in reader:
            with contextlib.suppress(StrapError):
                activation.to_torch()
        summary.summary(reader)
        verify(reader, None)


def _rows(folder: Path) -> None:
    with ActivationReader(folder / "a.stream", warn=False) as reader:
        rows = reader.rows("embed")
        rows.to_pandas() if hasattr(rows, "to_pandas") else list(rows)


def _timeline(folder: Path) -> None:
    write_timeline(folder / "a.stream", folder / "a.pftrace", overwrite=True)


def _tokens(folder: Path) -> None:
    with ActivationReader(folder / "a.stream", warn=False) as reader:
        _ = reader.token_metadata
    TokenTracker(resume_from=finished_state(folder / "a.stream"))
    _timeline(folder)


def _checkpoint(folder: Path) -> None:
    file = CheckpointFile(folder / "a.stream.ckpt.json")
    state = file.load()
    if state is not None:
        file.check(state, folder / "a.stream")
        TokenTracker(resume_from=state)


def _run(folder: Path) -> None:
    with ActivationReader(folder / "run", warn=False) as reader:
        summary.summary(reader)
        verify(reader, None)
        reader.rows("embed")


def _shuffled(folder: Path) -> None:
    path, scratch = str(folder / "plain.stream"), folder / "scratch"
    list(ActivationDataset(path, ["embed"], batch_size=8, shuffle="full", scratch=scratch))


def _left_ring(path: Path) -> None:
    """Writes what a flight recorder leaves that is killed, without the memory it has not used."""
    model = torch.nn.Identity()
    with flight_recorder(
        model, path.with_name("recorder"), memory_gb=0.002, ring_file=f"{path}.live"
    ):  # fmt: skip
        for step in range(20):
            model(torch.full((40,), step, dtype=torch.int64))
        left = Path(f"{path}.live").read_bytes()
    path.write_bytes(left[: 64 << 10])


def _ring(folder: Path) -> None:
    """Whatever was damaged, a tensor that is salvaged has its values."""
    salvage_ring(folder / "ring", folder / "ring.stream", force=True)
    with ActivationReader(folder / "ring.stream", warn=False) as reader:
        for one in reader:
            assert torch.equal(one.to_torch(), torch.full((40,), one.step, dtype=torch.int64))


def _imported(name: str, form: str) -> Callable[[Path], Any]:
    return lambda folder: import_activations(
        folder / name, folder / "imported.stream", format=form, overwrite=True, progress=False
    )


def _snapshots(folder: Path, name: str) -> None:
    list(read_snapshots(folder / name))
    export_snapshots(folder / name, folder / "exported.parquet")


def _traced(folder: Path) -> None:
    compute_all(folder / "mrm")
    compute_in_tokens(folder / "mrm")


def _write_sets(folder: Path) -> None:
    for number, _ in enumerate(read_write_sets(folder / "write_sets.bin", "r", None)):
        if number == 3:  # a record is a region of any size
            return


def _features(folder: Path) -> None:
    found = FeatureFolder(folder)
    places = range(len(found.columns()["feature"]))
    found.records(list(places))
    if (folder / "features.json").exists():
        found.about()


def _mrm_manifest(folder: Path) -> None:
    shutil.copy(folder / "mrm.json", folder / "mrm" / "manifest.json")
    try:
        load_metadata(folder / "mrm")
    finally:
        (folder / "mrm" / "manifest.json").unlink()


CASES = [
    Case("a.stream", _stream),
    Case("a.stream.index", _stream),
    Case("a.stream.index", lambda folder: _packets_of(folder / "a.stream.index")),
    Case("a.stream.calls", _rows),
    Case("a_tokens.json", _tokens),
    Case("a.stream.ckpt.json", _checkpoint),
    Case("a.stream.block.jsonl", _timeline),
    Case("a.stream.capture.jsonl", _timeline),
    Case("a.stream.capture.jsonl", lambda folder: waits(folder / "a.stream")),
    Case("block.jsonl", lambda folder: parse_trace(read_snapshots(folder / "block.jsonl"))),
    Case("t.spool", lambda folder: read_spool(folder / "t.spool", "r", None).read_all()),
    Case("write_sets.bin", _write_sets),
    Case("run/manifest.json", _run),
    Case("run/rank-00000.json", _run),
    Case("scratch/manifest.json", _shuffled),
    Case("ring", _ring),
    Case("graph.json", lambda folder: load_graph(folder / "graph.json")),
    Case("graph.graphml", lambda folder: load_graph(folder / "graph.graphml")),
    Case("a.pt", _imported("a.pt", "torch")),
    Case("a.safetensors", _imported("a.safetensors", "vllm")),
    Case("block.jsonl", lambda folder: _snapshots(folder, "block.jsonl")),
    Case("block.parquet", lambda folder: _snapshots(folder, "block.parquet")),
    Case("upload.json", lambda folder: _record.parse((folder / "upload.json").read_bytes(), "a")),
    Case("mrm/trace.parquet", _traced),
    Case("mrm/tables/extent.parquet", lambda folder: load_tables(folder / "mrm")),
    Case("mrm/metadata.json", lambda folder: load_metadata(folder / "mrm")),
    Case("mrm.json", _mrm_manifest),
    Case("INCOMPLETE", lambda folder: RunFolder(folder).defect()),
    Case("events.jsonl", lambda folder: read_events(folder / "events.jsonl")),
    Case("metrics.csv", lambda folder: read_metrics_csv(folder / "metrics.csv")),
    Case("rules.yaml", lambda folder: load_rules(folder / "rules.yaml")),
    Case("experiment.yaml", lambda folder: load_experiment(folder / "experiment.yaml")),
    Case(
        "prompts.json",
        lambda folder: load_prompts(PromptsConfig(source=str(folder / "prompts.json"))),
    ),
    Case("lackey.txt", lambda folder: list(parse_lackey(folder / "lackey.txt", "r"))),
    Case("perf.txt", lambda folder: list(parse_perf_script(folder / "perf.txt", "r"))),
    Case("features/features.jsonl", lambda folder: _features(folder / "features")),
    Case("features/features.json", lambda folder: _features(folder / "features")),
    Case("table/features.parquet", lambda folder: _features(folder / "table")),
]


# ---- the tests ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _make(folder)
    return folder


@contextlib.contextmanager
def replaced(file: Path, content: bytes) -> Iterator[None]:
    """Another content of a file, until the end of the block."""
    before = file.read_bytes()
    file.write_bytes(content)
    try:
        yield
    finally:
        file.write_bytes(before)


def problem(read: Callable[[], Any]) -> str:
    """What is wrong with the way in which a reader ends; "": nothing."""

    def hangs(*_: object) -> None:
        raise Hangs

    before, began = signal.signal(signal.SIGALRM, hangs), time.monotonic()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    signal.setitimer(signal.ITIMER_REAL, 4 * SECONDS)
    try:
        read()
    except (StrapError, FileNotFoundError):
        pass
    except Hangs:
        return f"hangs for {4 * SECONDS} s"
    except BaseException as error:
        return f"{type(error).__name__}: {str(error)[:200]}"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    seconds = time.monotonic() - began
    more = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak) / 1024
    if seconds > SECONDS:
        return f"takes {seconds:.1f} s"
    return f"takes {more:.0f} MB" if more > MEGABYTES else ""


def test_every_good_file_is_read(corpus):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for case in CASES:
            case.read(corpus)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.file)
@pytest.mark.filterwarnings("ignore")
def test_a_damaged_file_is_read_or_refused(case, corpus):
    wrong = []
    good = (corpus / case.file).read_bytes()
    for seed in range(MUTANTS // len(CASES) + 1):
        content = damaged(good, random.Random(f"{case.file} {seed}"))
        with replaced(corpus / case.file, content):
            if found := problem(lambda: case.read(corpus)):
                wrong.append(f"seed {seed}: {found}")
    assert not wrong, f"{len(wrong)} of {seed + 1}"


COMMANDS = {
    "a.stream": ("info", "ls", "verify", "timeline"),
    "a.stream.index": ("info", "ls", "verify", "timeline"),
    "a.stream.calls": ("info", "verify"),
    "a_tokens.json": ("info", "timeline"),
    "a.stream.block.jsonl": ("timeline",),
    "run/manifest.json": ("info", "ls", "verify"),
    "run/rank-00000.json": ("info", "ls", "verify"),
    "ring": ("salvage",),
    "a.pt": ("import",),
    "a.safetensors": ("import",),
}


@pytest.mark.parametrize("file", COMMANDS)
@pytest.mark.filterwarnings("ignore")
def test_a_command_ends_with_its_exit_code(file, corpus, capsys, monkeypatch):
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)  # a command replaces it
    good, wrong = (corpus / file).read_bytes(), []
    for seed in range(7):
        command = COMMANDS[file][seed % len(COMMANDS[file])]
        stream = corpus / ("run" if file.startswith("run/") else "a.stream")
        arguments = [command, str(stream)]
        if command == "timeline":
            arguments += ["--out", str(corpus / "a.pftrace"), "--overwrite"]
        if command == "salvage":
            out = str(corpus / "ring.stream")
            arguments = ["salvage", "ring", str(corpus / file), out, "--overwrite"]
        if command == "import":
            form = "torch" if file == "a.pt" else "vllm"
            out = str(corpus / "imported.stream")
            arguments = ["import", str(corpus / file), out, "--format", form, "--overwrite"]

        def run(arguments: list[str] = arguments) -> None:
            with pytest.raises(SystemExit) as ended:
                main(arguments)
            assert ended.value.code in set(ExitCode), ended.value.code

        content = damaged(good, random.Random(f"command {file} {seed}"))
        with replaced(corpus / file, content):
            if found := problem(run):
                wrong.append(f"{command}, seed {seed}: {found}")
    assert "Traceback" not in capsys.readouterr().err
    assert not wrong
