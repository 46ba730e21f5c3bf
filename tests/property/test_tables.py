"""Properties that the tables have for any memory trace: Hypothesis draws the traces."""

from __future__ import annotations

from collections import Counter

import pyarrow as pa
import pyarrow.compute as pc
from hypothesis import given, settings
from hypothesis import strategies as st
from llm_instrumentation.mrm import compute_all
from llm_instrumentation.mrm.analyser import SUMMARY_TABLES

PAGE = 4096
TYPE_OF = {1: "weight", 2: "kv_cache", 3: "activation", 4: "activation"}

# Few addresses and regions, so that accesses share them. Times differ, so the order is defined.
accesses = st.lists(
    st.tuples(
        st.integers(0, 2**53),
        st.sampled_from([0, 8, 64, PAGE, PAGE + 8, 2**40, 2**64 - PAGE]),
        st.sampled_from(["load", "store"]),
        st.sampled_from(sorted(TYPE_OF)),
    ),
    min_size=1,
    max_size=60,
    unique_by=lambda row: row[0],
)


def trace(rows: list[tuple[int, int, str, int]]) -> pa.Table:
    times, addresses, ops, regions = zip(*rows, strict=True)
    return pa.table(
        {
            "run_id": ["r"] * len(rows),
            "sample_id": range(len(rows)),
            "timestamp_ns": times,
            "address": pa.array(addresses, pa.uint64()),
            "address_page": pa.array([address // PAGE for address in addresses], pa.uint64()),
            "op_type": ops,
            "region_type": [TYPE_OF[region] for region in regions],
            "region_id": regions,
        }
    )


def tables(rows: list[tuple[int, int, str, int]]) -> dict[str, pa.Table]:
    return compute_all(trace(rows), as_arrow=True)


@settings(deadline=None)
@given(accesses)
def test_every_access_and_page_is_counted_once(rows):
    found = tables(rows)
    counted = {
        row["region_id"]: (row["total_reads"], row["total_writes"])
        for row in found["read_freq"].to_pylist()
    }
    ops = Counter((region, op) for _, _, op, region in rows)
    assert counted == {
        region: (ops[region, "load"], ops[region, "store"]) for region in {r[3] for r in rows}
    }
    pages = {
        row["region_id"]: row["unique_pages"] for row in found["working_set_per_region"].to_pylist()
    }
    touched = {(region, address // PAGE) for _, address, _, region in rows}
    assert pages == Counter(region for region, _ in touched)


@settings(deadline=None)
@given(accesses)
def test_an_address_stored_once_is_write_once(rows):
    stores = Counter((region, address) for _, address, op, region in rows if op == "store")
    written = Counter(region for region, _ in stores)
    once = Counter(region for (region, _), times in stores.items() if times == 1)
    for row in tables(rows)["write_once"].to_pylist():
        region = row["region_id"]
        assert row["n_written_addresses"] == written.pop(region)
        assert row["n_write_once_addresses"] == once[region]
    assert not written, "regions that were stored and have no row"


@settings(deadline=None)
@given(accesses, st.randoms(use_true_random=False))
def test_the_order_of_the_rows_does_not_matter(rows, random):
    shuffled = rows[:]
    random.shuffle(shuffled)
    expected, found = tables(sorted(rows)), tables(shuffled)
    for name in SUMMARY_TABLES:
        assert (
            found[name]
            .sort_by(found[name].column_names[0])
            .equals(expected[name].sort_by(expected[name].column_names[0]))
        ), name


@settings(deadline=None)
@given(accesses, st.integers(0, 2**53))
def test_the_clock_s_start_does_not_matter(rows, later):
    """Adding a constant to all times changes only the columns that hold times."""
    expected = tables(rows)
    found = tables([(time + later, *rest) for time, *rest in rows])
    for name in SUMMARY_TABLES:
        for column in {"first_write_ns", "last_read_ns"} & set(found[name].column_names):
            moved = pc.subtract(found[name][column], later)
            place = found[name].column_names.index(column)
            found[name] = found[name].set_column(place, column, moved)
        assert found[name].to_pylist() == expected[name].to_pylist(), name


@settings(deadline=None)
@given(accesses, st.integers(1, 7))
def test_batches_do_not_matter(rows, size):
    """Record batches of any size give the same tables as one table."""
    whole = trace(rows)
    parts = compute_all(whole.to_reader(max_chunksize=size), as_arrow=True)
    assert all(parts[name].equals(table) for name, table in tables(rows).items())
