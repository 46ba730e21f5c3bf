"""The files, figures, reports and archives of runs, and the errors for folders that are no runs."""

from __future__ import annotations

import copy
import hashlib
import html.parser
import itertools
import json
import shutil
import subprocess
import sys
import threading
import zipfile
from pathlib import Path

import matplotlib
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from llm_instrumentation._pages import drawing, units
from llm_instrumentation.errors import InvalidArgumentError
from llm_instrumentation.mrm import SchemaVersionError, check_parquet_schema, compute_all
from llm_instrumentation.mrm.config import load_experiment
from llm_instrumentation.mrm.reporter import (
    ManifestError,
    RunExporter,
    build_manifest,
    build_metrics_table,
    export_hf,
    export_kv_lifecycle,
    export_region_map,
    export_trace,
    export_zenodo,
    generate_all_figures,
    load_run,
    load_sweep,
    plot_retention_histogram,
    plot_working_set,
    plot_write_once,
    render_run_report,
    summarise_trace,
    verify_manifest,
    write_manifest,
    write_metrics_csv,
    write_run_report,
    write_sweep_report,
)
from llm_instrumentation.mrm.reporter.figures import (
    FIGURES,
    draw_process_memory,
    draw_working_set,
    draw_working_set_over_time,
)
from llm_instrumentation.mrm.reporter.reproduce import experiment_of
from llm_instrumentation.mrm.reporter.tables import as_frames
from llm_instrumentation.mrm.reporter.trace_summary import _union
from llm_instrumentation.mrm.reporter.verdict import verdicts
from llm_instrumentation.mrm.schema import ALL_COLUMNS, ARROW_SCHEMA, Kind, RegionType
from matplotlib.text import Text
from synthetic_traces import make_trace, reference_distributions, reference_tables

pytestmark = pytest.mark.usefixtures("plain_pages")

DOCUMENTED_FILES = {
    "trace.parquet", "region_map.parquet", "kv_block_lifecycle.parquet", "metrics.csv",
    "metadata.json", "retention_histogram.png", "working_set.png", "write_once.png",
}  # fmt: skip
REGION = {
    "region_id": 1, "region_type": "weight", "page_min": 16, "page_max": 2**63 + 5,
    "first_seen_ns": 0, "last_seen_ns": 9, "access_count": 3,
}  # fmt: skip
BLOCK = {
    "block_id": 100, "address": 2**63, "address_page": 2**51, "write_ns": 1, "last_read_ns": 5,
    "evict_ns": None, "total_reads": 2, "lifetime_ns": 4,
}  # fmt: skip
HOSTILE = '<img src=x onerror=alert(1)>"\'&$\\frac{1}{$ font: 3px x" onload="y'


@pytest.fixture(scope="module")
def trace() -> pa.Table:
    return make_trace(spread=1.0, rewritten=3, tokens=12)


@pytest.fixture(scope="module")
def tables(trace) -> dict[str, pd.DataFrame]:
    return {**reference_tables(trace), **reference_distributions(trace)}


def process_samples(n: int = 30) -> pd.DataFrame:
    """Samples of the process monitor of two processes that grow."""
    times = np.repeat(np.arange(1, n + 1) / 10, 2)
    return pd.DataFrame(
        {"t_s": times, "pid": [7, 8] * n, "rss_mb": 900 + 50 * times, "cpu_pct": 40.0 + times}
    )


def metadata(run_id="run_1", *, model="tiny", context=128, rep=0, validity="clean", **more):
    """The metadata of a run."""
    return {
        "run_id": run_id,
        "created_at_utc": "2026-03-01T12:00:00+00:00",
        "experiment": {
            "name": "minimal", "description": "Weights stay.", "version": "1.0.0",
            "authors": ["A. Person"], "institution": "A House",
        },
        "parameters": {
            "model": {"id": model, "engine": "transformers", "path": None,
                      "random": {"architecture": "llama"}},
            "context_length": context, "batch_size": 1, "output_tokens": 32, "rep_index": rep,
            "prompts": ["Once"], "collector": {"primary": "perf_mem", "fallback": "torch"},
            "labeller": {"unknown_policy": "assign_unknown"},
        },
        "collector": {"collector_type": "torch", "used": True, "sample_period": 1,
                      "warnings": [], "extra": {}},
        "collector_steps": [
            {"collector": "perf_mem", "used": False, "reason": "no PMU: use torch"},
            {"collector": "torch", "used": True, "reason": None},
        ],
        "software": {"llm_instrumentation": "0.1.0"},
        "hardware": {"processor": "A Processor", "memory_bytes": 2**34},
        "observer_effect_summary": {
            "observer_cpu_overhead_pct_max": 4.2, "observer_memory_overhead_frac": 0.01,
            "thermal_throttle_events": 0, "baseline_cpu_pct": 3.0,
            "io_contention_detected": False, "thermal_counters_available": False,
        },
        "run_validity": validity,
        "validity": {
            "run_validity": validity,
            "failure_reasons": [] if validity == "clean" else ["observer_cpu 31.0 % is too much"],
        },
        **more,
    }  # fmt: skip


def export(folder: Path, trace: pa.Table, tables, **about):
    """Exports a run to a folder, as a runner does."""
    quick = {key: about.pop(key) for key in ("figures", "report", "formats") if key in about}
    told = metadata(folder.name, **about)
    return RunExporter(folder).export(
        trace, [REGION], [BLOCK], tables, metadata=told, run_id=folder.name, **quick
    )


@pytest.fixture(scope="module")
def finished(tmp_path_factory, trace, tables) -> Path:
    """A run with all its files. Tests must not change it; `run_dir` is a copy."""
    folder = tmp_path_factory.mktemp("results") / "tiny" / "run_1"
    return export(folder, trace, tables).run_dir


