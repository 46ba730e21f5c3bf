"""Tensors as matrices: parts of them in fewer values, statistics, and single values.

A tensor is shown as a matrix of its last two dimensions; `lead` is the number of the matrix among
those of the other dimensions. A tensor of one dimension is cut into rows of `fold` values. Large
tensors are read in part.
"""

from __future__ import annotations

import dataclasses
import math
from collections import OrderedDict
from typing import Any

import numpy as np
import numpy.typing as npt

from ..analysis.attention import are_weights
from ..analysis.reading.snapshot import Snapshot, StoredForm
from ..analysis.reading.statistics import Statistics, statistics
from ..errors import InvalidArgumentError

__all__ = ["POOLS", "Cache", "Summary", "Tensor", "Tile"]

POOLS = ("extreme", "mean")  # how many values become one

_WHOLE = 1 << 21  # values of a tensor that is decoded whole, and kept
_PART = 1 << 21  # values that are decoded for one tile at most
_SPANS, _SPAN = 64, 1 << 12  # of a larger tensor, that its statistics are of
_BARS = 64
_SCALE = 0.995  # this quantile of the magnitudes has the strongest colour
_FEWEST_ROWS, _MOST_ROWS = 16, 1 << 16  # that are read of a large tensor for one tile
_FOLD = 1024  # values of a row of a tensor with one dimension

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]


class Cache:
    """The values of the tensors that were read last. One thread at a time may use it.

    Args:
        bytes_: how much memory they may take.
    """

    def __init__(self, bytes_: int = 64 << 20) -> None:
        self._most = bytes_
        self._kept: OrderedDict[Any, npt.NDArray[Any]] = OrderedDict()

    def get(self, key: Any) -> npt.NDArray[Any] | None:
        if key in self._kept:
            self._kept.move_to_end(key)
        return self._kept.get(key)

    def put(self, key: Any, values: npt.NDArray[Any]) -> None:
        self._kept[key] = values
        while sum(one.nbytes for one in self._kept.values()) > self._most:
            self._kept.popitem(last=False)


@dataclasses.dataclass(frozen=True)
class Summary:
    """Statistics of the values of a tensor.

    Attributes:
        read: how many values they are of; fewer than the tensor has if it is large.
        statistics: of these values.
        edges, counts: a histogram of the finite ones; empty if all are equal, or none is finite.
        scale: the magnitude that has the strongest colour: nearly all are below it.
    """

    read: int
    statistics: Statistics
    edges: tuple[float, float] | None
    counts: list[int]
    scale: float


@dataclasses.dataclass(frozen=True)
class Tile:
    """A part of a matrix in fewer values.

    Attributes:
        values: float32, [rows, columns]; magnitudes of complex values. If one of several values is
            NaN, their value is NaN. Behind the end of a folded tensor it is 0.
        sampled: not all values were read.
    """

    values: Floats
    sampled: bool


