"""The columns of an index as numpy arrays, each read on first use."""

from __future__ import annotations

import math
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

if TYPE_CHECKING:
    from .packet_reader import PacketReader

__all__ = ["Columns", "Ints", "Shapes", "Texts", "distinct", "plain"]

Ints = npt.NDArray[np.integer[Any]]

# A column of texts as numbers into its distinct texts; null is -1.
Texts = tuple[Ints, list[str]]

# Number of dimensions (-1: unknown) and first dimension of each row; all dimensions.
Shapes = tuple[Ints, npt.NDArray[np.int64], npt.NDArray[np.int64]]


class Columns:
    """The columns of an index. Thread-safe.

    The library keeps the index in its own memory, in as few bytes as its values need. Here a column
    of integers takes 1 to 8 bytes a row, and a column of texts 1 to 4.
    """

    def __init__(self, packets: PacketReader) -> None:
        self._packets = packets
        self._lock = threading.RLock()
        self._rest: pa.RecordBatchReader | None = None  # the index after the reader was closed
        self._table: pa.Table | None = None
        self._known: dict[str, Any] = {}
        self.rows: int = packets.info.rows

    def numbers(self, name: str) -> npt.NDArray[Any]:
        """A column of numbers; an integer that is null reads as -1, a float as NaN."""
        values: npt.NDArray[Any] = self._column(name)
        return values

    def texts(self, name: str) -> Texts:
        """A column of texts, distinct ones in the order of their first row."""
        texts: Texts = self._column(name)
        return texts

    def shapes(self) -> Shapes:
        """The column `shape`."""
        shapes: Shapes = self._column("shape")
        return shapes

    def table(self) -> pa.Table:
        """The whole index."""
        with self._lock:
            if self._table is None:
                stream = self._packets.index() if self._rest is None else self._rest
                self._table = stream.read_all()
            return self._table

    def close(self) -> None:
        """Keeps the index available after its reader is closed."""
        with self._lock:
            if self._table is None and self._rest is None:
                self._rest = self._packets.index()

    def load(self, *names: str) -> None:
        """Reads columns together, which takes less time than one by one."""
        with self._lock:
            names = tuple(name for name in names if name not in self._known)
            if not names:
                return
            if self._table is None and self._rest is None:
                source = self._packets.index(*names)
            else:
                source = self.table().select(names).to_reader()
            gatherers = [_gatherer(field, self.rows) for field in source.schema]
            for batch in source:
                for gatherer, cells in zip(gatherers, batch.columns, strict=True):
                    gatherer.add(cells)
            for name, gatherer in zip(names, gatherers, strict=True):
                self._known[name] = gatherer.result()

    def _column(self, name: str) -> Any:
        if name not in self._known:
            self.load(name)
        return self._known[name]


def distinct(values: Ints) -> tuple[list[int], npt.NDArray[np.int32]]:
    """The distinct values in the order of first appearance, and each value's number among them."""
    if values.dtype.kind == "u" and values.dtype.itemsize <= 2:
        # The last write to a place stays. pyarrow would first import its functions, in 25 ms.
        first = np.full(1 << 8 * values.dtype.itemsize, len(values))
        first[values[::-1]] = np.arange(len(values) - 1, -1, -1)
        found = np.flatnonzero(first < len(values))
        found = found[np.argsort(first[found])]
        number = np.zeros(len(first), np.int32)
        number[found] = np.arange(len(found))
        return found.tolist(), number[values]
    kind = getattr(pa, values.dtype.name)()
    cells = pa.Array.from_buffers(kind, len(values), [None, pa.py_buffer(values)])
    encoded = cells.dictionary_encode()
    return encoded.dictionary.to_pylist(), plain(encoded.indices, -1)


def plain(cells: pa.Array, null: float) -> npt.NDArray[Any]:
    """The cells of a column of numbers, with `null` for missing cells.

    It reads the Arrow buffers, because pyarrow's own conversions import pandas, and that import
    takes longer than reading the index.
    """
    kind, (_, data) = np.dtype(str(cells.type)), cells.buffers()
    if kind == np.bool_:
        values = _bits(data, cells.offset, len(cells))
    else:
        values = np.frombuffer(data or b"", kind, len(cells), cells.offset * kind.itemsize)
    if not cells.null_count:
        return values
    valid = cells.is_valid()
    bits = _bits(valid.buffers()[1], valid.offset, len(cells))
    return np.where(bits, values, kind.type(null))