@pytest.fixture
def run_dir(finished, tmp_path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "tiny" / "run_1"))


def reference_names() -> set[str]:
    """The names of the ten tables."""
    return set(reference_tables(make_trace(tokens=1)))


# ---- the synthetic trace ----------------------------------------------------------------


def test_the_synthetic_trace_has_the_truth_that_it_states():
    trace = make_trace(weight_window_s=30.0, tokens=10, activation_life_s=0.002)
    found = reference_tables(trace)
    retention = found["retention_summary"].set_index("region_type")
    quantiles = ["retention_p50_s", "retention_p90_s", "retention_p99_s", "retention_mean_s"]
    assert retention.loc["weight", quantiles].tolist() == [30.0] * 4
    assert retention.loc["kv_cache", quantiles].tolist() == pytest.approx([27.0] * 4)
    assert retention.loc["activation", quantiles].tolist() == pytest.approx([0.002] * 4)
    freq = found["read_freq"].set_index("region_type").loc["weight"]
    assert set(freq["reads_per_write"]) == {11.0}


def test_its_plain_tables_are_those_of_the_library(trace):
    plain, found = reference_tables(trace), compute_all(trace)
    assert plain.keys() == found.keys()
    for name, table in found.items():
        keys = [key for key in ("region_id", "region_type") if key in table]
        as_words = {"region_type": object}
        pd.testing.assert_frame_equal(
            table.astype(as_words).sort_values(keys, ignore_index=True),
            plain[name][list(table.columns)].astype(as_words).sort_values(keys, ignore_index=True),
            check_dtype=False,
            rtol=1e-12,
        )


# ---- manifest ---------------------------------------------------------------------------


def test_a_manifest_names_every_file_with_size_and_digest(tmp_path):
    (tmp_path / "metrics.csv").write_bytes(b"region_type\n")
    (tmp_path / "tables").mkdir()
    (tmp_path / "tables" / "iai.parquet").write_bytes(b"PAR1")
    (tmp_path / "notes.txt").write_bytes(b"")
    for left_out in ("manifest.json", "INCOMPLETE", "report.html", "trace.parquet.partial"):
        (tmp_path / left_out).write_bytes(b"x")
    (tmp_path / "raw").mkdir()
    (tmp_path / "raw" / "perf.data").write_bytes(b"x")

    path = write_manifest(tmp_path, "run_1")
    manifest = json.loads(path.read_text())
    assert manifest["manifest_schema_version"] == "1.0"
    assert manifest["run_id"] == "run_1"
    assert manifest["created_at_utc"].endswith("+00:00")
    assert manifest["files"] == [
        {
            "path": "metrics.csv",
            "size_bytes": 12,
            "sha256": hashlib.sha256(b"region_type\n").hexdigest(),
            "schema_version": "1.0",
        },
        {"path": "notes.txt", "size_bytes": 0, "sha256": hashlib.sha256(b"").hexdigest()},
        {
            "path": "tables/iai.parquet",
            "size_bytes": 4,
            "sha256": hashlib.sha256(b"PAR1").hexdigest(),
            "schema_version": "1.0",
        },
    ]
    assert verify_manifest(tmp_path) == []


def test_a_manifest_of_chosen_files(tmp_path):
    """A manifest may list chosen files, which must exist inside the folder."""
    (tmp_path / "a").write_bytes(b"a")
    (tmp_path / "b").write_bytes(b"b")
    files = build_manifest(tmp_path, "run_1", [tmp_path / "b"])["files"]
    assert [entry["path"] for entry in files] == ["b"]
    with pytest.raises(FileNotFoundError):
        build_manifest(tmp_path, "run_1", [tmp_path / "none"])
    with pytest.raises(ValueError, match="not inside"):
        build_manifest(tmp_path, "run_1", [Path(__file__)])


def edit_manifest(folder, change):
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text())
    change(manifest)
    path.write_text(json.dumps(manifest))


def entry(manifest, name):
    return next(one for one in manifest["files"] if one["path"] == name)


@pytest.mark.parametrize(
    ("damage", "path", "kind"),
    [
        (lambda d: (d / "metrics.csv").unlink(), "metrics.csv", "missing"),
        (lambda d: (d / "metrics.csv").write_bytes(b"short"), "metrics.csv", "size"),
        (
            lambda d: (d / "tables/iai.parquet").write_bytes(
                bytes(reversed((d / "tables/iai.parquet").read_bytes()))
            ),
            "tables/iai.parquet",
            "sha256",
        ),
        (
            lambda d: edit_manifest(
                d, lambda m: entry(m, "trace.parquet").update(schema_version="7.0")
            ),
            "trace.parquet",
            "schema_version",
        ),
        (
            lambda d: edit_manifest(
                d, lambda m: entry(m, "trace.parquet").update(schema_version="new")
            ),
            "trace.parquet",
            "schema_version",
        ),
        (
            lambda d: edit_manifest(
                d, lambda m: entry(m, "metrics.csv").update(path="../../../../etc/hostname")
            ),
            "../../../../etc/hostname",
            "path",
        ),
        (
            lambda d: edit_manifest(d, lambda m: m.update(manifest_schema_version="2.0")),
            "manifest.json",
            "schema_version",
        ),
        (lambda d: (d / "manifest.json").write_text("{"), "manifest.json", "manifest"),
        (lambda d: (d / "manifest.json").write_text("[]"), "manifest.json", "manifest"),
        (
            lambda d: edit_manifest(d, lambda m: entry(m, "metrics.csv").pop("sha256")),
            "manifest.json",
            "manifest",
        ),
        (lambda d: (d / "manifest.json").unlink(), "manifest.json", "missing"),
    ],
)
def test_each_difference_is_reported(run_dir, damage, path, kind):
    assert verify_manifest(run_dir) == []
    damage(run_dir)
    found = verify_manifest(run_dir)
    assert [(one.path, one.kind) for one in found] == [(path, kind)]
    assert str(found[0]).startswith(path)


