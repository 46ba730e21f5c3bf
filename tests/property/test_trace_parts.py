"""A trace that is cut into any parts gives the tables of the whole trace, byte for byte."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llm_instrumentation.mrm import Kind, analyse_part, compute_all, merge_parts
from llm_instrumentation.mrm.reporter.parquet_export import export_table
from llm_instrumentation.mrm.schema import KIND_KEY

PAGE = 4096

# Few addresses, regions and times, so that parts share them. Some lengths have hundreds of pages.
accesses = st.lists(
    st.tuples(
        st.integers(0, 40) | st.integers(0, 2**62),
        st.sampled_from([0, 8, PAGE - 8, PAGE, 3 * PAGE, 2**40, 2**63, 2**64 - 2**21]),
        st.sampled_from(["load", "store"]),
        st.sampled_from(["weight", "kv_cache", "activation", None]),
        st.integers(-1, 3),
        st.sampled_from([None, 1, PAGE, 3 * PAGE + 1, 200 * PAGE]),
    ),
    max_size=40,
)


def trace(rows: list[tuple], kind: Kind) -> pa.Table:
    columns = list(zip(*rows, strict=True)) or [[]] * 6
    addresses = pa.array(columns[1], pa.uint64())
    table = pa.table(
        {
            "run_id": pa.array(["r"] * len(rows), pa.string()),
            "sample_id": pa.array(range(len(rows)), pa.int64()),
            "timestamp_ns": pa.array(columns[0], pa.int64()),
            "address": addresses,
            "address_page": pa.array([a // PAGE for a in columns[1]], pa.uint64()),
            "op_type": pa.array(columns[2], pa.string()),
            "region_type": pa.array(columns[3], pa.string()),
            "region_id": pa.array(columns[4], pa.int64()),
            "length_bytes": pa.array(columns[5], pa.int64()),
        }
    )
    return table.replace_schema_metadata({KIND_KEY: kind.value.encode()})


def written(tables: dict[str, pa.Table], folder: Path) -> dict[str, bytes]:
    """The bytes of the files of tables, as `strap trace merge` writes them."""
    return {
        name: export_table(table, folder / f"{name}.parquet").read_bytes()
        for name, table in tables.items()
    }


@pytest.mark.filterwarnings("ignore:.*empty:UserWarning")
@settings(deadline=None, max_examples=60)
@given(
    accesses,
    st.booleans(),
    st.integers(1, 6),
    st.lists(st.integers(0, 40), max_size=4),
    st.sampled_from([Kind.ACCESSES, Kind.ACCESSES, *Kind]),
)
def test_any_cut_gives_the_tables_of_the_whole(rows, in_order, group, cuts, kind):
    if in_order:
        rows = sorted(rows, key=lambda row: row[0])
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        path = folder / "trace.parquet"
        pq.write_table(trace(rows, kind), path, row_group_size=group)
        groups = pq.read_metadata(path).num_row_groups
        at = sorted(min(cut, groups) for cut in cuts)
        parts = [folder / f"part.{number}" for number in range(len(at) + 1)]
        for part, first, end in zip(parts, [0, *at], [*at, groups], strict=True):
            analyse_part(path, range(first, end), part, memory_gb=1e-6)
        got = written(merge_parts(parts[::-1], as_arrow=True, memory_gb=1e-6), folder / "parts")
        assert got == written(compute_all(path, as_arrow=True), folder / "whole")