def _bits(data: pa.Buffer | None, offset: int, count: int) -> npt.NDArray[np.bool_]:
    first = offset // 8
    raw = np.frombuffer(data or b"", np.uint8, -(-(offset + count) // 8) - first, first)
    bits = np.unpackbits(raw, bitorder="little")[offset % 8 :][:count]
    return bits.view(np.bool_)


class _Numbers:
    """Gathers a column of numbers. Integers take as few bytes as the largest one needs."""

    def __init__(self, rows: int, field: pa.Field) -> None:
        kind = np.dtype(str(field.type))
        self._signs = kind.kind == "u" and field.nullable  # read as int64, which has -1 for null
        self._kind = kind = np.dtype(np.int64) if self._signs else kind
        self._values = np.empty(rows, kind if kind.kind == "f" else f"{kind.kind}1")
        self._at = 0
        self._null = math.nan if kind.kind == "f" else -1

    def add(self, cells: pa.Array) -> None:
        if not len(cells):
            return
        values = plain(cells.cast(pa.int64()) if self._signs else cells, self._null)
        if self._kind.kind != "f":
            limits = [np.iinfo(f"{self._kind.kind}{size}") for size in (1, 2, 4, 8)]
            low, high = int(values.min()), int(values.max())
            fits = next(i.dtype for i in limits if i.min <= low and high <= i.max)
            wide = np.promote_types(fits, self._values.dtype)
            self._values = self._values.astype(wide, copy=False)
        self._values[self._at : self._at + len(cells)] = values
        self._at += len(cells)

    def result(self) -> npt.NDArray[Any]:
        return self._values


class _Texts:
    def __init__(self, rows: int) -> None:
        self._codes = np.empty(rows, np.int8)  # becomes wider when there are more texts
        self._at = 0
        self._number: dict[str, int] = {}

    def add(self, cells: pa.Array) -> None:
        encoded = cells if pa.types.is_dictionary(cells.type) else cells.dictionary_encode()
        number = self._number
        texts = encoded.dictionary.to_pylist()
        places = np.array([*(number.setdefault(text, len(number)) for text in texts), -1])
        while len(number) > np.iinfo(self._codes.dtype).max:
            self._codes = self._codes.astype(f"i{2 * self._codes.itemsize}")
        its = self._codes[self._at : self._at + len(cells)]
        if encoded.null_count == len(cells) or len(texts) + (encoded.null_count > 0) == 1:
            its[:] = places[0]  # one text, or null, in all rows
        else:
            its[:] = places[plain(encoded.indices, -1)]
        self._at += len(cells)

    def result(self) -> Texts:
        return self._codes, list(self._number)


class _Shapes:
    def __init__(self, rows: int) -> None:
        self._ndim = np.empty(rows, np.int16)
        self._start = np.empty(rows, np.int64)
        self._at = self._gathered = 0
        self._lengths: list[npt.NDArray[np.int64]] = []

    def add(self, cells: pa.Array) -> None:
        if not len(cells):
            return
        ends = np.frombuffer(cells.buffers()[1], np.int32, len(cells) + 1, 4 * cells.offset)
        rows = slice(self._at, self._at + len(cells))
        self._ndim[rows] = ends[1:] - ends[:-1]
        if cells.null_count:
            self._ndim[rows][plain(cells.is_null(), True)] = -1
        np.add(ends[:-1], self._gathered - int(ends[0]), out=self._start[rows])
        self._at += len(cells)
        lengths = plain(cells.values, -1)[ends[0] : ends[-1]]
        self._gathered += len(lengths)
        self._lengths.append(lengths)

    def result(self) -> Shapes:
        return self._ndim, self._start, np.concatenate([np.empty(0, np.int64), *self._lengths])


def _gatherer(field: pa.Field, rows: int) -> _Numbers | _Texts | _Shapes:
    if pa.types.is_string(field.type) or pa.types.is_dictionary(field.type):
        return _Texts(rows)
    if pa.types.is_list(field.type):
        return _Shapes(rows)
    return _Numbers(rows, field)