def test_all_differences_are_reported_and_other_files_are_ignored(run_dir):
    (run_dir / "later.txt").write_text("made by hand")
    (run_dir / "metrics.csv").unlink()
    (run_dir / "metadata.json").write_text("{}")
    assert {one.path for one in verify_manifest(run_dir)} == {"metrics.csv", "metadata.json"}
    with pytest.raises(FileNotFoundError):
        verify_manifest(run_dir / "none")


# ---- metrics.csv ------------------------------------------------------------------------

METRICS = [
    "region_type", "n_regions", "retention_p50_s", "retention_p90_s", "retention_p99_s",
    "retention_mean_s", "write_once_ratio_mean", "reads_per_write_mean", "working_set_mb_total",
    "unique_pages_total", "suitability",
]  # fmt: skip


def test_metrics_have_a_row_per_type_and_the_documented_columns(tmp_path):
    tables = reference_tables(make_trace(tokens=3, weights=4))
    found = pd.read_csv(write_metrics_csv(tables, tmp_path / "metrics.csv"))
    assert list(found.columns) == METRICS
    assert found["region_type"].tolist() == ["activation", "kv_cache", "runtime", "weight"]
    weight = found.set_index("region_type").loc["weight"]
    assert weight["n_regions"] == 4
    assert weight["retention_p99_s"] == 30.0
    assert weight["write_once_ratio_mean"] == 1.0
    assert weight["reads_per_write_mean"] == 4.0
    assert (weight["working_set_mb_total"], weight["unique_pages_total"]) == (1.0, 256)
    assert weight["suitability"] == "high_mrm"


def test_metrics_of_arrow_tables_are_those_of_frames(tables):
    as_arrow = {name: pa.Table.from_pandas(table) for name, table in tables.items()}
    pd.testing.assert_frame_equal(build_metrics_table(as_arrow), build_metrics_table(tables))


def test_metrics_that_a_kind_of_trace_cannot_tell_are_missing(tables, tmp_path):
    less = {
        name: table if name.startswith("working_set") else table.iloc[:0]
        for name, table in tables.items()
    }
    found = build_metrics_table(less)
    assert found["region_type"].tolist() == ["activation", "kv_cache", "runtime", "weight"]
    assert found["n_regions"].tolist() == [78, 4, 3, 4]
    assert found["retention_p99_s"].isna().all()
    assert found["suitability"].isna().all()
    empty = build_metrics_table({name: table.iloc[:0] for name, table in tables.items()})
    assert list(empty.columns) == METRICS and empty.empty


# ---- Parquet ----------------------------------------------------------------------------


def forms(trace: pa.Table):
    """The same trace in every form that a user may have."""
    import polars

    frame = trace.to_pandas()
    plain = frame.astype(dict.fromkeys(("symbol", "dso", "phase", "region_type"), object))
    shuffled = [pa.Table.from_batches([batch]) for batch in trace.to_batches(max_chunksize=100)]
    other_words = pa.concat_tables(
        [part.cast(pa.schema([pa.field(f.name, f.type.value_type if pa.types.is_dictionary(f.type)
                                       else f.type) for f in part.schema])) for part in shuffled]
    )  # fmt: skip
    return {
        "table": trace,
        "batch": trace.combine_chunks().to_batches()[0],
        "reader": trace.to_reader(max_chunksize=64),
        "strings": other_words,
        "categories": frame,
        "objects": plain,
        "dicts": trace.to_pylist(),
        "generator": (row for row in trace.to_pylist()),
        "polars": polars.from_arrow(trace),
    }


@pytest.mark.parametrize("form", list(forms(make_trace(tokens=1))))
def test_a_trace_of_any_form_is_written_with_its_types(trace, tmp_path, form):
    path = export_trace(forms(trace)[form], tmp_path)
    assert path == tmp_path / "trace.parquet"
    found = pq.read_table(path)
    assert found.schema.names == list(ALL_COLUMNS)
    assert found.schema.types == ARROW_SCHEMA.types
    assert found.to_pylist() == trace.to_pylist()
    assert found.schema.metadata[b"mrm_trace_schema_version"] == b"1.0"
    assert found.schema.metadata[b"mrm_trace_kind"] == b"accesses"
    assert b"pandas" not in found.schema.metadata
    chunk = pq.ParquetFile(path).metadata.row_group(0).column(0)
    assert chunk.compression == "ZSTD"
    check_parquet_schema(path, "trace")


def test_batches_with_dictionaries_of_their_own_keep_their_words(tmp_path):
    first = make_trace(tokens=2)
    second = pa.Table.from_pylist(
        [{**row, "symbol": f"other_{n}"} for n, row in enumerate(first.to_pylist())],
        schema=first.schema,
    )
    batches = [*first.to_batches(), *second.to_batches()]
    reader = pa.RecordBatchReader.from_batches(first.schema, batches)
    found = pq.read_table(export_trace(reader, tmp_path))
    assert found.to_pylist() == first.to_pylist() + second.to_pylist()


def test_the_kind_and_the_time_of_a_trace_stay_with_it(tmp_path):
    trace = make_trace(kind=Kind.WRITE_SETS, tokens=1)
    trace = trace.replace_schema_metadata(
        {**trace.schema.metadata, b"mrm_trace_time": b"interval ends", b"foreign": b"x"}
    )
    found = pq.read_schema(export_trace(trace, tmp_path)).metadata
    assert found[b"mrm_trace_kind"] == b"write_sets"
    assert found[b"mrm_trace_time"] == b"interval ends"
    assert b"foreign" not in found
    stated = pq.read_schema(export_trace(trace, tmp_path, kind="first_touches")).metadata
    assert stated[b"mrm_trace_kind"] == b"first_touches"


