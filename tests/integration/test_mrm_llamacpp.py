"""Runs of llama.cpp: over a library that imitates it, and with llama-cpp-python itself.

llama-cpp-python is built once for all checkouts, by packaging/build_llama_cpp.py.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import yaml
from gguf_model import weight_bytes, write_llama
from llm_instrumentation.mrm import check_parquet_schema
from llm_instrumentation.mrm.collector import MemrayRunner, PageFaults, PerfMemRunner, WriteSets
from llm_instrumentation.mrm.config import ExperimentConfig
from llm_instrumentation.mrm.events import read_events
from llm_instrumentation.mrm.known_rows import DSO
from llm_instrumentation.mrm.reporter import verify_manifest
from llm_instrumentation.mrm.runner import RunOutcome, SweepListener, run_sweep
from llm_instrumentation.mrm.runs import RunFolder

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
DEFAULT = ROOT / "config" / "default_experiment.yaml"
DOCUMENTED = {
    "trace.parquet", "region_map.parquet", "kv_block_lifecycle.parquet", "metrics.csv",
    "metadata.json", "manifest.json",
}  # fmt: skip
CLASSES = {
    "perf_mem": PerfMemRunner, "page_faults": PageFaults, "write_sets": WriteSets,
    "memray": MemrayRunner,
}  # fmt: skip
NAMED = {"weight", "kv_cache", "activation"}


def default(base: Path, gguf: Path) -> dict[str, Any]:
    """The default experiment with the model `gguf` and fewer tokens."""
    given: dict[str, Any] = yaml.safe_load(DEFAULT.read_text(encoding="utf-8"))
    given["models"][0] |= {"id": "tiny", "path": str(gguf)}
    given["sweep"] |= {"context_lengths": [32], "output_tokens": [8]}
    given["output"]["base_dir"] = str(base / "results")
    return given


def shorter(given: dict[str, Any], **collector: Any) -> dict[str, Any]:
    """Shortens an experiment to one prompt and one run, with these collector settings."""
    given["prompts"]["limit"] = 1
    given["telemetry"] |= {"baseline_duration_s": 0.1, "paired_untraced_run": False}
    given["collector"] |= collector
    return given


def run(given: dict[str, Any]) -> tuple[RunOutcome, list[str]]:
    """Runs an experiment with one run. Returns its outcome and the messages to the user."""

    class Notes(SweepListener):
        def __init__(self) -> None:
            self.said: list[str] = []

        def note(self, message: str, level: int = 0) -> None:
            self.said.append(message)

    notes = Notes()
    (outcome,) = run_sweep(ExperimentConfig.model_validate(given), listener=notes)
    return outcome, notes.said


def checked(folder: RunFolder) -> pd.DataFrame:
    """The trace of a run. Checks that the documented files are all there and sound."""
    assert {path.name for path in folder.path.iterdir()} >= DOCUMENTED
    assert verify_manifest(folder.path) == []
    for name in ("trace", "region_map", "kv_block_lifecycle"):
        check_parquet_schema(folder.path / f"{name}.parquet", name)
    trace = pd.read_parquet(folder.trace)
    counts = folder.metadata()["labels"]["rows"]
    assert trace.region_type.value_counts().to_dict() == counts
    assert set(counts) >= NAMED
    metrics = pd.read_csv(folder.path / "metrics.csv").set_index("region_type")
    assert (metrics.loc[sorted(NAMED), "working_set_mb_total"] > 0).all()
    return trace


def announced(folder: RunFolder) -> dict[str, list[tuple[int, int]]]:
    """The address ranges of weights, caches and activations, as the engine told them."""
    found: dict[str, list[tuple[int, int]]] = {}
    for record in read_events(folder.raw / "events.jsonl"):
        for start, end, kind in record.metadata.get("memory_ranges", ()):
            found.setdefault(kind, []).append((start, end))
    return found


def pages_of(spans: list[tuple[int, int]]) -> set[int]:
    return {page for start, end in spans for page in range(start >> 12, ((end - 1) >> 12) + 1)}


# Without llama.cpp: the choice of the collector, and the files with any collector.


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file in place of a model, and a fake package ``llama_cpp`` that accepts it.

    The fake never writes to its weights. llama.cpp does not either, because it maps the file.
    """
    if shutil.which("cc") is None:
        pytest.skip("no C compiler")
    package = tmp_path / "packages" / "llama_cpp"
    shutil.copytree(HERE / "fake_llama_cpp", package)
    library = package / "fake_ggml.so"
    flags = ["-shared", "-fPIC", "-DLAYOUT=1", "-DSCALE=256"]
    subprocess.run(["cc", *flags, str(HERE / "fake_ggml.c"), "-o", library], check=True)
    monkeypatch.syspath_prepend(str(package.parent))
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF")
    return path


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Returns a function that makes collectors say that they cannot run."""

    def leave_out(*names: str) -> None:
        for name in names:
            reason = f"no {name} in this test"
            monkeypatch.setattr(CLASSES[name], "unavailable_reason", lambda self, r=reason: r)

    return leave_out


def skip_unless_here(name: str) -> None:
    reason = CLASSES[name]().unavailable_reason()
    if reason is not None:
        pytest.skip(reason)


@pytest.mark.parametrize("used", ["page_faults", "write_sets", "memray", "process_monitor"])
def test_the_default_gives_its_files_whatever_can_run(tmp_path, fake, without, used):
    order = ["perf_mem", "page_faults", "write_sets", "memray", "process_monitor"]
    if used in CLASSES:
        skip_unless_here(used)
    without(*order[: order.index(used)])
    outcome, said = run(shorter(default(tmp_path, fake)))
    assert outcome.status == "finished", outcome.reason
    folder = RunFolder(Path(outcome.run_dir))
    trace = checked(folder)

    told = folder.metadata()
    steps = told["collector_steps"]
    assert [step["collector"] for step in steps] == order[: order.index(used) + 1]
    assert [step["used"] for step in steps] == [False] * (len(steps) - 1) + [True]
    before_memray = used in ("page_faults", "write_sets")
    assert bool(steps[-1]["reason"]) == before_memray
    assert any("tried before memray" in line for line in said) == before_memray

    # No program wrote the weights, so their rows come from the ranges that the engine tells.
    spans = announced(folder)
    weights = trace[(trace.region_type == "weight") & (trace.op_type == "store")]
    assert set(weights.dso) == {DSO}
    assert [(row.address, row.address + row.length_bytes) for row in weights.itertuples()] == spans[
        "weight"
    ]
    assert set(weights.phase) == {"weight_load"}
    known = set().union(*map(pages_of, spans.values()))
    unknown = trace[trace.region_type == "unknown"]
    assert not set(unknown[unknown.phase == "generation"].address_page) & known or used == "memray"
    if used in ("page_faults", "write_sets"):
        seen = trace[trace.dso != DSO]
        assert set(seen[seen.region_type == "kv_cache"].address_page) <= pages_of(spans["kv_cache"])
    # Other accesses of the program are rows of type unknown, and the user is told of them.
    assert bool(len(unknown)) == (used != "process_monitor")
    assert any("rows are unknown" in line for line in said) == (used != "process_monitor")


def test_ranges_alone_live_from_the_load_to_the_release(tmp_path, fake, without):
    """Without a collector of accesses, the engine's ranges are the only rows of the trace."""
    without("perf_mem", "page_faults", "write_sets", "memray")
    outcome, said = run(shorter(default(tmp_path, fake)))
    assert (outcome.collector, outcome.kind) == ("process_monitor", "allocations")
    assert any("ranges that the engine names are in no row" in line for line in said)
    folder = RunFolder(Path(outcome.run_dir))
    trace = pd.read_parquet(folder.trace)
    at = {event.event.value: event.mono_ns for event in read_events(folder.raw / "events.jsonl")}
    assert set(trace[trace.op_type == "store"].timestamp_ns) == {at["model_load_end"] - 1}
    assert set(trace[trace.op_type == "load"].timestamp_ns) == {at["teardown_start"]}
    metrics = pd.read_csv(folder.path / "metrics.csv").set_index("region_type")
    lived = (at["teardown_start"] - at["model_load_end"] + 1) / 1e9
    assert metrics.retention_p50_s.to_dict() == pytest.approx(dict.fromkeys(NAMED, lived))


