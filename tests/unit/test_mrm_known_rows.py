"""Rows are added for memory that an engine reports and that no row of a collector covers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pytest
from llm_instrumentation.mrm.collector.rows import make_batch
from llm_instrumentation.mrm.engines.base import PhaseEvent, PhaseRecord
from llm_instrumentation.mrm.known_rows import DSO, SYMBOL, KnownRows
from llm_instrumentation.mrm.labeller import TraceLabeller
from llm_instrumentation.mrm.ranges import known_ranges
from llm_instrumentation.mrm.schema import Kind, arrow_schema, kind_of

WEIGHTS, BUFFER = (0x10_0000, 0x20_0000), (0x50_0000, 0x51_0000)
KEYS, VALUES = (0x30_0000, 0x31_0000), (0x31_0000, 0x32_0000)
RANGES = [(*WEIGHTS, "weight"), (*KEYS, "kv_cache"), (*VALUES, "kv_cache"), (*BUFFER, "activation")]
LOADED, TEARDOWN, RELEASED = 200, 900, 1000


def record(event: PhaseEvent, at: int, **metadata: object) -> PhaseRecord:
    return PhaseRecord(event, "", at, at, metadata)


RECORDS = [
    record(PhaseEvent.MODEL_LOAD_START, 100),
    record(PhaseEvent.MODEL_LOAD_END, LOADED),
    record(PhaseEvent.GENERATION_START, 300, context_length=8),
    record(
        PhaseEvent.TOKEN_EMITTED, 400, token_index=0, context_tokens=9, memory_ranges=RANGES
    ),
    record(PhaseEvent.GENERATION_END, 500),
    record(PhaseEvent.TEARDOWN_START, TEARDOWN),
    record(PhaseEvent.TEARDOWN_END, RELEASED),
]  # fmt: skip


def trace(
    kind: Kind, *rows: tuple[int, int, int | None], loads: Sequence[int] = ()
) -> pa.RecordBatchReader:
    """A trace of rows (address, time, length), one batch each: loads by number, else stores."""
    schema = arrow_schema(kind)
    batches = [
        make_batch(
            schema,
            "run",
            number,
            times=np.array([time]),
            addresses=np.array([address], np.uint64),
            op_type="load" if number in loads else "store",
            length_bytes=[length],
        )
        for number, (address, time, length) in enumerate(rows)
    ]
    return pa.RecordBatchReader.from_batches(schema, batches)


def labelled(reader: pa.RecordBatchReader, records=RECORDS) -> list[dict]:
    kind = kind_of(reader.schema)
    labeller = TraceLabeller([], ranges=known_ranges(records, kind))
    completed = KnownRows(records, "run", kind).complete(reader)
    return labeller.label_table(completed).read_all().to_pylist()


def added(reader: pa.RecordBatchReader, records=RECORDS) -> list[dict]:
    return [row for row in labelled(reader, records) if row["dso"] == DSO]


def spans(rows: list[dict]) -> list[tuple[int, int]]:
    return [(row["address"], row["address"] + row["length_bytes"]) for row in rows]


@pytest.mark.parametrize("kind", [Kind.FIRST_TOUCHES, Kind.WRITE_SETS])
def test_memory_that_no_row_covers_is_stored_when_the_load_ends(kind):
    seen = [(KEYS[0], 250, None), (BUFFER[0] + 0x1000, 400, None), (0x99_0000, 300, None)]
    rows = added(trace(kind, *seen))
    assert spans(rows) == [WEIGHTS, VALUES]
    assert [row["region_type"] for row in rows] == ["weight", "kv_cache"]
    for row in rows:
        assert (row["op_type"], row["symbol"], row["run_id"]) == ("store", SYMBOL, "run")
        assert (row["timestamp_ns"], row["phase"]) == (LOADED - 1, "weight_load")
    assert [row["sample_id"] for row in rows] == [3, 4]


def test_an_added_allocation_is_released_in_the_teardown():
    cache = (KEYS[0], 150, VALUES[1] - KEYS[0]), (KEYS[0], 950, VALUES[1] - KEYS[0])
    rows = added(trace(Kind.ALLOCATIONS, *cache, loads=[1]))
    assert spans(rows) == [WEIGHTS, BUFFER, WEIGHTS, BUFFER]
    assert [row["op_type"] for row in rows] == ["store", "store", "load", "load"]
    assert [row["timestamp_ns"] for row in rows] == [LOADED - 1] * 2 + [TEARDOWN] * 2
    assert [row["region_id"] for row in rows[:2]] == [row["region_id"] for row in rows[2:]]


@pytest.mark.parametrize(
    ("made", "released", "lacks"),
    [(150, 950, []), (95, 950, ["store"]), (150, 1005, ["load"]), (95, 1005, ["store", "load"])],
)
def test_a_missing_half_of_an_allocation_is_added(made, released, lacks):
    """An allocation needs a store and a load at its release; a missing row is added."""
    size = BUFFER[1] - BUFFER[0]
    rows = (BUFFER[0], made, size), (BUFFER[0], released, size)
    found = [
        row
        for row in added(trace(Kind.ALLOCATIONS, *rows, loads=[1]))
        if row["address"] == BUFFER[0]
    ]
    assert [row["op_type"] for row in found] == lacks
    assert spans(found) == [BUFFER] * len(lacks)
    assert {row["region_type"] for row in found} <= {"activation"}


def test_releases_in_the_teardown_are_labelled_in_a_trace_of_allocations():
    """The memory of the engine is known until the end of the teardown in this kind only."""
    row = (KEYS[0], TEARDOWN + 50, 0x1000)
    types = {kind: labelled(trace(kind, row))[0]["region_type"] for kind in Kind}
    assert types.pop(Kind.ALLOCATIONS) == "kv_cache"
    assert set(types.values()) == {"unknown"}


def test_a_run_without_a_teardown_has_released_nothing():
    rows = added(trace(Kind.ALLOCATIONS), RECORDS[:-2])
    assert [row["op_type"] for row in rows] == ["store"] * 4


@pytest.mark.parametrize(
    "row",
    [
        (WEIGHTS[0] - 0x1000, 150, 0x10_1000),  # a mapped file, which begins before the weights
        (WEIGHTS[0], 50, 0x1000),  # before the load the address was other memory
        (WEIGHTS[0], RELEASED, 0x1000),
        (WEIGHTS[1], 150, None),
    ],
    ids=["begins before", "earlier", "later", "behind"],
)
def test_a_row_that_gets_no_label_covers_no_range(row):
    assert WEIGHTS in spans(added(trace(Kind.ALLOCATIONS, row)))


def test_no_rows_are_added_to_a_trace_of_accesses():
    """In a trace of accesses, memory without a row was not accessed."""
    assert added(trace(Kind.ACCESSES, (KEYS[0], 250, None))) == []


def test_an_engine_that_reports_no_ranges_adds_no_rows():
    known = KnownRows(RECORDS[:3], "run", Kind.WRITE_SETS)
    reader = trace(Kind.WRITE_SETS, (KEYS[0], 250, None))
    assert known.complete(reader) is reader
    assert known.told() == []


def test_the_ranges_alone_are_a_trace_of_allocations():
    """Without a collector's trace, each range becomes a store and a load."""
    known = KnownRows(RECORDS, "run", Kind.ALLOCATIONS)
    table = known.complete(None).read_all()
    assert table.schema.equals(arrow_schema(Kind.ALLOCATIONS), check_metadata=True)
    assert table.num_rows == 2 * len(RANGES)
    assert known.told() == [
        "4 of the 4 ranges that the engine names are in no row of the collector (1,048,576 bytes "
        "of weight, 131,072 bytes of kv_cache, 65,536 bytes of activation); each is recorded as "
        "the engine tells it (dso 'engine')"
    ]