def test_missing_columns_are_null_or_unknown_and_further_columns_follow(tmp_path):
    needed = {
        "run_id": ["r"], "sample_id": [0], "timestamp_ns": [5], "address": [2**63 + 4096],
        "address_page": [2**51 + 1], "op_type": ["load"], "remark": ["kept"],
    }  # fmt: skip
    found = pq.read_table(export_trace(pd.DataFrame(needed), tmp_path)).to_pylist()[0]
    assert found["address"] == 2**63 + 4096
    assert found["remark"] == "kept"
    assert (found["symbol"], found["region_type"], found["region_id"]) == ("", "unknown", 0)
    assert found["phase"] is None and found["length_bytes"] is None


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda t: t.drop_columns(["op_type", "address"]), "address, op_type"),
        (lambda t: t.set_column(2, "timestamp_ns", pa.array([1.5] * len(t))), "timestamp_ns"),
        (lambda t: t.set_column(4, "address", pa.array([-1] * len(t))), "address"),
        (
            lambda t: t.set_column(6, "op_type", pa.nulls(len(t), pa.string())),
            "op_type.*have no value",
        ),
    ],
)
def test_an_invalid_trace_is_refused_and_leaves_the_old_file(tmp_path, trace, change, said):
    before = export_trace(trace, tmp_path).read_bytes()
    with pytest.raises(InvalidArgumentError, match=said):
        export_trace(change(trace), tmp_path)
    assert (tmp_path / "trace.parquet").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["trace.parquet"]


def test_an_empty_trace_has_its_columns(tmp_path, trace):
    for empty in (trace.slice(0, 0), trace.to_pandas().iloc[:0], []):
        path = export_trace(empty, tmp_path)
        assert pq.read_table(path).num_rows == 0
        check_parquet_schema(path, "trace")


def test_region_maps_and_kv_lifecycles(tmp_path):
    """Region maps and lifecycles of caches come back from Parquet as they were."""
    assert pq.read_table(export_region_map([REGION], tmp_path)).to_pylist() == [REGION]
    assert pq.read_table(export_kv_lifecycle([BLOCK], tmp_path)).to_pylist() == [BLOCK]
    frame = pd.DataFrame([BLOCK])  # evict_ns is an object column of None
    assert pq.read_table(export_kv_lifecycle(frame, tmp_path)).to_pylist() == [BLOCK]
    for name, write in (
        ("region_map", export_region_map),
        ("kv_block_lifecycle", export_kv_lifecycle),
    ):
        path = write([], tmp_path)
        check_parquet_schema(path, name)
        assert pq.read_table(path).num_rows == 0
    with pytest.raises(InvalidArgumentError, match="page_max"):
        export_region_map([{k: v for k, v in REGION.items() if k != "page_max"}], tmp_path)
    with pytest.raises(InvalidArgumentError, match="access_count"):
        export_region_map([{**REGION, "access_count": "many"}], tmp_path)


# ---- a pass over a trace ----------------------------------------------------------------


def test_a_summary_tells_extent_and_kv_growth():
    trace = make_trace(prompt_tokens=8, tokens=4, layers=1, kv_bytes_per_token=4096, start_ns=10**9)
    summary = summarise_trace(trace.to_reader(max_chunksize=7))
    assert summary.kind is Kind.ACCESSES
    assert summary.rows == trace.num_rows
    assert summary.span_s == pytest.approx(30.002)  # the last activation ends after the window
    load = summary.extent.set_index(["phase", "region_type"]).loc[("weight_load", "weight")]
    assert load.to_dict() == {
        "n_rows": 4, "loads": 0, "stores": 4, "first_ns": 10**9, "last_ns": 10**9,
    }  # fmt: skip
    growth = summary.kv_growth
    assert growth["generation"].tolist() == [0] * 5
    assert growth["token_index"].tolist() == [0, 1, 2, 3, 4]
    assert growth["context_tokens"].tolist() == [8, 9, 10, 11, 12]
    assert growth["unique_pages"].tolist() == [16, 18, 20, 22, 24]  # keys and values
    assert growth["working_set_bytes"].tolist() == [4096 * n for n in (16, 18, 20, 22, 24)]
    assert growth["live_bytes"].tolist()[:-1] == [4096 * n for n in (16, 18, 20, 22)]
    assert np.isnan(growth["live_bytes"].iloc[-1])  # no later step loads the cache
    assert growth["read_bytes"].tolist() == growth["working_set_bytes"].tolist()
    assert growth["written_bytes"].tolist() == [65536, 8192, 8192, 8192, 8192]


def kv_rows(*rows):
    """Accesses to a KV cache. Each row has a time, operation, region, page, pages and token."""
    return pa.Table.from_pylist(
        [
            {
                "run_id": "r", "sample_id": n, "timestamp_ns": time, "op_type": op,
                "address": page * 4096, "address_page": page, "region_type": "kv_cache",
                "region_id": region, "token_index": token, "length_bytes": pages * 4096,
            }
            for n, (time, op, region, page, pages, token) in enumerate(rows)
        ]
    )  # fmt: skip