def test_memray_named_first_stays_first(tmp_path, fake):
    skip_unless_here("memray")
    given = shorter(default(tmp_path, fake), primary="memray", fallback=None, fallback_2=None)
    outcome, _ = run(given)
    assert (outcome.status, outcome.collector) == ("finished", "memray"), outcome.reason
    checked(RunFolder(Path(outcome.run_dir)))


def test_the_given_policy_for_unknown_rows_is_used(tmp_path, fake, without):
    skip_unless_here("memray")
    without("perf_mem", "page_faults", "write_sets")
    given = shorter(default(tmp_path, fake))
    # Few rows of this program have a label, but it has enough rows for min_sample_count.
    given["labeller"] |= {"unknown_policy": "log_and_skip", "min_sample_count": 1000}
    outcome, said = run(given)
    assert outcome.status == "finished", outcome.reason
    folder = RunFolder(Path(outcome.run_dir))
    # Some builds of Python name their own memory, others do not.
    assert set(checked(folder).region_type) - {"runtime"} == NAMED
    left_out = folder.metadata()["trace"]["rows_left_out"]
    assert left_out > 0
    assert any(line.startswith(f"{left_out:,} rows left out") for line in said)


# With llama.cpp.


@pytest.fixture
def gguf(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.gguf"
    write_llama(path)
    return path


def environment(package: Path) -> dict[str, str]:
    path = [str(package), str(ROOT / "python"), *filter(None, sys.path)]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path), "HF_HUB_OFFLINE": "1"}