class Tensor:
    """A tensor of a capture.

    Args:
        snapshot: the capture.
        row: the activation.
        cache: keeps values of small tensors.
        key: the tensor's key in the cache.
        fold: the columns of a tensor with one dimension; 0: at most 1,024.

    Attributes:
        shape: of the stored values.
        dtype: the stored type, of the float32 twin if there is one.
        lead: the dimensions before the last two.
        rows, columns: of the matrices.

    Raises:
        StrapError: the tensor is missing or damaged.
    """

    def __init__(self, snapshot: Snapshot, row: int, cache: Cache, key: Any, fold: int = 0) -> None:
        self._snapshot, self._cache, self._key = snapshot, cache, key
        self._form: StoredForm = snapshot.form(row, True, None)
        self.shape, self.dtype = self._form.shape, self._form.dtype
        self.size = math.prod(self.shape)
        if len(self.shape) > 1:
            *lead, self.rows, self.columns = self.shape
            self.lead = tuple(lead)
        else:
            self.columns = min(fold or _FOLD, max(1, self.size))
            self.rows = -(-self.size // self.columns)
            self.lead = ()

    # ---- values ---------------------------------------------------------------

    def _whole(self) -> npt.NDArray[Any] | None:
        """All values, flat; None if they are too many."""
        if self.size > _WHOLE:
            return None
        if (values := self._cache.get(self._key)) is None:
            values = self._snapshot.numpy(self._form).reshape(-1)
            self._cache.put(self._key, values)
        return values

    def _read(self, spans: Ints) -> npt.NDArray[Any]:
        """The values of spans of elements, one after the other."""
        if (whole := self._whole()) is not None:
            return np.concatenate([whole[:0], *(whole[first : first + n] for first, n in spans)])
        return self._snapshot.read_spans(self._form, spans)

    def value(self, at: int) -> Any:
        """The value of the element `at` in row-major order, as a Python number.

        Raises:
            InvalidArgumentError: there is no such element.
        """
        if at >= self.size:
            raise InvalidArgumentError(f"at = {at}: the tensor has {self.size} values")
        return self._read(np.array([[at, 1]], np.int64))[0].item()

    def index(self, at: int) -> list[int]:
        """The place of the element `at` in each dimension."""
        return [int(n) for n in np.unravel_index(at, self.shape)] if self.shape else []

    # ---- statistics -----------------------------------------------------------

    def summary(self) -> Summary:
        """Statistics of all values, or of spans of a large tensor, evenly spread."""
        if (values := self._whole()) is None:
            first = np.linspace(0, self.size - _SPAN, _SPANS).astype(np.int64)
            values = self._read(np.stack([first, np.full_like(first, _SPAN)], axis=1))
        found = statistics(values)
        finite = _floats(values)
        finite = finite[np.isfinite(finite)]
        low, high = found.min, found.max
        counts, edges = [], None
        if low is not None and high is not None and low < high:
            # float32 rounds the ends, which must not leave their values out.
            inside = np.clip(finite.astype(np.float64), low, high)
            counts = np.histogram(inside, _BARS, (low, high))[0].tolist()
            edges = low, high
        return Summary(len(values), found, edges, counts, _scale(np.abs(finite)))

    def is_attention(self) -> bool:
        """Whether it has attention weights: [batch, heads, query, key], and rows that sum to 1.

        Of a large tensor some rows are read, evenly spread.
        """
        if len(self.shape) != 4 or not self.size or self.columns > _PART:
            return False
        if (values := self._whole()) is None:
            rows = self.size // self.columns
            some = np.linspace(0, rows - 1, max(1, min(_SPANS, _PART // self.columns)))
            first = some.astype(np.int64) * self.columns
            values = self._read(np.stack([first, np.full_like(first, self.columns)], axis=1))
        return not np.iscomplexobj(values) and are_weights(
            _floats(values).reshape(-1, self.columns)
        )

    # ---- tiles ----------------------------------------------------------------

    def tile(
        self, lead: int, rect: tuple[int, int, int, int], rows: int, columns: int, pool: str
    ) -> Tile:
        """A part of a matrix, in at most `rows` times `columns` values.

        Args:
            lead: the number of the matrix.
            rect: first row, first column, rows and columns of the part.
            rows: as many as the screen has room for.
            columns: likewise.
            pool: "extreme" takes the value with the largest magnitude of several, "mean" the mean.

        Raises:
            InvalidArgumentError: the part is not inside of the matrix.
        """
        top, left, height, width = rect
        for name, begin, length, there in (
            ("rows", top, height, self.rows), ("columns", left, width, self.columns),
        ):  # fmt: skip
            if begin + length > there:
                raise InvalidArgumentError(
                    f"the part has the {name} {begin} to {begin + length - 1}: the matrix has "
                    f"{there}"
                )
        if lead >= math.prod(self.lead):
            raise InvalidArgumentError(f"lead = {lead}: there are {math.prod(self.lead)} matrices")
        if not height or not width:
            return Tile(np.empty((0, 0), np.float32), False)
        rows, columns = min(rows, height), min(columns, width)
        start = lead * self.rows * self.columns
        if (whole := self._whole()) is not None:
            across, down = _runs(width, columns, width), _runs(height, rows, height)
            matrix = _filled(whole[start:], self.rows * self.columns)
            values = matrix.reshape(self.rows, self.columns)[
                top : top + height, left : left + width
            ]
        else:
            # Of a wide matrix few rows are read, so that each is read whole if possible.
            rows = min(rows, max(_FEWEST_ROWS, _PART // width))
            across = _runs(width, columns, _PART // rows)
            down = _runs(height, rows, min(_PART // across.total, _MOST_ROWS))
            spans = self._spans(start, top, left, width, across, down)
            found = self._read(_clipped(spans, self.size))
            values = _filled(found, down.total * across.total).reshape(down.total, across.total)
        values = _pooled(_floats(values), across.starts(), 1, pool)
        values = _pooled(values, down.starts(), 0, pool)
        return Tile(values, across.total < width or down.total < height)

    def _spans(
        self, start: int, top: int, left: int, width: int, across: _Runs, down: _Runs
    ) -> Ints:
        """The spans of elements at some places of a matrix, in row-major order."""
        start += top * self.columns + left
        if across.total == width == self.columns:  # runs of whole rows
            return np.stack([start + down.first * width, down.length * width], axis=1)
        first, length = across.first, across.length
        if across.total == width:
            first, length = np.array([0]), np.array([width])
        begins = start + down.each()[:, None] * self.columns + first
        return np.stack([begins, np.broadcast_to(length, begins.shape)], axis=2).reshape(-1, 2)


def _clipped(spans: Ints, size: int) -> Ints:
    """Spans without the elements from `size` on, which the last row of a folded tensor has."""
    first, end = spans[:, 0], spans.sum(axis=1)
    return np.stack([first, (np.minimum(end, size) - first).clip(0)], axis=1)


def _filled(values: npt.NDArray[Any], length: int) -> npt.NDArray[Any]:
    """The first `length` values, with zeros behind them if they are fewer."""
    return values[:length] if len(values) >= length else np.pad(values, (0, length - len(values)))


@dataclasses.dataclass(frozen=True)
class _Runs:
    """The places along one axis that are read: a run of each block. A block becomes one value.

    Attributes:
        first, length: of each run.
        total: how many places there are.
    """

    first: Ints
    length: Ints

    @property
    def total(self) -> int:
        return int(self.length.sum())

    def starts(self) -> Ints:
        """Where each run begins among the places."""
        return np.cumsum(self.length) - self.length

    def each(self) -> Ints:
        """All places."""
        return np.repeat(self.first - self.starts(), self.length) + np.arange(self.total)


def _runs(length: int, blocks: int, most: int) -> _Runs:
    """Cuts an axis into blocks and takes a run from each, so that at most `most` places are read.

    At least one place of each block is read.
    """
    edges = np.arange(blocks + 1) * length // blocks
    run = length if most >= length else max(1, most // blocks)
    return _Runs(edges[:-1], np.minimum(np.diff(edges), run))


def _pooled(values: Floats, starts: Ints, axis: int, pool: str) -> Floats:
    """One value for each run along an axis."""
    lengths = np.diff(np.append(starts, values.shape[axis]))
    if len(starts) == values.shape[axis]:
        return values
    if pool == "mean":
        total: Floats = np.add.reduceat(values, starts, axis=axis)
        total /= (lengths if axis == 1 else lengths[:, None]).astype(np.float32)
        return total
    # The first value of each run, then the second ones: reduceat takes four times as long here.
    # maximum and minimum keep NaN, so that none is hidden.
    high = low = np.take(values, starts, axis=axis)
    for k in range(1, int(lengths.max())):
        part = np.take(values, starts + np.minimum(k, lengths - 1), axis=axis)
        high, low = np.maximum(high, part), np.minimum(low, part)
    return np.where(high >= -low, high, low)


def _floats(values: npt.NDArray[Any]) -> Floats:
    if np.iscomplexobj(values):
        values = np.abs(values)
    with np.errstate(over="ignore"):
        return values.astype(np.float32, copy=False)


def _scale(magnitudes: Floats) -> float:
    """The quantile of magnitudes that has the strongest colour; the largest if it is 0, or 1."""
    if not len(magnitudes):
        return 1.0
    place = int(_SCALE * (len(magnitudes) - 1))
    found = float(np.partition(magnitudes, place)[place])
    return found or float(magnitudes.max()) or 1.0