def test_a_page_that_regions_share_counts_once():
    """Three regions of 8 KiB lie at two places, and a row reaches into a fourth page."""
    rows = [
        ("activation", 1, 0, 8192), ("activation", 2, 0, 8192), ("activation", 3, 3 << 12, 4097),
        ("activation", 3, 2**64 - 4096, None), ("weight", 4, 4096 + 8, 1),
    ]  # fmt: skip
    names = ("region_type", "region_id", "address", "length_bytes")
    columns = dict(zip(names, zip(*rows, strict=True), strict=True))
    trace = pa.table(
        {
            **{name: pa.array(columns[name]) for name in ("region_type", "region_id")},
            "address": pa.array(columns["address"], pa.uint64()),
            "address_page": pa.array([one >> 12 for one in columns["address"]], pa.uint64()),
            "length_bytes": pa.array(columns["length_bytes"], pa.int64()),
            "timestamp_ns": range(5), "sample_id": range(5), "run_id": ["a"] * 5,
            "phase": ["generation"] * 5, "op_type": ["store"] * 5,
        }
    )  # fmt: skip
    summary = summarise_trace(trace)
    assert summary.distinct_pages.to_dict("list") == {
        "region_type": ["activation", "weight"], "distinct_pages": [5, 1],
        "distinct_bytes": [5 * 4096, 4096],
    }  # fmt: skip
    tables = {**compute_all(trace), "distinct_pages": summary.distinct_pages}
    assert tables["working_set_summary"]["total_pages"].tolist() == [7, 1]
    activation, weight = verdicts(as_frames(tables), 1.0)
    if activation.region_type != "activation":
        activation, weight = weight, activation
    assert activation.sentence.endswith("20 KiB in 3 regions, 28 KiB summed over them.")
    assert weight.sentence.endswith("4 KiB in one region.")
    drawn = {text.get_text() for text in texts_of(draw_working_set(as_frames(tables)))}
    assert {"20 KiB in 3 regions, 28 KiB summed over them", "4 KiB in 1 region"} <= drawn
    del tables["distinct_pages"]
    drawn = {text.get_text() for text in texts_of(draw_working_set(as_frames(tables)))}
    assert {"28 KiB in 3 regions", "4 KiB in 1 region"} <= drawn
    assert any("summed over regions" in text for text in drawn)


def test_a_cache_that_is_copied_for_each_token_grows_by_what_it_holds():
    """The new cache may reuse the pages of the one before the last, so pages alone say little."""
    growth = summarise_trace(
        kv_rows(
            (10, "store", 1, 100, 4, 0), (11, "load", 1, 100, 4, 0),
            (20, "load", 1, 100, 4, 1), (20, "store", 2, 200, 5, 1), (21, "load", 2, 200, 5, 1),
            (30, "load", 2, 200, 5, 2), (30, "store", 3, 100, 6, 2), (31, "load", 3, 100, 6, 2),
        )
    ).kv_growth  # fmt: skip
    assert growth["unique_pages"].tolist() == [4, 9, 11]
    assert growth["live_bytes"].tolist()[:2] == [4 * 4096, 5 * 4096]


def test_each_generation_begins_anew():
    growth = summarise_trace(
        kv_rows(
            (10, "store", 1, 100, 4, 0), (20, "load", 1, 100, 4, 1),
            (30, "store", 2, 100, 4, 0), (40, "load", 2, 100, 4, 1),
        ).to_reader(max_chunksize=1)
    ).kv_growth  # fmt: skip
    assert growth["generation"].tolist() == [0, 0, 1, 1]
    assert growth["live_bytes"].isna().tolist() == [False, True, False, True]


@pytest.mark.parametrize("kind", [Kind.WRITE_SETS, Kind.FIRST_TOUCHES, Kind.ALLOCATIONS])
def test_only_accesses_tell_how_a_cache_grows(kind):
    """Other kinds have no loads of a cache in use.

    Traces of allocations write a release as a load, and write sets have no loads.
    """
    assert summarise_trace(make_trace(kind=kind)).kv_growth.empty
    assert not summarise_trace(make_trace()).kv_growth.empty


def test_a_cache_grows_to_the_byte_if_rows_have_lengths():
    trace = make_trace(prompt_tokens=8, tokens=4, layers=1, kv_bytes_per_token=96)
    growth = summarise_trace(trace).kv_growth
    assert growth["live_bytes"].diff().dropna().unique().tolist() == [2 * 96]
    assert growth["working_set_bytes"].isin([4096 * n for n in range(1, 9)]).all()


def test_a_trace_that_knows_no_tokens_has_no_growth():
    bare = make_trace(tokens=2).drop_columns(["token_index", "length_bytes", "phase"])
    summary = summarise_trace(bare)
    assert summary.kv_growth.empty
    assert set(summary.extent["phase"]) == {""}
    nothing = summarise_trace(bare.slice(0, 0))
    assert (nothing.rows, nothing.span_s) == (0, 0.0)


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(1, 20)), min_size=1, max_size=40))
def test_a_union_of_intervals_is_that_of_their_members(pairs):
    intervals = np.array([(start, start + length) for start, length in pairs])
    union = _union(intervals)
    members = {n for start, end in intervals for n in range(start, end)}
    assert {n for start, end in union for n in range(start, end)} == members
    assert int((union[:, 1] - union[:, 0]).sum()) == len(members)


# ---- figures ----------------------------------------------------------------------------


def test_every_figure_is_drawn_in_every_format(trace, tables, tmp_path):
    everything = {
        **tables, "kv_growth": summarise_trace(trace).kv_growth,
        "process_samples": process_samples(),
    }  # fmt: skip
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
def test_an_empty_table_gives_a_figure_that_says_so(spec, trace, tables):
    everything = {
        **tables, "kv_growth": summarise_trace(trace).kv_growth,
        "process_samples": process_samples(),
    }  # fmt: skip
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
    odd = make_trace(**shape)
    everything = {
        **reference_tables(odd), **reference_distributions(odd),
        "kv_growth": summarise_trace(odd).kv_growth, "process_samples": process_samples(1),
    }  # fmt: skip
    weights = {
        name: table[table["region_type"] == "weight"] if "region_type" in table else table
        for name, table in everything.items()
    }
    for number, tables in enumerate((everything, weights)):
        with drawing.settings():
            drawing.save(spec.draw(tables), tmp_path / f"{number}.png")
    assert [str(warning.message) for warning in recwarn] == []