def command(package: Path, *arguments: str | Path, **more: Any) -> str:
    """The output of a Python command that can import llama-cpp-python."""
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        env=environment(package), capture_output=True, text=True, timeout=280, check=False, **more,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def written(path: Path, given: dict[str, Any]) -> Path:
    path.write_text(yaml.safe_dump(given), encoding="utf-8")
    return path


def run_command(package: Path, experiment: Path, **more: Any) -> RunFolder:
    """``mrm-trace run`` of an experiment with one run."""
    main = ("-m", "llm_instrumentation.cli", "trace", "run", "--json", "--config")
    (told,) = json.loads(command(package, *main, experiment, **more))["runs"]
    assert told["status"] == "finished", told["reason"]
    return RunFolder(Path(told["run_dir"]))


@pytest.mark.slow
@pytest.mark.timeout(50 * 60)
def test_the_default_experiment_gives_its_files(llama_cpp, gguf, tmp_path):
    experiment = written(tmp_path / "default.yaml", default(tmp_path, gguf))
    folder = run_command(llama_cpp, experiment)
    trace = checked(folder)
    told = folder.metadata()
    assert told["engine"]["extra"]["mode"] == "llama-cpp-python"
    assert "addresses" not in told["engine"]["extra"]
    assert [one["output_tokens"] for one in told["generations"]] == [8] * 5
    if told["trace"]["kind"] != "accesses":
        assert (trace.region_type == "unknown").any()
        weights = pages_of(announced(folder)["weight"])
        metrics = pd.read_csv(folder.path / "metrics.csv").set_index("region_type")
        assert metrics.loc["weight", "unique_pages_total"] == len(weights)


@pytest.mark.slow
@pytest.mark.timeout(50 * 60)
@pytest.mark.parametrize("native", ["--native-traces", "--no-native-traces"])
def test_the_demo_gives_its_files(llama_cpp, gguf, tmp_path, native):
    demo = ROOT / "notebooks" / "scripts" / "demo_tinyllama.py"
    flags = ("--ctx", "32", "--tokens", "4", "--out", tmp_path / "out", native)
    said = command(llama_cpp, demo, "--model", gguf, *flags)
    (path,) = (tmp_path / "out" / "tinyllama-1.1b").iterdir()
    folder = RunFolder(path)
    trace = checked(folder)
    assert folder.metadata()["trace"]["kind"] == "allocations"
    assert all(name in said for name in DOCUMENTED)
    metrics = pd.read_csv(folder.path / "metrics.csv").set_index("region_type")
    assert (metrics.loc[sorted(NAMED), "retention_p50_s"] > 0).all()
    weights = trace[(trace.region_type == "weight") & (trace.op_type == "store")]
    assert weights.length_bytes.sum() == weight_bytes()


