"""Decodes small packets in chunks while the activations of a view are read in turn."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from ...errors import StrapError

if TYPE_CHECKING:
    from .catalogue import Catalogue
    from .packet_reader import PacketReader

__all__ = ["Ahead", "Decoded"]

_MOST_ROWS = 4096  # of a chunk
_CHUNK_BYTES = 512 << 10
_ALIGNMENT = 16  # no element is larger

RowNumbers = npt.NDArray[np.int64]


# The bytes of several activations; then of one of them: its first byte, stored type and shape.
Decoded: TypeAlias = "tuple[npt.NDArray[np.uint8], int, str, tuple[int, ...]]"


class _Chunk(NamedTuple):
    """The decoded packets of some activations.

    The lists hold numbers and few distinct strings and tuples, so the garbage collector has
    next to nothing to visit.
    """

    first: int  # place of the first activation in the view
    data: npt.NDArray[np.uint8]
    starts: list[int]
    dtypes: list[str]
    shapes: list[tuple[int, ...]]


class Ahead:
    """The values of plain activations, decoded ahead. Thread-safe.

    Decoding a small packet takes less time than the call of the library. So activations that are
    read one after the other are decoded in chunks, each twice as long as the one before. If the
    caller skips activations, they are decoded one by one.
    """

    __slots__ = ("_catalogue", "_chunk", "_lock", "_next", "_packets", "_rows", "_want")

    def __init__(self, packets: PacketReader, catalogue: Catalogue, rows: RowNumbers) -> None:
        self._packets = packets
        self._catalogue = catalogue
        self._rows = rows
        self._lock = threading.Lock()
        self._chunk = _Chunk(0, np.empty(0, np.uint8), [], [], [])
        self._next = 0  # the place that continues the reading in turn
        self._want = 1  # packets of the next chunk

    def at(self, place: int) -> Decoded | None:
        """The activation at a place of the view. Copy the bytes to keep them.

        None if it is not decoded ahead; the caller then decodes it alone.
        """
        chunk = self._chunk
        if not 0 <= place - chunk.first < len(chunk.starts):
            with self._lock:
                if (decoded := self._decode(place)) is None:
                    return None
            chunk = decoded
        k = place - chunk.first
        return chunk.data, chunk.starts[k], chunk.dtypes[k], chunk.shapes[k]

    def _decode(self, place: int) -> _Chunk | None:
        chunk = self._chunk
        if 0 <= place - chunk.first < len(chunk.starts):  # another thread was faster
            return chunk
        in_turn, self._next = place == self._next, place + 1
        self._want = min(2 * self._want, _MOST_ROWS) if in_turn else 1
        if self._want == 1:
            return None
        some = self._rows[place : place + self._want]
        rows = some[np.logical_and.accumulate(self._catalogue.plain[some])].astype(np.uint64)
        data, ends = np.empty(_CHUNK_BYTES, np.uint8), np.empty(len(rows), np.uint64)
        try:
            done = self._packets.read_many(
                rows, data.ctypes.data, len(data), ends, alignment=_ALIGNMENT
            )
        except StrapError:  # decoding the activation alone raises the error again
            return None
        if done == 0:
            return None
        starts = np.zeros(done, np.uint64)
        starts[1:] = (ends[: done - 1] + np.uint64(_ALIGNMENT - 1)) & ~np.uint64(_ALIGNMENT - 1)
        dtypes, shapes = self._catalogue.forms(some[:done])
        self._chunk = _Chunk(place, data, starts.tolist(), dtypes, shapes)
        self._next = place + done
        return self._chunk
