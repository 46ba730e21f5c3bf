"""The reader of a run folder: several streams as one."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ..._native import ReaderInfo
from ...errors import InvalidArgumentError, NotFoundError
from .packet_reader import PacketReader
from .run_folder import RunStreams, Stream

__all__ = ["JoinedReader"]

_OF_ONE_STREAM = (b"capture_id", b"first_crc32c")  # metadata of an index


class _Piece(NamedTuple):
    """The rows of a reader from one on; `stream` is the number of its stream."""

    packets: PacketReader
    first: int
    stream: int

    @property
    def rows(self) -> int:
        return self.packets.info.rows - self.first


class JoinedReader:
    """The rows of several streams, one stream after the other.

    It keeps no number for a row: the place of each stream's first row is enough.

    Args:
        path: what the streams are parts of.
        source: opens the streams.

    Attributes:
        path: as given.
        info: the sums of the streams' facts, and the problems.

    Raises:
        StrapError: a stream cannot be opened.
    """

    def __init__(self, path: str, source: RunStreams) -> None:
        streams = _opened(source, live=False)
        pieces = [_Piece(stream.packets, 0, n) for n, stream in enumerate(streams)]
        self._set(path, source, streams, pieces, whole=True)

    def _set(
        self,
        path: str,
        source: RunStreams,
        streams: list[Stream],
        pieces: list[_Piece],
        *,
        whole: bool,
    ) -> None:
        self.path = path
        self._source = source
        self._streams = streams  # the reader of each that knows its last rows
        self._pieces = pieces
        self._whole = whole  # row 0 is the first one of the capture
        self._starts = np.cumsum([0, *(piece.rows for piece in pieces)]).astype(np.uint64)
        infos = [stream.packets.info for stream in streams]
        live = any(info.live for info in infos) or source.written
        self.info = ReaderInfo(
            indexed=all(info.indexed for info in infos),
            rows=int(self._starts[-1]),
            packets=sum(info.packets for info in infos),
            scanned=sum(info.scanned for info in infos),
            file_bytes=sum(info.file_bytes for info in infos),
            valid_bytes=sum(info.valid_bytes for info in infos),
            problem=source.problem(streams, live),
            live=live,
        )

    @property
    def written(self) -> datetime:
        return max(stream.packets.written for stream in self._streams)

    @property
    def fetched_bytes(self) -> int:
        return sum(stream.packets.fetched_bytes for stream in self._streams)

    def fetch_calls(self) -> None:
        for stream in self._streams:
            stream.packets.fetch_calls()

    def follow(self, first: int = 0) -> JoinedReader | None:
        """As `PacketReader.follow`, with streams that began later too.

        The new rows of all streams come after the known ones, so that these keep their numbers. If
        `first` is the first row of the capture, all rows are by stream again. Both readers share
        the streams without news.
        """
        if not 0 <= first <= self.info.rows:
            raise InvalidArgumentError(
                f"first = {first}: {self.path!r} can be followed from row 0 to {self.info.rows} on"
            )
        again = self._whole and first == 0
        news = [packets.follow(0 if again else packets.info.rows) for packets, _ in self._streams]
        live = any(
            (known if new is None else new).info.live
            for (known, _), new in zip(self._streams, news, strict=True)
        )
        begun = _opened(self._source, live=live)
        live = live or self._source.written or any(packets.info.live for packets, _ in begun)
        if not begun and all(packets is None for packets in news) and live == self.info.live:
            return None
        streams = [
            stream if packets is None else Stream(packets, stream.rank)
            for stream, packets in zip(self._streams, news, strict=True)
        ]
        if again:
            pieces = [_Piece(stream.packets, 0, n) for n, stream in enumerate([*streams, *begun])]
        else:
            pieces = self._from(first)
            pieces += [
                _Piece(packets, 0, n) for n, packets in enumerate(news) if packets is not None
            ]
            pieces += [_Piece(one.packets, 0, n) for n, one in enumerate(begun, len(streams))]
            if not pieces:  # only the end is new; one piece without rows has the columns
                last = self._pieces[-1]
                pieces = [last._replace(first=last.packets.info.rows)]
        following = object.__new__(JoinedReader)
        following._set(self.path, self._source, [*streams, *begun], pieces, whole=again)
        return following

    def _from(self, row: int) -> list[_Piece]:
        """The pieces of the rows from one on."""
        found = []
        for piece, start in zip(self._pieces, self._starts[:-1].tolist(), strict=True):
            gone = min(max(row - start, 0), piece.rows)
            if gone < piece.rows:
                found.append(piece._replace(first=piece.first + gone))
        return found

    # ---- rows -----------------------------------------------------------------

    def _place(self, row: int) -> tuple[_Piece, int]:
        """The piece of a row, and what to take from row numbers for numbers in its reader."""
        if not 0 <= row < self.info.rows:
            raise NotFoundError(f"{self.path!r} has {self.info.rows} rows, and no row {row}")
        at = int(np.searchsorted(self._starts, np.uint64(row), "right")) - 1
        return self._pieces[at], int(self._starts[at]) - self._pieces[at].first

    def _run(self, rows: npt.NDArray[np.uint64]) -> tuple[PacketReader, npt.NDArray[np.uint64]]:
        """The reader of the first row; the numbers in it of this and of the next rows of its."""
        piece, shift = self._place(int(rows[0]))
        low, high = shift + piece.first, shift + piece.first + piece.rows
        outside = (rows < low) | (rows >= high)
        count = int(outside.argmax()) if outside.any() else len(rows)
        # Row numbers are unsigned, and the shift may be negative.
        return piece.packets, (rows[:count].astype(np.int64) - shift).astype(np.uint64)

    def decoded_bytes(self, row: int) -> int:
        piece, shift = self._place(row)
        return piece.packets.decoded_bytes(row - shift)

    def read_into(self, row: int, address: int, size: int) -> None:
        piece, shift = self._place(row)
        piece.packets.read_into(row - shift, address, size)

    def read_many(
        self,
        rows: npt.NDArray[np.uint64],
        address: int,
        size: int,
        ends: npt.NDArray[np.uint64],
        *,
        alignment: int = 1,
    ) -> int:
        """As `PacketReader.read_many`. One call decodes rows of one stream."""
        if not len(rows):
            return 0
        packets, its = self._run(rows)
        return packets.read_many(its, address, size, ends, alignment=alignment)

    def read_ranges(self, ranges: npt.NDArray[np.uint64], address: int, size: int) -> int:
        """As `PacketReader.read_ranges`. One call decodes ranges of one stream."""
        if not len(ranges):
            return 0
        packets, its = self._run(ranges[:, 0])
        some = ranges[: len(its)].copy()
        some[:, 0] = its
        return packets.read_ranges(some, address, size)

    def prefetch(self, rows: npt.NDArray[np.uint64]) -> None:
        if not len(rows):
            for piece in self._pieces:
                piece.packets.prefetch(rows)
        while len(rows):
            packets, its = self._run(rows)
            packets.prefetch(its)
            rows = rows[len(its) :]

    def index(self, *columns: str) -> pa.RecordBatchReader:
        """As `PacketReader.index`. The rank of each row is that of its stream."""
        opened = [piece.packets.index(*columns) for piece in self._pieces]
        first = opened[0].schema
        metadata = {k: v for k, v in (first.metadata or {}).items() if k not in _OF_ONE_STREAM}
        schema = first.with_metadata(metadata or None)
        ranks = [self._streams[piece.stream].rank for piece in self._pieces]
        gone = [piece.first for piece in self._pieces]

        def batches() -> Iterator[pa.RecordBatch]:
            for batches, rank, first in zip(opened, ranks, gone, strict=True):
                left = first
                for batch in batches:
                    some = batch.slice(min(left, len(batch)))
                    left = max(0, left - len(batch))
                    if len(some):
                        yield _of_rank(some, rank, schema)

        return pa.RecordBatchReader.from_batches(schema, batches())

    def close(self) -> None:
        for packets in (*(one.packets for one in self._pieces), *(p for p, _ in self._streams)):
            packets.close()
        self._source.close()


def _opened(source: RunStreams, *, live: bool) -> list[Stream]:
    """Opens the streams that are not open yet.

    A segment can end between the reading of the rank file and its own opening. The next segment
    begins before that, so one more look finds it: without it a running capture would seem to have
    ended.

    Args:
        source: opens the streams.
        live: a capture writes one of the streams that are open.
    """
    found: list[Stream] = []
    try:
        while begun := list(source.opened()):
            found += begun
            if live or any(stream.packets.info.live for stream in found):
                break
    except BaseException:
        for stream in found:
            stream.packets.close()
        raise
    return found


def _of_rank(batch: pa.RecordBatch, rank: int, schema: pa.Schema) -> pa.RecordBatch:
    columns = batch.columns
    at = schema.get_field_index("rank")
    if at >= 0:
        # pa.array would import pandas.
        cells = np.full(len(batch), rank, np.int32)
        columns[at] = pa.Array.from_buffers(pa.int32(), len(batch), [None, pa.py_buffer(cells)])
    return pa.RecordBatch.from_arrays(columns, schema=schema)
