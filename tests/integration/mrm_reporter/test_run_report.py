"""Verdicts, exported runs, and the report of a run."""

from __future__ import annotations

import copy
import hashlib
import json
import shutil
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import yaml
from exported_runs import (
    DOCUMENTED_FILES,
    HOSTILE,
    REGION,
    export,
    metadata,
)
from llm_instrumentation.errors import InvalidArgumentError
from llm_instrumentation.mrm import SchemaVersionError
from llm_instrumentation.mrm.config import load_experiment
from llm_instrumentation.mrm.reporter import (
    RunExporter,
    export_trace,
    load_run,
    looks,
    render_run_report,
    summarise_trace,
    verify_manifest,
    write_run_report,
)
from llm_instrumentation.mrm.reporter.figures import (
    FIGURES,
)
from llm_instrumentation.mrm.reporter.reproduce import experiment_of
from llm_instrumentation.mrm.reporter.verdict import verdicts
from llm_instrumentation.mrm.schema import Kind
from report_page import check_page
from synthetic_traces import make_trace, reference_tables

pytestmark = pytest.mark.usefixtures("plain_pages")


# ---- verdicts ---------------------------------------------------------------------------


def verdict(region_type, **shape):
    trace = make_trace(**shape)
    tables = {**reference_tables(trace), **summarise_trace(trace).tables}
    found = verdicts(tables, summarise_trace(trace).span_s)
    return next(one for one in found if one.region_type == region_type)


def test_the_verdict_of_weights_has_their_numbers():
    found = verdict("weight", weight_window_s=12.3, tokens=44)
    assert found.suitability == "high_mrm"
    assert found.sentence == (
        "written once, read 45 times per write, retained 12.3 s (the run's length), "
        "1 MiB in 4 regions."
    )
    assert found.reason == (
        "its write-once ratio 1.00 is at least 0.8 and its p99 retention 12.3 s at least 10 s"
    )


def test_a_short_run_says_what_high_would_need():
    found = verdict("weight", weight_window_s=4.2)
    assert found.suitability == "medium_mrm"
    assert found.reason == (
        "its write-once ratio 1.00 is at least 0.5 and its median retention 4.2 s at least 1 s; "
        "for high_mrm the p99 4.2 s is below 10 s"
    )


def test_activations_are_short_lived_and_rewritten_ones_say_so():
    found = verdict("activation", rewritten=1)
    assert found.suitability == "low_mrm"
    assert "written more than once" in found.sentence
    assert "retained 2 ms (under 0.1 % of the run's 30 s)" in found.sentence
    assert found.reason == (
        "its write-once ratio 0.00 is below 0.5 and its median retention 2 ms is below 1 s"
    )


def test_the_kv_cache_grows():
    found = verdict("kv_cache", prompt_tokens=8, tokens=4, layers=1, kv_bytes_per_token=4096)
    assert "grown from 64 KiB to 88 KiB over 4 steps" in found.sentence


def test_a_verdict_has_only_the_numbers_of_the_given_tables(tables):
    only_pages = {"working_set_summary": tables["working_set_summary"]}
    found = verdicts(only_pages, 1.0)
    assert [one.region_type for one in found] == ["weight", "kv_cache", "activation", "runtime"]
    assert {one.suitability for one in found} == {None}
    assert found[0].sentence == "1 MiB summed over 4 regions."


# ---- exporting a run --------------------------------------------------------------------


def test_an_export_writes_the_documented_files(tmp_path, trace, tables):
    result = export(tmp_path / "run_7", trace, tables)
    assert result.run_id == "run_7"
    assert result.run_dir == tmp_path / "run_7"
    assert set(result.file_names) >= DOCUMENTED_FILES
    assert result.manifest_path == tmp_path / "run_7" / "manifest.json"
    assert all(path.is_file() for path in result.written_files)
    assert result.report_path == tmp_path / "run_7" / "report.html"
    assert verify_manifest(result.run_dir) == []
    manifest = json.loads(result.manifest_path.read_text())
    assert manifest["run_id"] == "run_7"
    named = {one["path"] for one in manifest["files"]}
    assert named == {path.relative_to(result.run_dir).as_posix() for path in result.written_files}
    assert json.loads((result.run_dir / "metadata.json").read_text())["run_id"] == "run_7"
    assert not list(result.run_dir.rglob("*.partial"))


def test_metadata_figures_and_report_can_be_left_out(tmp_path, trace, tables):
    result = RunExporter(tmp_path).export(trace, [], [], tables, figures=False, report=False)
    assert result.run_id == "unknown"
    assert result.report_path is None
    names = {path.name for path in tmp_path.iterdir()}
    assert names == DOCUMENTED_FILES - {
        "metadata.json", "retention_histogram.png", "working_set.png", "write_once.png",
    } | {"manifest.json", "tables"}  # fmt: skip