def texts_of(figure) -> list[Text]:
    """The visible texts of a figure, without ticks outside of the axes' limits."""
    found = [*figure.texts]
    for axes in figure.axes:
        found += [*axes.texts, axes.title, axes.xaxis.label, axes.yaxis.label]
        for axis in (axes.xaxis, axes.yaxis):
            low, high = sorted(axis.get_view_interval())
            ticks = [tick for tick in axis.get_major_ticks() if low <= tick.get_loc() <= high]
            found += [tick.label1 for tick in ticks if tick.label1.get_visible()]
    return [text for text in found if text.get_visible() and text.get_text().strip()]


@pytest.mark.parametrize("spec", FIGURES, ids=lambda spec: spec.name)
@pytest.mark.parametrize(
    "shape",
    [{}, {"tokens": 1, "weights": 1}, {"weight_window_s": 1.0}, {"weight_window_s": 4000.0}],
)
def test_no_text_of_a_figure_is_cut_off_or_covers_another(spec, shape):
    trace = make_trace(spread=1.0, rewritten=3, **{"tokens": 12, **shape})
    everything = {
        **reference_tables(trace), **reference_distributions(trace),
        "kv_growth": summarise_trace(trace).kv_growth, "process_samples": process_samples(),
    }  # fmt: skip
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
def test_every_figure_names_its_axes(spec, trace, tables):
    everything = {
        **tables, "kv_growth": summarise_trace(trace).kv_growth,
        "process_samples": process_samples(),
    }  # fmt: skip
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
    assert len({drawing.color(name) for name in types}) == 5
    assert len({str(drawing.line(name)) for name in types}) == 5
    assert drawing.color("weight") == "#0072b2"


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


VOID = {"meta", "br", "img", "link", "input", "hr", "wbr", "path", "use", "rect"}


class Page(html.parser.HTMLParser):
    """The elements of a page with their attributes, and its text."""

    def __init__(self, text: str):
        super().__init__(convert_charrefs=True)
        self.elements, self.words, self._open = [], [], []
        self.feed(text.replace("<wbr>", ""))
        self.close()
        assert self._open == []

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        if tag not in VOID:
            assert self._open.pop() == tag

    def handle_data(self, data):
        if not self._open or self._open[-1] != "style":
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).replace("\u202f", " ").split())


def check_page(text: str) -> Page:
    """Checks that a page is well formed, needs no other file, and runs no script."""
    page = Page(text)
    tags = {tag for tag, _ in page.elements}
    assert not tags & {"script", "img", "iframe", "object", "embed", "link", "form", "base"}
    for _, attributes in page.elements:
        assert not [name for name in attributes if name.startswith("on")]
        for name in ("href", "xlink:href", "src"):
            target = attributes.get(name, "#")
            assert target.startswith(("#", "runs/")), target
    assert "url(http" not in text and "@import" not in text
    policy = [a["content"] for t, a in page.elements if t == "meta" and "http-equiv" in a]
    assert policy == ["default-src 'none'; style-src 'unsafe-inline'; img-src data:"]
    assert text.startswith("<!doctype html>") and "prefers-color-scheme: dark" in text
    assert "@media print" in text
    return page


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
    assert "var(--weight)" in svg and "var(--ink)" in svg
    assert drawing.color("weight") not in svg
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


# ---- sweeps -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sweep_dir(tmp_path_factory) -> Path:
    """A sweep with two context lengths and two repetitions of each.

    The second run with the longer context is contaminated. Of two further runs, one was interrupted
    and one has no trace.
    """
    results = tmp_path_factory.mktemp("sweep") / "results"
    for context, rep, window, validity in (
        (128, 0, 12.0, "clean"), (128, 1, 14.0, "marginal"),
        (512, 0, 20.0, "clean"), (512, 1, 99.0, "contaminated"),
    ):  # fmt: skip
        trace = make_trace(weight_window_s=window, tokens=3)
        export(
            results / "tiny" / f"ctx{context}_rep{rep}", trace, reference_tables(trace),
            context=context, rep=rep, validity=validity, figures=False, report=False,
        )  # fmt: skip
    broken = results / "tiny" / "ctx512_rep2"
    broken.mkdir()
    (broken / "INCOMPLETE").write_text('{"state": "interrupted", "reason": "Ctrl-C"}')
    untraced = results / "tiny" / "untraced"
    untraced.mkdir()
    (untraced / "metadata.json").write_text('{"run_id": "untraced", "trace": {"kind": null}}')
    write_manifest(untraced, "untraced")
    return results


def test_a_sweep_aggregates_the_runs_that_count_and_lists_the_others(sweep_dir):
    sweep = load_sweep(sweep_dir)
    assert [run.run_id for run in sweep.runs] == ["ctx128_rep0", "ctx128_rep1", "ctx512_rep0"]
    reasons = {one.run_id: one.reason for one in sweep.left_out}
    assert reasons == {
        "ctx512_rep1": "contaminated: observer_cpu 31.0 % is too much",
        "ctx512_rep2": "not finished (interrupted: Ctrl-C)",
        "untraced": "no metrics.csv: it has no memory trace",
    }
    assert sweep.varying() == ["context_length"]
    assert sweep.group_by == ["region_type", "context_length"]
    weight = sweep.aggregates.set_index(["region_type", "context_length"]).loc["weight"]
    assert weight["n_runs"].tolist() == [2, 1]
    assert weight["retention_p99_s_mean"].tolist() == [13.0, 20.0]
    assert weight["retention_p99_s_min"].tolist() == [12.0, 20.0]
    assert weight["retention_p99_s_max"].tolist() == [14.0, 20.0]
    assert weight["suitability"].tolist() == ["high_mrm", "high_mrm"]


