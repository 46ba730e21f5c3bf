"""Makes batches of a trace from columns of numbers, for collectors with their own records."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ..parser.text import ParsedTrace
from ..schema import PAGE_BYTES, OpType, RegionType
from .base import TIME_KEY, PhaseBoundaries

__all__ = ["OPS", "Phases", "Words", "make_batch", "reader_of_text"]


#: The texts of ``op_type``: code 0 is a load, code 1 a store.
OPS = (OpType.LOAD.value, OpType.STORE.value)

#: A text column: one text for all rows (None: null), or a list of texts and for each row the
#: position of its text in this list (-1: null).
Words = str | None | tuple[Sequence[str], npt.NDArray[Any]]


class Phases:
    """Finds the phase of a time: the first one whose [start_ns, end_ns) contains the time."""

    def __init__(self, boundaries: PhaseBoundaries | None) -> None:
        self._spans = [
            (
                str(getattr(one["phase"], "value", one["phase"])),
                int(one["start_ns"]),
                int(one["end_ns"]),
            )
            for one in boundaries or ()
        ]
        self._names = list(dict.fromkeys(name for name, _, _ in self._spans))

    def of(self, times: npt.NDArray[np.int64]) -> Words:
        """The phases of a column of times, (rows,) int64 ns of CLOCK_MONOTONIC."""
        if not self._spans:
            return None
        codes = np.full(len(times), -1, np.int32)
        for name, start, end in reversed(self._spans):
            codes[(times >= start) & (times < end)] = self._names.index(name)
        return self._names, codes


def make_batch(
    schema: pa.Schema,
    run_id: str,
    first_id: int,
    *,
    times: npt.NDArray[np.int64],
    addresses: npt.NDArray[np.uint64],
    op_type: Words,
    **columns: Words | npt.NDArray[Any] | Sequence[int | None],
) -> pa.RecordBatch:
    """A batch of rows of a trace.

    Args:
        schema: the schema of the trace, from :func:`..schema.arrow_schema`.
        run_id: ``run_id`` of all rows.
        first_id: the ``sample_id`` of the first row; each further row has the next number.
        times: ``timestamp_ns``, (rows,).
        addresses: (rows,); ``address_page`` is computed from it.
        op_type: see :data:`Words`.
        columns: further columns by name. Without them ``symbol`` and ``dso`` are "",
            ``region_type`` is "unknown", ``region_id`` is 0, and other columns are null.
    """
    rows = len(times)
    given: dict[str, Any] = {
        "run_id": run_id,
        "sample_id": np.arange(first_id, first_id + rows, dtype=np.int64),
        "timestamp_ns": times,
        "address": addresses,
        "address_page": addresses // np.uint64(PAGE_BYTES),
        "op_type": op_type,
        "symbol": "",
        "dso": "",
        "region_type": RegionType.UNKNOWN.value,
        "region_id": np.zeros(rows, np.int64),
        **columns,
    }
    arrays = []
    for field in schema:
        value = given.get(field.name)
        if value is None:
            arrays.append(pa.nulls(rows, field.type))
        elif pa.types.is_dictionary(field.type):
            arrays.append(_words(value, rows))
        else:
            arrays.append(pa.array(value, field.type))
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _words(value: str | tuple[Sequence[str], npt.NDArray[Any]], rows: int) -> pa.DictionaryArray:
    words, codes = ([value], np.zeros(rows, np.int32)) if isinstance(value, str) else value
    indices = pa.array(codes, pa.int32(), mask=np.asarray(codes) < 0)
    return pa.DictionaryArray.from_arrays(indices, pa.array(words, pa.string()))


def reader_of_text(parsed: ParsedTrace, time_note: str | None = None) -> pa.RecordBatchReader:
    """The rows of a parsed text.

    Args:
        parsed: the result of a parser.
        time_note: what ``timestamp_ns`` is, if it is not the time of the access; it goes into the
            schema's metadata as :data:`.base.TIME_KEY`.
    """
    reader = parsed.reader()
    schema = reader.schema
    if time_note is not None:
        schema = schema.with_metadata({**(schema.metadata or {}), TIME_KEY: time_note.encode()})

    def batches() -> Iterator[pa.RecordBatch]:
        for batch in reader:
            yield pa.RecordBatch.from_arrays(batch.columns, schema=schema)

    return pa.RecordBatchReader.from_batches(schema, batches())
