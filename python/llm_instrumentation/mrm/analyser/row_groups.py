"""The row groups of a trace in Parquet files: where to cut the trace, and which trace it is."""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from ..._parsing import parsing
from ...errors import CorruptError
from ..trace_reader import parquet_files, reader_of

_TAIL = 8  # bytes of a Parquet file behind its footer: the footer's length and PAR1


@dataclass(frozen=True)
class RowGroups:
    """The row groups of a trace, counted over its files in the order of their names.

    Attributes:
        rows: the number of rows of each row group.
        fingerprint: the SHA-256 of the size and the footer of each file. The footers have the
            schema, the places and sizes of all columns, and their least and greatest values.
        bytes: the size of the files.
        overlap: whether a row group has a row that is earlier than one of a row group before it.
    """

    rows: tuple[int, ...]
    fingerprint: str
    bytes: int
    overlap: bool

    @classmethod
    def of(cls, path: Path) -> RowGroups:
        """Reads the footers of the trace at ``path``, and no rows if they have statistics.

        Raises:
            FileNotFoundError, InvalidArgumentError, OSError, CorruptError: as for
                :func:`~llm_instrumentation.mrm.trace_reader.reader_of`.
        """
        reader_of(path, ["timestamp_ns"]).close()  # raises the errors
        digest = hashlib.sha256()
        rows: list[int] = []
        times: list[tuple[int, int]] = []
        size = 0
        for file in parquet_files(path):
            length, footer = _footer(file)
            digest.update(length.to_bytes(8, "little") + footer)
            size += length
            with parsing(file, "is no whole Parquet file"), pq.ParquetFile(file) as parquet:
                for group in range(parquet.num_row_groups):
                    rows.append(parquet.metadata.row_group(group).num_rows)
                    times += _times(parquet, group)
        latest = [*accumulate((high for _, high in times), max)]
        overlap = any(low < high for (low, _), high in zip(times[1:], latest, strict=False))
        return cls(tuple(rows), digest.hexdigest(), size, overlap)

    def split(self, parts: int) -> list[range]:
        """The row groups of each of ``parts`` parts, with about equally many rows."""
        starts = [0, *accumulate(self.rows)]
        cuts = [bisect_left(starts, starts[-1] * n / parts) for n in range(parts)]
        return [range(*pair) for pair in zip(cuts, [*cuts[1:], len(self.rows)], strict=True)]

    def before(self, row_group: int) -> int:
        """The number of rows before a row group."""
        return sum(self.rows[:row_group])


def _footer(file: Path) -> tuple[int, bytes]:
    """The size of a Parquet file, and its footer."""
    with open(file, "rb") as opened:
        size = opened.seek(0, 2)
        opened.seek(-min(_TAIL, size), 2)
        length = int.from_bytes(opened.read(4), "little")
        if length > size - _TAIL:
            raise CorruptError(f"{file} is no whole Parquet file: its footer has {length} bytes")
        opened.seek(-(_TAIL + length), 2)
        return size, opened.read(length)


def _times(parquet: pq.ParquetFile, group: int) -> list[tuple[int, int]]:
    """The times of the earliest and the latest row of a row group; none if it has no rows."""
    column = parquet.schema_arrow.get_field_index("timestamp_ns")
    known: Any = parquet.metadata.row_group(group).column(column).statistics
    if known is not None and known.has_min_max and isinstance(known.min, int):
        return [(known.min, known.max)]
    times = parquet.read_row_group(group, columns=["timestamp_ns"]).column(0)
    if pa.types.is_timestamp(times.type):
        times = times.cast(pa.int64())
    found = pc.min_max(times).as_py()
    return [] if found["min"] is None else [(found["min"], found["max"])]
