"""Traces built with known properties give tables with exactly these properties."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from llm_instrumentation.mrm import compute_all, compute_distributions, compute_retention
from llm_instrumentation.mrm.analyser import DISTRIBUTION_TABLES, SUMMARY_TABLES
from llm_instrumentation.mrm.schema import Kind, arrow_schema

SECOND = 10**9


def trace(*rows: tuple[int, int, str, str, int], length: list[int | None] | None = None):
    """The trace of rows (time in ns, address, op, region type, region id)."""
    times, addresses, ops, types, regions = zip(*rows, strict=True)
    columns = {
        "run_id": ["r"] * len(rows),
        "sample_id": range(len(rows)),
        "timestamp_ns": times,
        "address": pa.array(addresses, pa.uint64()),
        "address_page": pa.array([a >> 12 for a in addresses], pa.uint64()),
        "op_type": ops,
        "region_type": types,
        "region_id": regions,
    }
    if length is not None:
        columns["length_bytes"] = pa.array(length, pa.int64())
    return pa.table(columns)


def test_weights_read_for_thirty_seconds_are_retained_for_thirty():
    weights = trace(
        (0, 0x1000, "store", "weight", 1),
        *((second * SECOND, 0x1000, "load", "weight", 1) for second in range(1, 31)),
    )
    tables = compute_all(weights)
    assert tables["retention_summary"].retention_p99_s.tolist() == [30.0]
    assert tables["write_once"].write_once_ratio.tolist() == [1.0]
    assert tables["read_freq"].reads_per_write.tolist() == [30.0]
    assert tables["iai"].iai_p50_ns.tolist() == [SECOND]
    assert tables["suitability"].suitability.tolist() == ["high_mrm"]


def test_a_scratch_buffer_written_over_and_over_is_no_candidate():
    """A region whose address is stored many times is not write-once and has low suitability."""
    scratch = trace(
        *((10 * k, 0x2000, op, "activation", 7) for k, op in enumerate(["store", "load"] * 50))
    )
    tables = compute_all(scratch)
    assert tables["write_once"].n_written_addresses.tolist() == [1]
    assert tables["write_once"].n_write_once_addresses.tolist() == [0]
    assert tables["suitability"].suitability.tolist() == ["low_mrm"]


def test_a_kv_cache_grows_by_its_tokens():
    tokens, block = 64, 256
    rows = []
    for token in range(tokens):
        now = token * 1_000_000
        rows.append((now, 0x10000 + token * block, "store", "kv_cache", 2 + token))
        rows += [
            (now + 1 + k, 0x10000 + k * block, "load", "kv_cache", 2 + k) for k in range(token + 1)
        ]
    kv = trace(*rows, length=[block] * len(rows))
    tables = compute_all(kv)
    assert tables["retention_summary"].n_regions.tolist() == [tokens]
    assert set(tables["write_once"].write_once_ratio) == {1.0}
    assert tables["read_freq"].total_reads.sum() == tokens * (tokens + 1) // 2
    # Block k is stored with token k and read for the last time in the last step.
    last = (tokens - 1) * 1_000_000 + 1
    expected = [last + k - k * 1_000_000 for k in range(tokens)]
    assert tables["retention_per_region"].retention_ns.tolist() == expected

    over_time = compute_distributions(kv, tables=["bandwidth_over_time"])["bandwidth_over_time"]
    assert over_time.written_bytes.sum() == tokens * block
    assert over_time.read_bytes.sum() == tokens * (tokens + 1) // 2 * block
    # Each step lies in a window of its own: token k reads the k + 1 blocks up to its own.
    assert over_time.reads.tolist() == list(range(1, tokens + 1))
    assert over_time.writes.tolist() == [1] * tokens


def test_a_sequential_sweep_has_the_stride_of_its_step():
    """Loads 64 bytes apart have mean and median stride 64."""
    sweep = trace(*((k, 0x1000 + 64 * k, "load", "weight", 1) for k in range(257)))
    table = compute_all(sweep)["locality_per_region"]
    assert table.mean_stride_bytes.tolist() == [64.0]
    assert table.median_stride_bytes.tolist() == [64.0]
    assert table.same_page_fraction.tolist() == [(256 - 4) / 256]


def test_quantiles_of_a_thousand_known_gaps():
    gaps = np.random.default_rng(5).permutation(np.arange(1, 1001))
    times = np.concatenate([[0], np.cumsum(gaps)])
    table = compute_all(trace(*((int(t), 0x40, "load", "runtime", 3) for t in times)))["iai"]
    assert table.n_intervals.tolist() == [1000]
    assert table.iai_p50_ns.tolist() == [int(np.percentile(np.arange(1, 1001), 50))]
    assert table.iai_p99_ns.tolist() == [int(np.percentile(np.arange(1, 1001), 99))]
    assert table.iai_mean_ns.tolist() == [500.5]


def test_times_above_two_to_the_53_stay_exact():
    base = 2**62
    table, _ = compute_retention(
        trace((base, 8, "store", "weight", 1), (base + 3, 8, "load", "weight", 1))
    )
    assert table.retention_ns.tolist() == [3]
    assert table.first_write_ns.tolist() == [base]


def test_addresses_above_two_to_the_63():
    high = 2**64 - 4096
    table = compute_all(
        trace((0, high, "store", "unknown", 0), (1, high + 4095, "load", "unknown", 0))
    )["locality_per_region"]
    assert table.mean_stride_bytes.tolist() == [4095.0]
    assert table.same_page_fraction.tolist() == [1.0]


def expanded(table: pa.Table) -> pa.Table:
    """Splits each row into one row for each page, as docs/MEMORY_TRACES.md defines it."""
    rows = []
    for row in table.to_pylist():
        address, length = row["address"], row.pop("length_bytes")
        last = address + max(length or 1, 1) - 1
        for page in range(address >> 12, (last >> 12) + 1):
            at = max(address, page << 12)
            rows.append({**row, "address": at, "address_page": page})
    return pa.Table.from_pylist(rows, schema=table.drop_columns(["length_bytes"]).schema)


@pytest.mark.parametrize("seed", range(20))
def test_a_row_with_a_length_is_an_access_to_each_of_its_pages(seed):
    rng = np.random.default_rng(seed)
    rows = [
        (
            int(rng.integers(0, 50)),
            int(rng.integers(0, 20_000)),
            str(rng.choice(["load", "store"])),
            str(rng.choice(["weight", "kv_cache"])),
            int(rng.integers(1, 4)),
        )
        for _ in range(40)
    ]
    lengths = [None if rng.random() < 0.2 else int(rng.integers(0, 20_000)) for _ in rows]
    compact = trace(*rows, length=lengths)
    ours = compute_all(compact, as_arrow=True)
    pages = compute_all(expanded(compact), as_arrow=True)
    for name in SUMMARY_TABLES:
        assert ours[name].equals(pages[name]), name


def test_every_form_of_a_trace_gives_the_same_tables(tmp_path):
    """Frames of pandas, polars and DuckDB, record batches, files and folders are accepted."""
    duckdb, polars = pytest.importorskip("duckdb"), pytest.importorskip("polars")
    table = trace(
        *((k, 0x1000 * (k % 7), "store" if k % 5 == 0 else "load", "weight", 1) for k in range(99))
    )
    import pyarrow.parquet as pq

    pq.write_table(table.slice(0, 40), tmp_path / "a.parquet")
    pq.write_table(table.slice(40), tmp_path / "b.parquet")
    pq.write_table(table, tmp_path.parent / "one.parquet")
    expected = compute_all(table, as_arrow=True)
    forms = {
        "pandas": table.to_pandas(),
        "pandas with categories": table.to_pandas().astype({"op_type": "category"}),
        "polars": polars.from_arrow(table),
        "polars lazily": polars.from_arrow(table).lazy(),
        "duckdb": duckdb.from_arrow(table),
        "reader": table.to_reader(max_chunksize=7),
        "file": tmp_path.parent / "one.parquet",
        "folder": str(tmp_path),
    }
    for form, given in forms.items():
        found = compute_all(given, as_arrow=True)
        assert all(found[name].equals(expected[name]) for name in SUMMARY_TABLES), form


def test_an_empty_trace_has_all_tables_with_their_columns():
    full = compute_all(trace((0, 1, "load", "weight", 1), (5, 1, "load", "weight", 1)))
    empty = compute_all(arrow_schema().empty_table())
    assert tuple(empty) == SUMMARY_TABLES
    for name, table in empty.items():
        assert len(table) == 0
        assert list(table.columns) == list(full[name].columns)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.drop_columns(["address", "op_type"]), "address, op_type"),
        (lambda t: _with(t, "timestamp_ns", [0, -1]), "timestamp_ns.*-1"),
        (lambda t: _with(t, "timestamp_ns", [0.0, float("nan")]), "timestamp_ns.*NaN"),
        (lambda t: _with(t, "timestamp_ns", [0, None]), "timestamp_ns.*row 1.*no value"),
        (lambda t: _with(t, "op_type", ["load", "prefetch"]), "op_type.*prefetch"),
        (lambda t: _with(t, "address", [1, -4096]), "address.*-4096"),
        (lambda t: _with(t, "address", ["0x10", "0x20"]), "address.*not integers"),
        (lambda t: _with(t, "length_bytes", [4, -4]), "length_bytes.*-4"),
    ],
)
def test_bad_columns_are_refused_by_name(change, message):
    """A missing column, or a value that no trace can hold, raises an error that names both."""
    good = trace((0, 1, "load", "weight", 1), (5, 1, "load", "weight", 1))
    with pytest.raises(ValueError, match=message):
        compute_all(change(good))


def _with(table: pa.Table, name: str, values: list) -> pa.Table:
    if name in table.column_names:
        table = table.drop_columns([name])
    return table.append_column(name, pa.array(values))


def test_first_touches_give_neither_intervals_nor_retention():
    """A trace of first touches gives no intervals and warns; retention is refused."""
    touches = trace((0, 0x1000, "load", "weight", 1)).replace_schema_metadata(
        arrow_schema(Kind.FIRST_TOUCHES).metadata
    )
    with pytest.warns(UserWarning, match="iai"):
        tables = compute_all(touches)
    assert len(tables["iai"]) == 0
    assert len(tables["working_set_summary"]) == 1
    with pytest.raises(ValueError, match="retention"):
        compute_retention(touches)


def test_damaged_and_missing_files_are_refused(tmp_path):
    import pyarrow.parquet as pq

    path = tmp_path / "trace.parquet"
    pq.write_table(trace((0, 1, "load", "weight", 1)), path)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(ValueError, match=r"trace\.parquet"):
        compute_all(path)
    with pytest.raises(FileNotFoundError, match="nowhere"):
        compute_all(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match="no Parquet"):
        compute_all(tmp_path / "empty")
    with pytest.raises(ValueError, match="is no trace"):
        compute_all(42)


def test_distributions_add_up():
    """The counts of each distribution add up to all regions, intervals or accesses."""
    rng = np.random.default_rng(3)
    rows = [
        (
            int(t),
            int(rng.integers(0, 64)) * 4096,
            "store" if rng.random() < 0.3 else "load",
            "kv_cache" if region % 2 else "weight",
            int(region),
        )
        for t, region in zip(
            np.cumsum(rng.integers(1, 1000, 3000)), rng.integers(1, 9, 3000), strict=True
        )
    ]
    table = trace(*rows)
    found = compute_distributions(table, bins=10, cdf_points=50, windows=16, top=3)
    assert tuple(found) == DISTRIBUTION_TABLES
    assert found["retention_histogram"].n_regions.sum() == 8
    for _, cdf in found["retention_cdf"].groupby("region_type"):
        assert cdf.fraction.is_monotonic_increasing
        assert cdf.fraction.iloc[-1] == 1.0
    assert found["reuse_histogram"].n_intervals.sum() == compute_all(table)["iai"].n_intervals.sum()
    assert found["reuse_distance_histogram"].n_accesses.sum() == 3000
    over = found["bandwidth_over_time"]
    assert over.reads.sum() + over.writes.sum() == 3000
    assert over.window_start_ns.nunique() <= 32
    assert len(found["top_regions"]) == 3
    assert found["top_regions"].n_accesses.is_monotonic_decreasing


def test_reuse_distance_counts_distinct_pages_between():
    # Pages a b c a a: the second a has distance 2 (b and c), the third has distance 0.
    pages = [0, 1, 2, 0, 0]
    table = trace(*((k, p << 12, "load", "weight", 1) for k, p in enumerate(pages)))
    found = compute_distributions(table, tables=["reuse_distance_histogram"])
    rows = found["reuse_distance_histogram"].dropna()
    counted = {
        (int(low), int(high)): int(n)
        for low, high, n in zip(
            rows.bin_low_pages, rows.bin_high_pages, rows.n_accesses, strict=True
        )
        if n
    }
    assert sum(counted.values()) == 2
    assert any(low <= 2 <= high for low, high in counted)
    assert any(low == 0 for low, _ in counted)
    first = found["reuse_distance_histogram"]
    assert first[first.bin_low_pages.isna()].n_accesses.tolist() == [3]


def test_frames_come_back_as_pandas_by_default():
    table = trace((0, 1, "load", "weight", 1))
    assert all(isinstance(frame, pd.DataFrame) for frame in compute_all(table).values())
    assert all(isinstance(t, pa.Table) for t in compute_all(table, as_arrow=True).values())