def test_runs_can_be_grouped_by_chosen_columns(sweep_dir):
    by_type = load_sweep(sweep_dir, ["region_type"]).aggregates.set_index("region_type")
    assert by_type.index.tolist() == ["weight", "kv_cache", "activation", "runtime"]
    assert by_type.loc["weight", "n_runs"] == 3
    assert by_type.loc["weight", "retention_p99_s_max"] == 20.0  # the contaminated run has 99
    assert by_type.loc["kv_cache", "suitability"] == "high_mrm"
    with pytest.raises(ValueError, match="'weather' is none of region_type, model"):
        load_sweep(sweep_dir, ["weather"])
    with pytest.raises(FileNotFoundError):
        load_sweep(sweep_dir / "none")


def test_a_folder_without_runs_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="no run"):
        write_sweep_report(tmp_path, tmp_path / "reports")
    assert not (tmp_path / "reports").exists()


@pytest.mark.figures
def test_a_sweep_report_stands_alone(sweep_dir, tmp_path):
    path = write_sweep_report(sweep_dir, tmp_path / "out", formats=("png", "pdf"))
    assert path == tmp_path / "out" / "report.html"
    text = check_page(path.read_text()).text
    for said in (
        "Memory traces: minimal", "runs that count 3", "marginal ! 1",
        "high_mrm in 3 of 3 runs", "13 s (12 s to 14 s)", "Ctrl-C",
        "contaminated: observer_cpu 31.0 % is too much", "no metrics.csv",
    ):  # fmt: skip
        assert said in text, said
    assert "99 s" not in text
    out = tmp_path / "out"
    assert {p.name for p in out.iterdir()} == {
        "report.html", "aggregates.csv", "metrics.csv", "by_context_length.png",
        "by_context_length.pdf", "runs",
    }  # fmt: skip
    found = pd.read_csv(out / "metrics.csv")
    assert set(found["run_id"]) == {"ctx128_rep0", "ctx128_rep1", "ctx512_rep0"}
    assert len(pd.read_csv(out / "aggregates.csv")) == 8
    links = [a["href"] for t, a in Page(path.read_text()).elements if t == "a"]
    assert len(links) == 6
    for link in links:
        check_page((out / link).read_text())


def test_groups_that_mix_runs_say_so(sweep_dir, tmp_path):
    path = write_sweep_report(sweep_dir, tmp_path, group_by=["region_type"])
    assert "Groups mix runs of different context_length" in check_page(path.read_text()).text


def test_a_sweep_without_a_run_that_counts_has_a_report(tmp_path, trace, tables):
    results = tmp_path / "results"
    export(results / "run_1", trace, tables, validity="contaminated", figures=False)
    text = check_page(write_sweep_report(results, tmp_path / "out").read_text()).text
    assert "No run counts" in text and "contaminated" in text


def test_a_damaged_run_does_not_count(run_dir, tmp_path):
    (run_dir / "metrics.csv").write_text("region_type\n")
    sweep = load_sweep(run_dir)
    assert sweep.runs == []
    assert "metrics.csv: its size is" in sweep.left_out[0].reason


@pytest.mark.figures
def test_names_in_a_sweep_are_escaped(tmp_path, trace, tables):
    name = "<b>&\"' run"
    ten = {name: tables[name] for name in reference_names()}
    results = tmp_path / "results"
    for number in range(2):
        folder = results / f"{number}" / name
        export(folder, trace, ten, model=f"{HOSTILE}{number}", figures=False, report=False)
    path = write_sweep_report(results, tmp_path / "out")
    page = check_page(path.read_text())
    links = [attributes["href"] for tag, attributes in page.elements if tag == "a"]
    assert len(set(links)) == 2
    assert all((tmp_path / "out" / link).is_file() for link in links)


# ---- archives ---------------------------------------------------------------------------