def test_a_trace_that_is_already_there_is_not_written_again(tmp_path, trace, tables):
    path = export_trace(trace, tmp_path)
    before = path.stat().st_mtime_ns
    result = RunExporter(tmp_path).export(
        None, [REGION], [], tables, figures=False, trace_already_written=True
    )
    assert path.stat().st_mtime_ns == before
    assert "trace.parquet" in result.file_names
    assert verify_manifest(tmp_path) == []


def test_a_trace_that_should_be_there_and_is_missing(tmp_path, tables):
    with pytest.raises(FileNotFoundError, match=r"trace\.parquet"):
        RunExporter(tmp_path).export(None, [], [], tables, trace_already_written=True)


def test_a_trace_of_another_version_is_refused(tmp_path, trace, tables):
    pq.write_table(
        trace.replace_schema_metadata({b"mrm_trace_schema_version": b"2.0"}),
        tmp_path / "trace.parquet",
    )
    with pytest.raises(SchemaVersionError):
        RunExporter(tmp_path).export(None, [], [], tables, trace_already_written=True)


@pytest.mark.parametrize(
    ("broken", "error"),
    [
        ({"metadata": {"model": object()}}, TypeError),
        ({"region_map": [{"region_id": 1}]}, InvalidArgumentError),
        ({"analysis": {}}, KeyError),
        ({"formats": ("gif",)}, ValueError),
    ],
)
def test_an_interrupted_export_leaves_no_manifest(run_dir, trace, tables, broken, error):
    given = {"region_map": [], "kv_lifecycle": [], "analysis": tables, **broken}
    with pytest.raises(error):
        RunExporter(run_dir).export(trace, **given)
    assert not (run_dir / "manifest.json").exists()
    assert [one.kind for one in verify_manifest(run_dir)] == ["missing"]


def test_a_second_export_replaces_the_first(run_dir, tables, trace):
    export(run_dir, trace.slice(0, 50), tables, figures=False, report=False)
    assert verify_manifest(run_dir) == []
    assert pq.read_table(run_dir / "trace.parquet").num_rows == 50


def test_numbers_that_json_does_not_know_become_null(tmp_path, trace, tables):
    """NaN becomes null. Types of numpy, paths and enums become the fitting JSON types."""
    told = {"mean": float("nan"), "n": np.int64(3), "where": Path("x"), "kind": Kind.ACCESSES}
    RunExporter(tmp_path).export(trace, [], [], tables, metadata=told, figures=False, report=False)
    found = json.loads((tmp_path / "metadata.json").read_text())
    assert found == {"mean": None, "n": 3, "where": "x", "kind": "accesses"}


# ---- the report of a run ----------------------------------------------------------------


def test_a_report_tells_the_whole_run(finished):
    page = check_page((finished / "report.html").read_text())
    for said in (
        "Memory trace of tiny", "run_1", "✓ clean",
        "Written once, read 13 times per write, retained 30 s (the run's length)",
        "high_mrm because its write-once ratio 1.00 is at least 0.8",
        "no PMU: use torch", "A Processor", "16 GiB", "no counters of thermal throttling",
        "retention_p99_s", "below 15 %", "mrm-trace run --config experiment.yaml",
        hashlib.sha256((finished / "trace.parquet").read_bytes()).hexdigest(),
    ):  # fmt: skip
        assert said in page.text, said
    drawn = [attributes for tag, attributes in page.elements if tag == "svg"]
    assert len(drawn) == len(FIGURES) - 1  # without the figure of the process monitor
    assert all(attributes["aria-label"] for attributes in drawn)


@pytest.mark.figures
def test_a_report_written_later_is_the_same(run_dir, tmp_path):
    at_export = (run_dir / "report.html").read_bytes()
    assert write_run_report(run_dir) == run_dir / "report.html"
    assert (run_dir / "report.html").read_bytes() == at_export
    assert verify_manifest(run_dir) == []
    elsewhere = write_run_report(run_dir, tmp_path / "new" / "page.html")
    assert elsewhere.read_bytes() == at_export


def test_missing_tables_are_computed_from_the_trace(run_dir):
    shutil.rmtree(run_dir / "tables")
    pages = load_run(run_dir).tables["working_set_summary"]
    assert set(pages["region_type"]) == {"weight", "kv_cache", "activation", "runtime"}


def test_the_figures_of_a_report_follow_the_page(finished):
    text = (finished / "report.html").read_text()
    svg = text[text.index("<svg") : text.rindex("</svg>")]
    assert "var(--blue)" in svg and "var(--ink)" in svg
    assert looks.color("weight") not in svg
    assert "<text" in svg  # text has the page's font and can be searched for