@pytest.mark.slow
@pytest.mark.timeout(50 * 60)
@pytest.mark.skipif(os.geteuid() != 0, reason="root becomes another user here")
def test_the_default_experiment_gives_its_files_to_an_ordinary_user(llama_cpp, gguf):
    nobody = 65534
    with tempfile.TemporaryDirectory() as folder:  # only root may enter tmp_path
        base = Path(folder)
        package = shutil.copytree(llama_cpp, base / "package")
        shutil.copy(gguf, base / "tiny.gguf")
        experiment = written(base / "default.yaml", default(base, base / "tiny.gguf"))
        for path in (base, *base.rglob("*")):
            os.chown(path, nobody, nobody)
        user = {"user": nobody, "group": nobody, "extra_groups": [], "cwd": base}
        may_read = [sys.executable, "-c", "import llm_instrumentation.cli.trace, matplotlib"]
        try:
            subprocess.run(may_read, env=environment(package), check=True, **user)
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"another user may not read this checkout or its environment: {error}")
        checked(run_command(package, experiment, **user))


@pytest.mark.slow
@pytest.mark.timeout(50 * 60)
@pytest.mark.parametrize("name", ["page_faults", "write_sets"])
def test_rows_lie_where_llama_cpp_says(llama_cpp, gguf, tmp_path, monkeypatch, name):
    skip_unless_here(name)
    monkeypatch.syspath_prepend(str(llama_cpp))
    given = shorter(default(tmp_path, gguf), primary=name, fallback=None, fallback_2=None)
    given["models"][0]["threads"] = 1
    given["collector"]["write_sets"]["interval_ms"] = 5
    given["sweep"]["output_tokens"] = [100]
    outcome, _ = run(given)
    assert outcome.status == "finished", outcome.reason
    folder = RunFolder(Path(outcome.run_dir))
    spans = announced(folder)
    assert sum(end - start for start, end in spans["weight"]) == weight_bytes()
    # Each layer has keys and values as f16. llama.cpp rounds the window up to 256 tokens.
    assert [end - start for start, end in spans["kv_cache"]] == 4 * [256 * 64 * 2]
    trace = checked(folder)
    for kind in NAMED:
        rows = trace[(trace.region_type == kind) & (trace.dso != DSO)]
        assert set(rows.address_page) <= pages_of(spans[kind])
        # Weights may have no rows: the kernel maps many pages of the file in one fault. Caches and
        # activations may have no page faults, if they reuse memory that Python had before.
        assert len(rows) or kind == "weight" or name == "page_faults"


@pytest.mark.slow
@pytest.mark.timeout(50 * 60)
def test_an_instrumented_llama_cpp_reads_each_weight_once_a_token(llama_cpp, tmp_path, monkeypatch):
    libraries = os.environ.get("LLAMA_CPP_LIB_PATH")
    if libraries is None or b"libstrap-access" not in Path(libraries, "libllama.so").read_bytes():
        pytest.skip("LLAMA_CPP_LIB_PATH names no llama.cpp built as docs/ACCESS_TRACING.md says")
    monkeypatch.syspath_prepend(str(llama_cpp))
    # With 256 units a layer, llama.cpp takes the kernels that read no byte twice.
    layers, width, vocabulary = 2, 256, 259
    write_llama(tmp_path / "model.gguf", layers, width)
    given = shorter(default(tmp_path, tmp_path / "model.gguf"), primary="access", fallback=None)
    given["models"][0]["threads"] = 1
    given["sweep"] |= {"context_lengths": [16], "output_tokens": [4]}
    outcome, _ = run(given)
    assert outcome.status == "finished", outcome.reason
    trace = pd.read_parquet(RunFolder(Path(outcome.run_dir)).trace)
    assert set(trace.region_type) == NAMED
    steps = trace[trace.token_index > 0]
    moved = steps.groupby(["region_type", "op_type", "token_index"], observed=True).length_bytes
    bytes_of = moved.sum().unstack("token_index")
    # A token reads one embedding. Its keys and values are f16, and it reads the whole window.
    one_embedding = weight_bytes(layers, width) - 4 * (vocabulary - 1) * width
    assert (bytes_of.loc["weight", "load"] == one_embedding).all()
    assert (bytes_of.loc["kv_cache", "store"] == layers * 2 * width * 2).all()
    assert (bytes_of.loc["kv_cache", "load"] == layers * 2 * width * 2 * 256).all()
    assert ("weight", "store") not in bytes_of.index
