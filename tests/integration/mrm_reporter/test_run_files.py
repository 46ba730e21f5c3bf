"""The files of an exported run: manifest, metrics, Parquet."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from exported_runs import (
    BLOCK,
    REGION,
)
from llm_instrumentation.errors import InvalidArgumentError
from llm_instrumentation.mrm import check_parquet_schema
from llm_instrumentation.mrm.reporter import (
    build_manifest,
    build_metrics_table,
    export_kv_lifecycle,
    export_region_map,
    export_trace,
    verify_manifest,
    write_manifest,
    write_metrics_csv,
)
from llm_instrumentation.mrm.schema import ALL_COLUMNS, ARROW_SCHEMA, Kind
from synthetic_traces import make_trace, reference_tables

pytestmark = pytest.mark.usefixtures("plain_pages")


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
