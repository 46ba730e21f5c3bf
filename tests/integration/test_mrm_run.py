"""Runs with the command `mrm-trace`, from an experiment file to a folder of results."""

from __future__ import annotations

import contextlib
import dataclasses
import html
import io
import json
import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pandas as pd
import prepared
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from llm_instrumentation._pages import drawing
from llm_instrumentation.cli import mrm_trace
from llm_instrumentation.cli.exit_codes import TraceExitCode as ExitCode
from llm_instrumentation.mrm import check_parquet_schema, compute_all
from llm_instrumentation.mrm.api import Experiment
from llm_instrumentation.mrm.collection import build_collector
from llm_instrumentation.mrm.collector.rows import make_batch
from llm_instrumentation.mrm.config import CollectorType, ExperimentConfig
from llm_instrumentation.mrm.config.schema import LabellerConfig, OutputConfig
from llm_instrumentation.mrm.events import read_events
from llm_instrumentation.mrm.parser import normalise_rows
from llm_instrumentation.mrm.processing import Settings, process
from llm_instrumentation.mrm.reporter import load_sweep, run_exporter, verify_manifest
from llm_instrumentation.mrm.runner import SweepListener, run_sweep
from llm_instrumentation.mrm.runs import INCOMPLETE, RunFolder
from llm_instrumentation.mrm.schema import Kind, RunValidity, arrow_schema

pytestmark = pytest.mark.usefixtures("plain_pages")

ROOT = Path(__file__).resolve().parents[2]
MODEL = {
    "id": "tiny",
    "engine": "transformers",
    "dtype": "float32",
    "random": {
        "architecture": "llama", "hidden_size": 64, "intermediate_size": 128,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "vocab_size": 300,
    },
}  # fmt: skip
ALONE = {"baseline_duration_s": 0.2}
FILES = {
    "trace.parquet", "region_map.parquet", "kv_block_lifecycle.parquet", "metrics.csv",
    "metadata.json", "manifest.json", "retention_histogram.png", "working_set.png",
    "write_once.png", "report.html",
}  # fmt: skip


def experiment(base: Path, **sections) -> dict:
    return {
        "experiment": {"name": "a test"},
        "models": [MODEL],
        "sweep": {"context_lengths": [16], "output_tokens": [6]},
        "prompts": {"limit": 1},
        "collector": {"primary": "torch", "fallback": None, "fallback_2": None},
        "telemetry": ALONE | {"paired_untraced_run": False},  # it takes longer than all else
        "output": {"base_dir": str(base / "results")},
        **sections,
    }


def config(base: Path, **sections) -> ExperimentConfig:
    return ExperimentConfig.model_validate(experiment(base, **sections))