def bytes_below(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def card_of(folder: Path) -> dict:
    _, header, _ = (folder / "README.md").read_text().split("---\n", 2)
    return yaml.safe_load(header)


def test_a_hugging_face_data_set(sweep_dir, tmp_path):
    """The export has a card whose configurations name existing files."""
    result = export_hf(sweep_dir, tmp_path / "hf", license="cc-by-4.0")
    assert result.runs == ["ctx128_rep0", "ctx128_rep1", "ctx512_rep0", "ctx512_rep1", "untraced"]
    assert result.left_out == {"ctx512_rep2": "not finished (interrupted: Ctrl-C)"}
    assert result.files == len(bytes_below(tmp_path / "hf"))
    card = card_of(tmp_path / "hf")
    assert card["license"] == "cc-by-4.0"
    configs = {one["config_name"]: one for one in card["configs"]}
    assert configs.keys() >= {
        "trace", "runs", "metrics", "region_map", "kv_block_lifecycle", "retention_summary",
    }  # fmt: skip
    assert [name for name, one in configs.items() if one.get("default")] == ["metrics"]
    for one in card["configs"]:
        for file in one["data_files"]:
            assert list((tmp_path / "hf").glob(file["path"])), file
    splits = [file["split"] for file in configs["trace"]["data_files"]]
    assert splits == ["clean", "marginal", "contaminated"]


def test_its_tables_keep_their_rows_and_name_their_runs(sweep_dir, tmp_path):
    export_hf(sweep_dir, tmp_path / "hf")
    data = tmp_path / "hf" / "data"
    metrics = pq.read_table(data / "metrics" / "clean.parquet").to_pylist()
    assert {row["run_id"] for row in metrics} == {"ctx128_rep0", "ctx512_rep0"}
    assert {row["context_length"] for row in metrics} == {128, 512}
    regions = pq.read_table(data / "region_map" / "clean.parquet").to_pylist()
    assert regions == [{"run_id": run, **REGION} for run in ("ctx128_rep0", "ctx512_rep0")]
    copied = data / "trace" / "contaminated" / "00000.parquet"
    original = sweep_dir / "tiny" / "ctx512_rep1" / "trace.parquet"
    assert copied.read_bytes() == original.read_bytes()
    runs = pq.read_table(data / "runs" / "unmeasured.parquet").to_pylist()
    assert json.loads(runs[0]["metadata"]) == {"run_id": "untraced", "trace": {"kind": None}}


def test_archives_of_the_same_runs_are_the_same(sweep_dir, tmp_path):
    copied = Path(shutil.copytree(sweep_dir, tmp_path / "elsewhere" / "results"))
    export_hf(sweep_dir, tmp_path / "a")
    export_hf(copied, tmp_path / "b")
    assert bytes_below(tmp_path / "a") == bytes_below(tmp_path / "b")
    one = export_zenodo(sweep_dir, tmp_path / "one.zip")
    other = export_zenodo(copied, tmp_path / "other.zip")
    assert one.path.read_bytes() == other.path.read_bytes()


def test_an_archive_for_zenodo(sweep_dir, tmp_path):
    """The zip has metadata for Zenodo and a checksum of each file."""
    result = export_zenodo(sweep_dir, tmp_path / "dist", license="cc-by-4.0")
    assert result.path == tmp_path / "dist" / "minimal.zip"
    with zipfile.ZipFile(result.path) as archive:
        assert archive.testzip() is None
        assert len(archive.namelist()) == result.files
        about = json.loads(archive.read("minimal/.zenodo.json"))
        sums = archive.read("minimal/SHA256SUMS").decode().splitlines()
        found = {
            name.removeprefix("minimal/"): hashlib.sha256(archive.read(name)).hexdigest()
            for name in archive.namelist()
        }
    assert about["upload_type"] == "dataset"
    assert about["creators"] == [{"name": "A. Person", "affiliation": "A House"}]
    assert about["license"] == "cc-by-4.0"
    assert about["version"] == "1.0.0"
    stated = dict(reversed(line.split("  ", 1)) for line in sums)
    assert stated == {
        name: digest
        for name, digest in found.items()
        if name not in (".zenodo.json", "README.md", "SHA256SUMS")
    }
    assert "runs/tiny/ctx128_rep0/trace.parquet" in stated
    assert not any("ctx512_rep2" in name for name in stated)


def test_raw_files_are_packed_on_request(run_dir, tmp_path):
    (run_dir / "raw").mkdir()
    (run_dir / "raw" / "perf_script.txt").write_text("a line\n" * 1000)
    without = export_zenodo(run_dir, tmp_path / "a.zip")
    raw = export_zenodo(run_dir, tmp_path / "b.zip", include_raw=True)
    assert raw.files == without.files + 1
    with zipfile.ZipFile(raw.path) as archive:
        text = archive.read("minimal/runs/run_1/raw/perf_script.txt")
    assert text == b"a line\n" * 1000


@pytest.mark.parametrize("pack", [export_hf, export_zenodo])
def test_a_run_that_differs_from_its_manifest_is_not_packed(run_dir, tmp_path, pack):
    (run_dir / "trace.parquet").write_bytes(b"PAR1")
    with pytest.raises(ManifestError, match=r"trace\.parquet: its size is 4 bytes") as caught:
        pack(tmp_path / "tiny", tmp_path / "out.zip")
    assert [one.path for one in caught.value.differences] == ["trace.parquet"]
    assert not (tmp_path / "out.zip").exists()


@pytest.mark.parametrize("pack", [export_hf, export_zenodo])
def test_without_a_finished_run_there_is_nothing_to_pack(tmp_path, pack):
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "INCOMPLETE").write_text("{}")
    with pytest.raises(FileNotFoundError, match="no finished run.*not finished"):
        pack(tmp_path / "results", tmp_path / "out.zip")


def test_a_folder_that_holds_something_is_not_overwritten(finished, tmp_path):
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(FileExistsError, match="choose another"):
        export_hf(finished, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]
    (tmp_path / "empty").mkdir()
    assert export_hf(finished, tmp_path / "empty").runs == ["run_1"]


def test_an_export_follows_no_link_beside_its_folder(finished, tmp_path):
    """A link under the name that the export might use while it writes is left alone."""
    mine = tmp_path / "mine"
    mine.mkdir()
    (tmp_path / "hf.partial").symlink_to(mine)
    export_hf(finished, tmp_path / "hf")
    assert list(mine.iterdir()) == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "hf.partial", "mine"]


def test_names_in_a_card_are_escaped(tmp_path, trace, tables):
    name = "<script>|`x`"
    told = metadata(name, model="a | b <img src=x>")
    told["experiment"] = {"name": "---\nlicense: mit\n---", "description": "# not a heading\n<b>"}
    RunExporter(tmp_path / "run").export(trace, [], [], tables, metadata=told, figures=False)
    export_hf(tmp_path / "run", tmp_path / "hf")
    card = card_of(tmp_path / "hf")
    assert "license" not in card
    text = (tmp_path / "hf" / "README.md").read_text().split("---\n", 2)[2]
    assert "<script>" not in text and "<img" not in text and "<b>" not in text
    row = next(line for line in text.splitlines() if "&lt;script&gt;" in line)
    assert row.replace("\\|", "").count("|") == 8  # seven cells
