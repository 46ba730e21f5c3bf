"""Small packets decoded some at a time, while the activations of a view are read in turn."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from ..errors import StrapError

if TYPE_CHECKING:
    from .._native import Reader
    from ._catalogue import Catalogue

__all__ = ["Ahead", "Decoded"]

_MOST_ROWS = 4096  # of a chunk
_CHUNK_BYTES = 512 << 10
_ALIGNMENT = 16  # no element is larger

Rows = npt.NDArray[np.int64]


# The bytes of several activations, where those of one begin, its stored type and its shape.
Decoded: TypeAlias = "tuple[npt.NDArray[np.uint8], int, str, tuple[int, ...]]"


class _Chunk(NamedTuple):
    """The decoded packets of some activations.

    Lists of numbers and of few strings and tuples: the garbage collector has next to nothing to
    look at in them.
    """

    first: int  # place of the first activation in the view
    data: npt.NDArray[np.uint8]
    starts: list[int]
    dtypes: list[str]
    shapes: list[tuple[int, ...]]


class Ahead:
    """The values of plain activations, decoded ahead. Thread-safe.

    A call of the library for each packet takes longer than to decode a small one. So activations
    that are read one behind the other are decoded in chunks, each twice as long as the one before.
    A reader that skips some decodes only what it asks for.
    """

    __slots__ = ("_catalogue", "_chunk", "_lock", "_native", "_next", "_rows", "_want")

    def __init__(self, native: Reader, catalogue: Catalogue, rows: Rows) -> None:
        self._native = native
        self._catalogue = catalogue
        self._rows = rows
        self._lock = threading.Lock()
        self._chunk = _Chunk(0, np.empty(0, np.uint8), [], [], [])
        self._next = 0  # the place that continues the reading in turn
        self._want = 1  # packets of the next chunk

    def at(self, place: int) -> Decoded | None:
        """The activation at a place of the view; what is kept of the bytes is to be a copy.

        None where it is not decoded ahead: the reader then decodes it alone.
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
            done = self._native.read_many(
                rows, data.ctypes.data, len(data), ends, alignment=_ALIGNMENT
            )
        except StrapError:  # decoding the activation alone raises it once more
            return None
        if done == 0:
            return None
        starts = np.zeros(done, np.uint64)
        starts[1:] = (ends[: done - 1] + np.uint64(_ALIGNMENT - 1)) & ~np.uint64(_ALIGNMENT - 1)
        dtypes, shapes = self._catalogue.forms(some[:done])
        self._chunk = _Chunk(place, data, starts.tolist(), dtypes, shapes)
        self._next = place + done
        return self._chunk