def command(*arguments) -> tuple[int, str, str]:
    """Runs ``mrm-trace`` in this process. Returns its exit code, output and errors."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        with pytest.raises(SystemExit) as ended:
            mrm_trace([str(argument) for argument in arguments])
    return ended.value.code, out.getvalue(), err.getvalue()


def written(base: Path, **sections) -> Path:
    path = base / "experiment.yaml"
    path.write_text(yaml.safe_dump(experiment(base, **sections)), encoding="utf-8")
    return path


def folders(base: Path) -> list[RunFolder]:
    return [RunFolder(path) for path in sorted((base / "results" / "tiny").iterdir())]


@pytest.fixture(autouse=True)
def no_pictures(request, monkeypatch):
    """Drawing takes longer than a run. `finished` has figures, and tests marked with `figures`."""
    if request.node.get_closest_marker("figures") is None:
        monkeypatch.setattr(run_exporter, "generate_all_figures", lambda *_: [])


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The file of an experiment that ran once, the outcome that the command told, the folder."""
    base = tmp_path_factory.mktemp("finished")
    sweep = {"context_lengths": [16], "output_tokens": [6], "batch_sizes": [2]}
    path = written(base, sweep=sweep, telemetry=ALONE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(drawing, "_DPI", 30)  # pixels take long to compress
        code, out, _ = command("run", "--config", path, "--json")
    assert code == ExitCode.OK
    told = json.loads(out)
    return path, told["runs"][0], RunFolder(Path(told["runs"][0]["run_dir"]))


# A run that goes well.


def test_a_run_leaves_the_documented_files(finished):
    _, outcome, folder = finished
    assert outcome["status"] == "finished"
    assert {path.name for path in folder.path.iterdir()} >= FILES
    assert verify_manifest(folder.path) == []
    for name in ("trace", "region_map", "kv_block_lifecycle"):
        check_parquet_schema(folder.path / f"{name}.parquet", name)
    assert not (folder.path / INCOMPLETE).exists()


def test_the_torch_tracer_labels_each_row(finished):
    _, outcome, folder = finished
    whole = {"rows": 1.0, "bytes": 1.0}
    assert outcome["label_coverage"] == folder.metadata()["labels"]["coverage"] == whole
    assert not any("label_coverage" in reason for reason in outcome["validity_reasons"])
    report = (folder.path / "report.html").read_text(encoding="utf-8")
    assert "100 % of the rows, 100 % of the bytes" in report


def test_weights_are_written_once_and_kept_for_the_run(finished):
    _, _, folder = finished
    metrics = pd.read_csv(folder.path / "metrics.csv").set_index("region_type")
    phases = {one["phase"]: one for one in folder.metadata()["phases"]}
    generation = (phases["generation"]["end_ns"] - phases["generation"]["start_ns"]) / 1e9
    assert metrics.loc["weight", "n_regions"] == 1
    assert metrics.loc["weight", "write_once_ratio_mean"] == 1.0
    assert metrics.loc["weight", "retention_p99_s"] >= 0.9 * generation
    assert metrics.loc["activation", "retention_p50_s"] < generation / 10


def test_no_weight_is_stored_in_the_generation(finished):
    _, _, folder = finished
    trace = pd.read_parquet(folder.trace)
    weights = trace[trace.region_type == "weight"]
    stored = weights[weights.op_type == "store"]
    assert set(stored.phase) == {"weight_load"}
    expected = sum(
        record.metadata.get("weight_bytes", 0)
        for record in read_events(folder.raw / "events.jsonl")
    )
    rotary = stored.length_bytes.sum() - expected
    assert 0 <= rotary < 1024  # the table of the position embedding, which is a buffer


def test_the_cache_grows_with_the_tokens(finished):
    _, _, folder = finished
    trace = pd.read_parquet(folder.trace)
    cache = trace[(trace.region_type == "kv_cache") & (trace.op_type == "store")]
    held = cache.groupby("token_index").length_bytes.sum()
    heads, size, layers, batch = 2, 16, 2, 2
    for token in range(1, 6):
        # For each token the whole cache is stored again, one token longer.
        assert held[token] >= 2 * layers * batch * heads * size * 4 * (16 + token)
    assert held.iloc[1:].is_monotonic_increasing


def test_the_metadata_tell_what_ran_and_what_it_cost(finished):
    _, outcome, folder = finished
    told = folder.metadata()
    assert told["run_id"] == folder.run_id
    assert told["engine"]["engine_name"] == "transformers"
    assert told["collector"]["collector_type"] == "torch"
    assert not Path(told["collector"]["output_file"]).is_absolute()
    assert told["collector_steps"] == [{"collector": "torch", "used": True, "reason": None}]
    assert told["trace"] == {
        "kind": "accesses", "rows": outcome["rows"], "rows_left_out": 0,
        "unknown_policy": "log_and_skip",
    }  # fmt: skip
    assert told["labels"]["renumbered_regions"] == 0
    assert told["generations"][0]["output_tokens"] == 12
    assert told["run_validity"] in ("clean", "marginal", "contaminated")
    paired = told["observer_effect_summary"]["paired_untraced_run"]
    assert paired["speed_kept"] > 0
    of_two_times = paired["generation_s"] / paired["traced_generation_s"]
    assert paired["speed_kept"] != of_two_times, "it is by tokens in turns"
    assert told["software"]["torch"]
    assert told["hardware"]["memory_bytes"] > 0


def test_the_process_monitor_always_runs_too(finished):
    _, _, folder = finished
    samples = pd.read_csv(folder.raw / "process_samples.csv")
    assert set(samples.pid) == {os.getpid()}
    assert (samples.rss_mb > 0).all()


def test_a_finished_run_is_not_run_again(finished):
    path, _, folder = finished
    before = sorted(folder.path.parent.iterdir())
    code, out, _ = command("run", "--config", path, "--json")
    (again,) = json.loads(out)["runs"]
    assert (code, again["status"], again["run_dir"]) == (ExitCode.OK, "skipped", str(folder.path))
    assert sorted(folder.path.parent.iterdir()) == before
    _, out, _ = command("plan", "--config", path, "--json")
    assert json.loads(out)["runs"][0]["finished_as"] == folder.run_id


# Commands that read results.


def test_analyse_computes_the_tables_anew(finished, tmp_path):
    _, _, folder = finished
    copy = tmp_path / "copy"
    shutil.copytree(folder.path, copy)
    (copy / "metrics.csv").write_text("spoilt", encoding="utf-8")
    code, out, _ = command("analyse", "--input", copy, "--json", "--metrics", "read_frequency")
    (told,) = json.loads(out)["runs"]
    assert code == ExitCode.OK
    assert list(told["tables"]) == ["read_freq"]
    expected = compute_all(folder.trace)["read_freq"]
    assert [row["total_reads"] for row in told["tables"]["read_freq"]] == list(expected.total_reads)
    assert verify_manifest(copy) == []
    assert (copy / "metrics.csv").read_bytes() == (folder.path / "metrics.csv").read_bytes()


def test_analyse_reads_a_bare_trace_and_writes_nothing(finished, tmp_path):
    _, _, folder = finished
    shutil.copy(folder.trace, tmp_path / "some.parquet")
    code, out, _ = command("analyse", "--input", tmp_path / "some.parquet")
    assert code == ExitCode.OK
    assert "retention_summary" in out
    assert [path.name for path in tmp_path.iterdir()] == ["some.parquet"]


def test_a_torn_trace_is_a_failed_run_and_the_others_go_on(finished, tmp_path):
    _, _, folder = finished
    for name in ("a", "b"):
        shutil.copytree(folder.path, tmp_path / name)
    trace = tmp_path / "a" / "trace.parquet"
    trace.write_bytes(trace.read_bytes()[:-100])
    code, out, _ = command("analyse", "--input", tmp_path, "--json")
    torn, whole = json.loads(out)["runs"]
    assert code == ExitCode.RUN_FAILED
    assert "trace.parquet" in torn["error"]
    assert whole["error"] is None


def test_report_is_one_page_over_all_runs(finished, tmp_path):
    _, _, folder = finished
    results = folder.path.parents[1]
    code, out, _ = command("report", "--input", results, "--output", tmp_path / "out")
    assert code == ExitCode.OK
    page = tmp_path / "out" / "report.html"
    assert out.startswith(f"{page}: ")
    assert folder.run_id in page.read_text(encoding="utf-8")


def test_report_lists_the_runs_that_do_not_count(finished, tmp_path):
    _, _, folder = finished
    shutil.copytree(folder.path, tmp_path / "results" / "tiny" / folder.run_id)
    broken = RunFolder(tmp_path / "results" / "tiny" / "broken")
    broken.mark("interrupted", "interrupted while labelling")
    results, out = tmp_path / "results", tmp_path / "out"
    code, said, err = command("report", "--input", results, "--output", out)
    assert code == ExitCode.OK
    assert "left out" in said
    assert "broken is left out: not finished (interrupted: interrupted while labelling)" in err
    _, said, _ = command("report", "--input", results, "--output", out, "--json")
    assert "broken" in json.loads(said)["left_out"]


@pytest.mark.parametrize("name", ["hf", "zenodo"])
def test_export_packs_finished_runs(finished, tmp_path, name):
    _, _, folder = finished
    results = folder.path.parents[1]
    code, out, _ = command(
        "export", "--input", results, "--format", name, "--output", tmp_path / "out", "--json"
    )
    told = json.loads(out)
    assert code == ExitCode.OK
    assert told["runs"] == [folder.run_id]
    assert Path(told["path"]).exists()


def test_each_export_has_its_own_place(finished, tmp_path, monkeypatch):
    _, _, folder = finished
    monkeypatch.chdir(tmp_path)
    for name in ("hf", "zenodo"):
        code, _, err = command("export", "-i", folder.path.parents[1], "-f", name)
        assert code == ExitCode.OK, err
        assert any((tmp_path / "dist" / name).iterdir())


def test_export_lists_what_it_made_and_what_it_left_out(finished, tmp_path):
    _, _, folder = finished
    shutil.copytree(folder.path, tmp_path / "results" / folder.run_id)
    RunFolder(tmp_path / "results" / "broken").mark("failed", "no space")
    code, out, err = command("export", "-i", tmp_path / "results", "-o", tmp_path / "out")
    assert code == ExitCode.OK
    assert out.startswith(f"{tmp_path / 'out'}: 1 run, ")
    assert "broken is left out: not finished (failed: no space)" in err


# Sweeps.


def test_a_sweep_goes_on_where_it_ended(tmp_path):
    path = written(
        tmp_path,
        sweep={
            "context_lengths": [8, 16], "output_tokens": [4], "repetitions": 2, "warmup_runs": 1,
        },
    )  # fmt: skip
    code, out, _ = command("run", "--config", path, "--json")
    statuses = [run["status"] for run in json.loads(out)["runs"]]
    assert code == ExitCode.OK
    assert statuses == ["warmed_up", "finished", "finished"] * 2

    lost = folders(tmp_path)[0]
    assert "_ctx16_" in lost.run_id
    (lost.path / "region_map.parquet").write_bytes(b"spoilt")
    code, out, _ = command("run", "--config", path, "--json")
    runs = json.loads(out)["runs"]
    assert [run["status"] for run in runs] == [
        "skipped", "skipped", "skipped", "warmed_up", "finished", "skipped",
    ]  # fmt: skip
    defect = lost.defect()
    assert defect is not None
    assert defect.state == "damaged"
    assert "region_map.parquet" in defect.reason


def test_force_runs_again_beside_the_earlier(tmp_path):
    path = written(tmp_path)
    assert command("run", "--config", path)[0] == ExitCode.OK
    time.sleep(1.1)  # the names of runs have a resolution of one second
    code, _, _ = command("run", "--config", path, "--force", "--only", "rep0")
    assert code == ExitCode.OK
    assert [folder.defect() for folder in folders(tmp_path)] == [None, None]


def test_a_run_that_fails_is_marked_and_the_sweep_goes_on(tmp_path):
    absent = {"id": "absent", "engine": "transformers", "hf_repo": "nobody/nothing"}
    path = written(tmp_path, models=[absent, MODEL])
    code, _, err = command("run", "--config", path)
    assert code == ExitCode.RUN_FAILED
    assert "hf download nobody/nothing" in err
    (broken,) = (tmp_path / "results" / "absent").iterdir()
    defect = RunFolder(broken).defect()
    assert defect is not None
    assert (defect.state, "hf download nobody/nothing" in defect.reason) == ("failed", True)
    assert folders(tmp_path)[0].defect() is None


def test_a_run_with_too_few_rows_fails(tmp_path):
    path = written(tmp_path, labeller={"min_sample_count": 10**9})
    code, out, _ = command("run", "--config", path, "--json")
    (run,) = json.loads(out)["runs"]
    assert code == ExitCode.RUN_FAILED
    assert re.fullmatch(r"\d+ rows, and labeller.min_sample_count is 1000000000", run["reason"])
    assert folders(tmp_path)[0].trace.exists()


@pytest.mark.figures
def test_other_codecs_and_no_figures(tmp_path):
    """An experiment may choose the codec of its Parquet files, and have no figures."""
    import pyarrow.parquet as pq

    output = {
        "base_dir": str(tmp_path / "results"),
        "compression": "snappy",
        "formats": {"figures": "none"},
    }
    (outcome,) = run_sweep(config(tmp_path, output=output))
    assert outcome.status == "finished"
    run = Path(outcome.run_dir)
    assert not list(run.glob("*.png"))
    for name in ("trace", "region_map"):
        chunk = pq.ParquetFile(run / f"{name}.parquet").metadata.row_group(0).column(0)
        assert chunk.compression == "SNAPPY"


# The choice of the collector.


def skip_unless_absent(kind: CollectorType) -> None:
    if build_collector(kind, config(Path()).collector).is_available():
        pytest.skip(f"{kind.value} can run here")


def skip_unless_here(kind: CollectorType) -> None:
    reason = build_collector(kind, config(Path()).collector).unavailable_reason()
    if reason:
        pytest.skip(f"{kind.value}: {reason}")


def test_each_step_of_a_fallback_is_explained(tmp_path):
    skip_unless_absent(CollectorType.PERF_MEM)
    path = written(
        tmp_path, collector={"primary": "perf_mem", "fallback": "torch", "fallback_2": None}
    )
    code, _, err = command("run", "--config", path)
    assert code == ExitCode.OK
    assert "perf_mem cannot run here: " in err
    told = folders(tmp_path)[0].metadata()
    first, second = told["collector_steps"]
    assert (first["collector"], first["used"], second["collector"]) == ("perf_mem", False, "torch")
    assert first["reason"]
    assert told["collector"]["fallback_reason"] == first["reason"]


def test_without_a_collector_the_exit_code_is_3(tmp_path):
    skip_unless_absent(CollectorType.PERF_MEM)
    path = written(
        tmp_path, collector={"primary": "perf_mem", "fallback": None, "fallback_2": None}
    )
    code, out, _ = command("run", "--config", path, "--json")
    assert code == json.loads(out)["exit_code"] == ExitCode.NOTHING_COLLECTED
    assert folders(tmp_path)[0].defect() is not None


@pytest.mark.figures
@pytest.mark.usefixtures("prepared_engines")
def test_the_process_monitor_alone_is_a_run_without_a_trace(tmp_path):
    path = written(
        tmp_path, collector={"primary": "process_monitor", "fallback": None, "fallback_2": None}
    )
    code, _, err = command("run", "--config", path)
    assert code == ExitCode.OK
    assert "no memory trace" in err
    (folder,) = folders(tmp_path)
    assert folder.defect() is None
    assert folder.metadata()["trace"] == {"kind": None, "rows": 0}
    assert len(pd.read_csv(folder.raw / "process_samples.csv")) > 0
    assert (folder.path / "process_memory.png").is_file()
    report = (folder.path / "report.html").read_text(encoding="utf-8")
    assert "There is no memory trace" in report
    assert "Figure: process memory" in report
    assert "did not come to its end" not in report
    assert folder.metadata()["observer_effect_summary"]["target_rss_mb_peak"] > 0


@pytest.mark.parametrize("kind", [CollectorType.PAGE_FAULTS, CollectorType.WRITE_SETS])
def test_collectors_from_outside_see_the_model_s_own_addresses(tmp_path, kind, request):
    skip_unless_here(kind)
    if kind is CollectorType.WRITE_SETS:  # a forked process has touched its pages already
        request.getfixturevalue("prepared_engines")
    large = {**MODEL, "random": {**MODEL["random"], "hidden_size": 256, "num_hidden_layers": 4}}
    (outcome,) = run_sweep(
        config(
            tmp_path,
            models=[large],
            sweep={"context_lengths": [64], "output_tokens": [100]},
            collector={
                "primary": kind.value, "fallback": None, "fallback_2": None,
                # Each token's cache lives for one token, so look often at many tokens.
                "write_sets": {"interval_ms": 10},
            },
        )
    )  # fmt: skip
    assert outcome.status == "finished", outcome.reason
    run = RunFolder(Path(outcome.run_dir))
    weights, cached = [], []
    for record in read_events(run.raw / "events.jsonl"):
        weights += record.metadata.get("weight_ranges", [])
        cached += record.metadata.get("kv_ranges", [])
    assert weights
    assert cached
    trace = pd.read_parquet(run.trace)
    pages = trace[trace.region_type == "weight"].address_page.to_numpy()
    # Loading wrote each page of the weights. A page does not fault again if the process has used it
    # before, for a tensor that was freed.
    inside = np.concatenate([np.arange((start >> 12) + 1, end >> 12) for start, end in weights])
    assert np.isin(inside, pages).mean() > 0.8
    # No other page that was touched while the weights were loaded is called a weight.
    first, last = np.array([(start >> 12, (end - 1) >> 12) for start, end in weights]).T
    assert all(((first <= page) & (page <= last)).any() for page in np.unique(pages))
    if kind is CollectorType.WRITE_SETS:
        assert (trace.region_type == "kv_cache").any()
    assert run.metadata()["observer_effect_summary"]["n_target_samples"] > 0


@pytest.mark.usefixtures("prepared_engines")
def test_memray_watches_a_child_and_few_labels_leave_its_run_out(tmp_path):
    """A run with few labels is contaminated, also if telemetry was off."""
    skip_unless_here(CollectorType.MEMRAY)
    memray = {
        "primary": "memray", "fallback": None, "fallback_2": None,
        "memray": {"native_traces": False},
    }  # fmt: skip
    path = written(tmp_path, telemetry={"capture": False}, collector=memray)
    code, out, _ = command("run", "--config", path, "--json")
    (run,) = json.loads(out)["runs"]
    assert code == ExitCode.OK, out
    assert (run["status"], run["kind"]) == ("finished", "allocations")
    assert run["rows"] > 0
    # Nearly all its rows are Python's own memory, so the tables say little about the model.
    (folder,) = folders(tmp_path)
    known = folder.metadata()
    assert run["label_coverage"] == known["labels"]["coverage"]
    assert run["label_coverage"]["rows"] < 0.9
    assert run["validity"] == known["run_validity"] == "contaminated"
    assert any("label_coverage" in reason for reason in known["validity"]["failure_reasons"])
    assert any("have a region type where clean has" in way for way in run["ways_to_clean"])
    report = (folder.path / "report.html").read_text(encoding="utf-8")
    assert "Telemetry was off" in report
    assert "label_coverage" in report
    sweep = load_sweep(tmp_path / "results")
    assert sweep.aggregates.empty
    assert "label_coverage" in sweep.left_out[0].reason


def test_the_phase_of_the_load_makes_no_row_a_weight(tmp_path):
    """A process touches much memory while it loads a model. Only addresses show the weights."""
    pages = np.arange(50, dtype=np.uint64) << np.uint64(12)
    touches = make_batch(
        arrow_schema(Kind.FIRST_TOUCHES), "touches", 0,
        times=np.arange(50), addresses=pages, op_type="store", phase="weight_load",
    )  # fmt: skip
    metadata = {}
    made = process(
        Settings(LabellerConfig(min_sample_count=1)),
        RunFolder(tmp_path),
        pa.RecordBatchReader.from_batches(touches.schema, [touches]),
        [],
        metadata,
    )
    assert made.problem is None
    assert metadata["labels"]["rows"] == {"unknown": 50}
    assert metadata["labels"]["coverage"] == {"rows": 0.0, "bytes": 0.0}


# Runs that are interrupted.


@pytest.fixture
def running(tmp_path, request):
    """``mrm-trace run``, in the middle of many generations.

    What was started, the process that runs it, and the experiment.
    """
    kind = getattr(request, "param", CollectorType.TORCH)
    skip_unless_here(kind)
    (tmp_path / "prompts.txt").write_text("a prompt\n" * 200, encoding="utf-8")
    path = written(
        tmp_path,
        prompts={"source": str(tmp_path / "prompts.txt")},
        telemetry={"baseline_duration_s": 0.1, "paired_untraced_run": False},
        collector={
            "primary": kind.value, "fallback": None, "fallback_2": None,
            "write_sets": {"interval_ms": 60_000},  # the only look comes when it is stopped
        },
    )  # fmt: skip
    # The command is a forked process. Its engine, if that is a child, is one that imports torch.
    code = (
        f"import os, sys; sys.executable = {sys.executable!r}; print(os.getpid(), flush=True); "
        "from llm_instrumentation.cli import main; main(sys.argv[1:])"
    )
    process = subprocess.Popen(
        [prepared.python(), "-c", code, "trace", "run", "--config", str(path)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        deadline = time.monotonic() + 120
        while not any(
            "generation_end" in log.read_text(encoding="utf-8")
            for log in tmp_path.glob("results/tiny/*/raw/events.jsonl")
        ):
            assert process.poll() is None, process.communicate()[1]
            assert time.monotonic() < deadline
            time.sleep(0.02)
        yield process, psutil.Process(pid), path
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize(
    ("running", "number"),
    [
        (CollectorType.TORCH, signal.SIGINT),
        (CollectorType.PAGE_FAULTS, signal.SIGINT),
        (CollectorType.WRITE_SETS, signal.SIGTERM),
    ],
    indirect=["running"],
    ids=str,
)
def test_a_signal_keeps_the_raw_data_and_says_so(running, number, tmp_path):
    process, forked, path = running
    children = forked.children(recursive=True)
    process.send_signal(number)
    _, err = process.communicate(timeout=240)
    assert process.returncode == ExitCode.INTERRUPTED
    assert "interrupted" in err
    assert "Traceback" not in err
    assert psutil.wait_procs(children, timeout=60)[1] == []
    (folder,) = folders(tmp_path)
    defect = folder.defect()
    assert defect is not None
    assert defect.state == "interrupted"
    assert defect.reason.startswith("interrupted while collecting with ")

    code, out, _ = command("analyse", "--input", folder.path, "--json")
    (told,) = json.loads(out)["runs"]
    assert code == ExitCode.OK
    assert "weight" in {row["region_type"] for row in told["tables"]["working_set_summary"]}
    assert folder.defect() == defect  # analysing does not make it a finished run
    assert folder.metadata()["parameters"]["model"]["id"] == "tiny"
    report = (folder.path / "report.html").read_text(encoding="utf-8")
    assert "This run did not come to its end (interrupted: " in report

    shorter = experiment(tmp_path)
    path.write_text(yaml.safe_dump(shorter), encoding="utf-8")
    assert command("run", "--config", path)[0] == ExitCode.OK
    assert sorted(one.defect() is None for one in folders(tmp_path)) == [False, True]


def test_a_killed_run_is_incomplete_and_its_trace_is_that_up_to_the_kill(running, tmp_path):
    process, forked, _ = running
    (folder,) = folders(tmp_path)
    code, out, _ = command("analyse", "--input", folder.path, "--json")
    assert code == ExitCode.RUN_FAILED, "it is under way"
    assert "is being written" in json.loads(out)["runs"][0]["error"]
    assert not folder.trace.exists()

    forked.kill()
    assert process.wait() == -signal.SIGKILL
    defect = folder.defect()
    assert defect is not None
    assert defect.state == "running"
    (spool,) = folder.raw.glob("torch_trace.parquet.*.spool")

    code, out, _ = command("analyse", "--input", folder.path, "--json")
    (told,) = json.loads(out)["runs"]
    assert (code, told["error"]) == (ExitCode.OK, None)
    trace = pd.read_parquet(folder.trace)
    assert {"weight", "kv_cache", "activation"} <= set(trace.region_type)
    assert {"weight_load", "generation"} <= set(trace.phase)
    assert spool.exists(), "raw data stay"
    assert folder.defect() == defect

    # All rows have labels, but the run has no class: the cost of watching was only in the memory of
    # the killed process.
    metadata = folder.metadata()
    assert metadata["labels"]["coverage"] == {"rows": 1.0, "bytes": 1.0}
    assert metadata["run_validity"] is told["validity"] is None
    (reason,) = metadata["validity"]["failure_reasons"]
    assert reason.startswith("telemetry was not written before the run broke off")
    assert metadata["validity"]["observer_cpu_overhead_pct_max"] is None
    assert told["validity_reasons"] == [reason]
    report = html.unescape((folder.path / "report.html").read_text(encoding="utf-8"))
    assert "validity not measured" in report
    assert f"The run is not classed, because:</p>\n<ul><li>{reason}</li></ul>" in report
    assert "Telemetry was off" not in report
    assert f"  no class: {reason}" in command("analyse", "--input", folder.path)[1].splitlines()


@pytest.fixture
def tracefs():
    """Mounts tracefs for tracepoints.

    A killed run with tracepoints leaves text that can be read. perf would leave an unfinished file.
    """
    place = Path("/sys/kernel/tracing")
    if (place / "trace_pipe").exists():
        yield
        return
    done = subprocess.run(
        ["mount", "-t", "tracefs", "tracefs", place], capture_output=True, text=True
    )
    if done.returncode != 0:
        pytest.skip(f"tracefs is not mounted, and cannot be: {done.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", place], check=True)


@pytest.mark.usefixtures("tracefs")
@pytest.mark.parametrize("running", [CollectorType.PAGE_FAULTS], indirect=True, ids=str)
def test_a_killed_run_with_few_labels_is_contaminated(running, tmp_path):
    """Most pages belong to Python around the tiny model, and have no type.

    This is enough to class the run, although its telemetry is lost.
    """
    process, forked, _ = running
    (folder,) = folders(tmp_path)
    children = forked.children(recursive=True)
    forked.kill()
    assert process.wait() == -signal.SIGKILL
    assert psutil.wait_procs(children, timeout=60)[1] == []

    code, out, err = command("analyse", "--input", folder.path)
    assert code == ExitCode.OK, err
    metadata = folder.metadata()
    assert metadata["labels"]["coverage"]["rows"] < 0.9
    assert metadata["run_validity"] == "contaminated"
    *labels, telemetry = reasons = metadata["validity"]["failure_reasons"]
    assert labels and all(reason.startswith("label_coverage") for reason in labels)
    assert telemetry.startswith("telemetry was not written")
    report = html.unescape((folder.path / "report.html").read_text(encoding="utf-8"))
    assert "Contaminated: this run is kept" in report
    assert all(f"<li>{reason}</li>" in report for reason in reasons)
    assert f"  contaminated: {'; '.join(reasons)}" in out.splitlines()
    assert "    to be clean: " in out


class BrokenOff(SweepListener):
    """Interrupts a run when it comes to a stage."""

    def __init__(self, at):
        self.at = at

    def stage(self, run, name):
        if name == self.at:
            raise KeyboardInterrupt


@pytest.mark.parametrize("at", ["labelling", "analysing"])
def test_a_run_is_classed_once_its_labels_are_known(tmp_path, at):
    with pytest.raises(KeyboardInterrupt):
        run_sweep(config(tmp_path), listener=BrokenOff(at))
    (folder,) = folders(tmp_path)
    broken = folder.metadata()
    assert broken["observer_effect_summary"]["n_target_samples"] > 0
    assert ("labels" in broken) == ("run_validity" in broken) == (at == "analysing")

    code, out, _ = command("analyse", "--input", folder.path, "--json")
    (told,) = json.loads(out)["runs"]
    assert code == ExitCode.OK
    known = folder.metadata()
    assert known["labels"]["coverage"] == {"rows": 1.0, "bytes": 1.0}
    assert known["run_validity"] == told["validity"] in {one.value for one in RunValidity}
    assert not any("telemetry" in reason for reason in told["validity_reasons"])


@pytest.mark.parametrize("kib", [2, 20], ids=["at the start", "while collecting"])
def test_a_run_on_a_full_disk_fails_and_says_so(tmp_path, kib):
    path = written(tmp_path)
    # A limit on the size of files has the effect of a full disk.
    limited = (
        "import resource, sys; from llm_instrumentation.cli import mrm_trace; "
        f"resource.setrlimit(resource.RLIMIT_FSIZE, ({kib} << 10, {kib} << 10)); "
        "mrm_trace(['run', '--config', sys.argv[1]])"
    )
    done = subprocess.run(
        [prepared.python(), "-c", limited, str(path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == ExitCode.RUN_FAILED
    assert "Traceback" not in done.stderr
    (line,) = [line for line in done.stderr.splitlines() if "failed" in line]
    assert line.endswith("free some room, or set output.base_dir to another disk")
    (folder,) = folders(tmp_path)
    defect = folder.defect()
    assert defect is not None
    assert defect.state == "failed"


def test_a_folder_that_cannot_be_made_is_a_failed_run(tmp_path):
    path = written(tmp_path, output={"base_dir": "/proc/results"})
    code, out, _ = command("run", "--config", path, "--json")
    (run,) = json.loads(out)["runs"]
    assert code == ExitCode.RUN_FAILED
    assert "/proc/results" in run["reason"]


# The first examples for users.


def test_the_smallest_experiment_runs_as_the_readme_says(tmp_path, monkeypatch):
    """Narrower layers of as many bytes of keys and values: the weights of the file take 1 GB."""
    monkeypatch.chdir(tmp_path)
    of_the_file = yaml.safe_load((ROOT / "examples" / "minimal.yaml").read_text(encoding="utf-8"))
    (model,) = of_the_file["models"]
    narrow = {"hidden_size": 1024, "num_attention_heads": 8, "intermediate_size": 256}
    assert model["random"].keys() >= narrow.keys()
    model["random"] |= narrow
    path = tmp_path / "minimal.yaml"
    path.write_text(yaml.safe_dump(of_the_file), encoding="utf-8")
    code, out, _ = command("run", "--config", path, "--json")
    (run,) = json.loads(out)["runs"]
    assert code == ExitCode.OK
    assert (run["collector"], run["kind"]) == ("torch", "accesses")
    metrics = pd.read_csv(Path(run["run_dir"]) / "metrics.csv").set_index("region_type")
    assert metrics.loc["weight", "write_once_ratio_mean"] == 1.0
    assert metrics.loc["weight", "retention_p50_s"] > metrics.loc["activation", "retention_p99_s"]
    # A token has keys and values, in 2 layers with 8 heads of 128 floats.
    growth = pd.read_parquet(Path(run["run_dir"]) / "tables" / "kv_growth.parquet")
    per_token = 2 * 2 * 8 * 128 * 4
    assert growth.live_bytes.iloc[0] == 128 * per_token
    assert set(growth.live_bytes.diff().dropna()) == {per_token}
    text = html.unescape(Path(run["report"]).read_text(encoding="utf-8"))
    text = text.replace("\u202f", " ")  # a narrow no-break space stands before each unit
    of_the_run = r"\((the run's length|[\d.]+ % of the run's [\d.]+ m?s)\)"
    assert re.search(
        rf"Written once, read \S+ times per write, retained \S+ m?s {of_the_run}", text
    )
    assert "grown from 2 MiB to 2.47 MiB over 31 steps" in text
    assert "tokens/s untraced" in text  # the speed of the run without a tracer
    ways = run["ways_to_clean"]  # empty on an otherwise idle machine
    assert all(way in text for way in ways)
    assert (run["validity"] == "clean") == (ways == [])
    assert re.search(rf"retained \S+ [mµ]s at the median and \S+ [mµ]?s at p99 {of_the_run}", text)


@pytest.mark.parametrize("name", ["demo_tinyllama", "demo_qwen_hf", "demo_perf_mem"])
def test_a_demo_without_its_model_says_how_to_get_it(tmp_path, monkeypatch, capsys, name):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "no-cache"))
    assert demo(name, "--model", "nobody/nothing") == 1
    err = capsys.readouterr().err
    assert "nobody/nothing is not here" in err
    assert "hf download" in err


@pytest.mark.parametrize("flag", ["--ctx", "--tokens"])
def test_a_demo_refuses_lengths_below_1(capsys, flag):
    with pytest.raises(SystemExit):
        demo("demo_tinyllama", flag, "-5")
    assert f"argument {flag}: -5 is below 1" in capsys.readouterr().err


def test_a_demo_runs_with_random_weights(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    flags = ["--random-weights", "--ctx", "16", "--tokens", "2", "--no-native-traces"]
    assert demo("demo_qwen_hf", *flags, "--out", "out", vocab_size=300) == 0
    (folder,) = (tmp_path / "out" / "qwen2.5-0.5b-instruct-random").iterdir()
    known = RunFolder(folder).metadata()
    assert len(known["generations"]) == 5
    out = capsys.readouterr().out
    assert "region_type" in out
    assert f"The run is {known['run_validity']}." in out
    for reason in known["validity"]["failure_reasons"]:
        assert f"because {reason}" in out
    assert out.count("to be clean: ") == len(known["validity"]["failure_reasons"])


def test_a_demo_says_what_would_make_a_contaminated_run_clean(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        "llm_instrumentation.mrm.runner._run_untraced",
        lambda *_: {"generation_s": 1e-4, "rss_mb_peak": 1e6},
    )
    narrow = {"hidden_size": 112, "intermediate_size": 128, "vocab_size": 300}
    flags = ["--random-weights", "--ctx", "16", "--tokens", "2", "--no-native-traces"]
    assert demo("demo_qwen_hf", *flags, "--out", "out", **narrow) == 0
    out = capsys.readouterr().out
    assert "The run is contaminated." in out
    assert re.search(r"because observer_cpu [\d.]+ % is not below 20 %", out)
    assert re.search(
        r"to be clean: tracing slowed the model by [\d.]+ % where clean is below 10 %", out
    )


def demo(name: str, *arguments: str, **architecture: int) -> int:
    """Runs a demo, with other sizes of its model."""
    scripts = ROOT / "notebooks" / "scripts"
    sys.path.insert(0, str(scripts))
    try:
        found = runpy.run_path(str(scripts / f"{name}.py"))["DEMO"]
        found = dataclasses.replace(found, architecture={**found.architecture, **architecture})
        return found.main(list(arguments))
    finally:
        sys.path.remove(str(scripts))


def test_experiments_from_python(tmp_path):
    """An Experiment validates, runs, analyses and reports from Python."""
    wanted = Experiment(config(tmp_path))
    assert wanted.validate()
    (outcome,) = wanted.run()
    tables = wanted.analyse(["retention_duration"])
    assert list(tables) == [outcome.run_id]
    assert "retention_summary" in tables[outcome.run_id]
    assert wanted.report(tmp_path / "reports").is_file()


def test_a_cache_with_too_many_pages_for_a_table_loses_only_that_table(tmp_path):
    row = {"run_id": "r", "sample_id": 0, "timestamp_ns": 0, "address": 1 << 40,
           "address_page": 1 << 28, "op_type": "store", "region_type": "kv_cache", "region_id": 2,
           "length_bytes": 65 << 30}  # fmt: skip
    table = pa.Table.from_pylist(list(normalise_rows([row])), schema=arrow_schema(Kind.ACCESSES))
    settings = Settings(
        LabellerConfig(min_sample_count=1), output=OutputConfig(formats={"figures": "none"})
    )
    told = []
    folder = RunFolder(tmp_path)
    made = process(settings, folder, table.to_reader(), [], {}, warn=told.append)
    assert made.problem is None
    assert any("kv_block_lifecycle.parquet is empty" in line for line in told), told
    assert pq.read_table(tmp_path / "kv_block_lifecycle.parquet").num_rows == 0
    assert pq.read_table(tmp_path / "region_map.parquet").num_rows == 1
    assert not verify_manifest(tmp_path)


def test_a_run_warns_of_regions_with_new_ids(tmp_path):
    rows = [
        {"run_id": "r", "sample_id": number, "timestamp_ns": number, "address": page << 12,
         "address_page": page, "op_type": "store", **more}
        for number, (page, more) in enumerate([
            (1, {"symbol": "malloc"}),  # a runtime region, which gets the id 2
            (2, {"region_type": "kv_cache", "region_id": 2}),
        ])
    ]  # fmt: skip
    table = pa.Table.from_pylist(list(normalise_rows(rows)), schema=arrow_schema(Kind.ACCESSES))
    settings = Settings(
        LabellerConfig(min_sample_count=1), output=OutputConfig(formats={"figures": "none"})
    )
    metadata, told = {}, []
    process(settings, RunFolder(tmp_path), table.to_reader(), [], metadata, warn=told.append)
    assert metadata["labels"]["renumbered_regions"] == 1
    assert any("1 region ids of the trace" in line for line in told), told
    regions = pq.read_table(tmp_path / "region_map.parquet", columns=["region_id", "region_type"])
    assert regions.to_pydict() == {"region_id": [2, 3], "region_type": ["runtime", "kv_cache"]}