@pytest.mark.figures
def test_every_name_is_escaped(tmp_path, trace, tables):
    words = {"weight": HOSTILE, "kv_cache": "</svg></style>", "runtime": "$\\frac{$"}
    renamed = {
        name: table.assign(region_type=table["region_type"].replace(words))
        if "region_type" in table
        else table
        for name, table in tables.items()
    }
    told = metadata(HOSTILE, model="</title><script>alert(1)</script>")
    told["collector_steps"][0]["reason"] = HOSTILE
    told["software"] = {HOSTILE: HOSTILE}
    told["experiment"] = {"name": HOSTILE, "description": "--></style>", "authors": [HOSTILE]}
    told["generations"] = [{"text": "\ud800\x00\u202e<b onmouseover=x>", "prompt_tokens": 1}]
    told["warnings"] = ["<script>"]
    told["validity"]["failure_reasons"] = ["<script>alert(2)</script>"]
    result = RunExporter(tmp_path).export(
        trace, [], [], renamed, metadata=told, run_id="<script>", figures=False
    )
    page = check_page(result.report_path.read_text())
    assert "<script>alert(1)</script>" in page.text
    assert page.text.count(" ".join(HOSTILE.split())) > 10
    again = check_page(write_run_report(tmp_path).read_text())
    assert "alert(2)" in again.text


def test_contaminated_runs_say_so_first(tmp_path, trace, tables):
    result = export(tmp_path / "bad", trace, tables, validity="contaminated", figures=False)
    text = check_page(result.report_path.read_text()).text
    assert "✕ contaminated" in text
    assert "left out of aggregates" in text
    assert "observer_cpu 31.0 % is too much" in text


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (Kind.FIRST_TOUCHES, "first access to each page"),
        (Kind.WRITE_SETS, "pages written in each interval"),
        (Kind.ALLOCATIONS, "no accesses to memory"),
    ],
)
def test_a_report_says_what_its_kind_of_trace_cannot_tell(tmp_path, tables, kind, said):
    trace = make_trace(kind=kind, tokens=12, rewritten=3)
    less = {**tables, "retention_summary": tables["retention_summary"].iloc[:0]}
    result = export(tmp_path, trace, less, figures=False)
    text = check_page(result.report_path.read_text()).text
    assert said in text
    assert "This trace cannot tell: retention_summary." in text


@pytest.mark.figures
def test_a_report_has_no_figure_without_data(tmp_path, tables):
    trace = make_trace(kind=Kind.FIRST_TOUCHES, tokens=12)
    told = ("working_set_per_region", "working_set_summary")
    less = {name: table if name in told else table.iloc[:0] for name, table in tables.items()}
    page = check_page(export(tmp_path, trace, less).report_path.read_text())
    drawn = [a["aria-label"] for tag, a in page.elements if tag == "svg"]
    assert [label.partition(".")[0] for label in drawn] == ["Figure: working set"]
    assert "No data" not in page.text


def test_a_sampled_trace_says_so(tmp_path, trace, tables):
    about = {"collector": {"collector_type": "perf_mem", "sample_period": 4000}}
    result = export(tmp_path, trace, tables, figures=False, **about)
    text = check_page(result.report_path.read_text()).text
    assert "One access in 4,000 is in the trace" in text


def test_a_run_without_telemetry_says_so(tmp_path, trace, tables):
    told = metadata()
    for name in ("observer_effect_summary", "run_validity", "validity"):
        del told[name]
    RunExporter(tmp_path).export(trace, [], [], tables, metadata=told, figures=False)
    text = check_page((tmp_path / "report.html").read_text()).text
    assert "validity not measured" in text and "Telemetry was off" in text


def test_broken_and_bare_folders_have_reports(run_dir, tmp_path, trace):
    (run_dir / "metrics.csv").unlink()
    mark = {"state": "interrupted", "reason": "interrupted while <collecting>"}
    (run_dir / "INCOMPLETE").write_text(json.dumps(mark))
    text = check_page(write_run_report(run_dir).read_text()).text
    assert "did not come to its end (interrupted: interrupted while <collecting>)" in text
    assert "metrics.csv is not there" in text

    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "INCOMPLETE").write_text("{")
    text = check_page(write_run_report(bare).read_text()).text
    assert "its mark cannot be read" in text

    (tmp_path / "nothing").mkdir()
    with pytest.raises(FileNotFoundError, match="no run folder"):
        write_run_report(tmp_path / "nothing")
    (run_dir / "metadata.json").write_text("[1]")
    with pytest.raises(ValueError, match=r"metadata\.json"):
        write_run_report(run_dir)


def test_metadata_of_any_shape_makes_a_page(finished):
    run = load_run(finished)
    for name in (*run.metadata, "warnings", "generations"):
        for odd in (None, 3, "text", [], [None, 1], {}, {"model": 4, "extra": 1}):
            changed = copy.copy(run)
            changed.tables = {}
            changed.metadata = {**run.metadata, name: odd}
            check_page(render_run_report(changed))


def test_the_experiment_of_a_report_can_be_run(finished, tmp_path):
    path = tmp_path / "experiment.yaml"
    path.write_text(yaml.safe_dump(experiment_of(load_run(finished))))
    config = load_experiment(path)
    assert config.models[0].id == "tiny"
    assert config.sweep.context_lengths == [128]
    assert config.sweep.output_tokens == [32]
    assert config.prompts.texts == ["Once"]
    assert config.collector.primary.value == "perf_mem"
