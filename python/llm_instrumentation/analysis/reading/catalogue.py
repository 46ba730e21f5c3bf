"""Groups the rows of an index into activations.

One row is one packet. An activation has one packet, or several: the parts of a split tensor, and
the float32 twin of a float16 packet whose source had finite values that float16 could not hold
(docs/STREAM_FORMAT.md). numpy and pyarrow do the work over all rows; only names with split tensors
or twins are walked row by row.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..._native import DTYPE_SIZES
from .columns import Columns, Ints, Texts, distinct

__all__ = ["FLOAT16", "PACKET_HEADER", "TWIN_SUFFIX", "TWIN_TRANSFORM", "Alike", "Catalogue"]

FLOAT16 = "float16"  # the stored type of float32; only these packets have twins
TWIN_SUFFIX = "!float32"
TWIN_TRANSFORM = "overflow_float32"
PACKET_HEADER = 6  # bytes, docs/STREAM_FORMAT.md

RowNumbers = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]


@dataclasses.dataclass(slots=True)
class _Packets:
    """The packets found so far of one stored form of a tensor."""

    rows: list[int]
    parts: int
    twin: _Packets | None = None

    @property
    def complete(self) -> bool:
        return len(self.rows) == self.parts


class Alike(NamedTuple):
    """Plain activations with the same stored type and number of dimensions.

    Attributes:
        dtype: the stored type.
        shapes: their shapes, an int64 array of shape (activations, dimensions).
    """

    dtype: str
    shapes: RowNumbers


class Catalogue:
    """The activations of an index. The row of its first packet identifies an activation.

    Attributes:
        columns: the columns of the index.
        names: all layer names with paths, numbered in the order of their first row.
        codes: the number of each row's name in `names`.
        activations: rows of the activations, in capture order.
        missing: rows of the tensors that are not in the stream, or incomplete.
        parts: all rows of an activation that has several packets, by its first row.
        twins: the rows of an activation's float32 twin, by its first row.
        said: stored types from the caller, by name, for activations that no index describes.
    """

    def __init__(self, columns: Columns) -> None:
        self.columns = columns
        columns.load("layer", "path", "error", "transform", "stored_dtype", "part", "parts")
        self.codes = self._name_all()
        self.parts: dict[int, tuple[int, ...]] = {}
        self.twins: dict[int, tuple[int, ...]] = {}
        self.said: dict[str, str] = {}
        self._incomplete: dict[int, str] = {}
        noted = self._valid("error")
        single = self._group(~noted)
        self.activations: RowNumbers = np.flatnonzero(single)
        self.missing: RowNumbers = np.union1d(
            np.flatnonzero(noted), np.fromiter(self._incomplete, np.int64)
        )

    # ---- names ----------------------------------------------------------------

    def _name_all(self) -> Ints:
        layer, layers = self.texts("layer")
        path, paths = self.texts("path")
        kind = np.min_scalar_type(len(layers) * len(paths))
        pairs, pair_of = distinct(layer.astype(kind) * kind.type(len(paths)) + path.astype(kind))
        self._number: dict[str, int] = {}
        number_of = []
        for pair in pairs:
            at, tail = divmod(pair, len(paths))
            # A scanned packet has its whole name as layer, so two pairs may give one name.
            name = f"{layers[at]}{paths[tail]}"
            number_of.append(self._number.setdefault(name, len(self._number)))
        self.names = tuple(self._number)
        kind = np.min_scalar_type(len(number_of))  # short numbers are sorted in linear time
        codes: Ints = np.array(number_of, kind)[pair_of]
        return codes

    def name(self, row: int) -> str:
        return self.names[int(self.codes[row])]

    def layers(self) -> tuple[str, ...]:
        """The names of the activations, in the order of their first one."""
        codes, _ = distinct(self.codes[self.activations])
        return tuple(self.names[code] for code in codes)

    @functools.cached_property
    def rows_by_name(self) -> dict[str, RowNumbers]:
        """The activations of each name, in capture order; names in order of appearance."""
        codes = self.codes[self.activations]
        order = np.argsort(codes, kind="stable")
        codes = codes[order]
        starts = np.flatnonzero(codes[1:] != codes[:-1]) + 1
        groups = np.split(self.activations[order], starts) if len(codes) else []
        groups.sort(key=lambda rows: int(rows[0]))
        return {self.name(int(rows[0])): rows for rows in groups}

    # ---- cells ----------------------------------------------------------------

    def numbers(self, column: str) -> npt.NDArray[Any]:
        """A column of numbers; an integer that is null reads as -1, a float as NaN."""
        return self.columns.numbers(column)

    def texts(self, column: str) -> Texts:
        """A column of texts as numbers into its distinct texts; null is -1."""
        return self.columns.texts(column)

    def text(self, column: str, row: int) -> str | None:
        codes, distinct = self.texts(column)
        code = int(codes[row])
        return None if code < 0 else distinct[code]

    def shape(self, row: int) -> tuple[int, ...] | None:
        ndim, start, lengths = self.columns.shapes()
        n, at = int(ndim[row]), int(start[row])
        return None if n < 0 else tuple(lengths[at : at + n].tolist())

    @functools.cached_property
    def plain(self) -> Mask:
        """Rows of activations of one packet whose shape and type the index has."""
        stored, names = self.texts("stored_dtype")
        known = np.array([name in DTYPE_SIZES for name in names] + [False])  # the last is for null
        plain = np.zeros(len(stored), np.bool_)
        plain[self.activations] = True
        plain &= known[stored] & (self.columns.shapes()[0] >= 0)
        plain[[*self.parts, *self.twins]] = False
        return plain

    def forms(self, rows: RowNumbers) -> tuple[list[str], list[tuple[int, ...]]]:
        """Stored types and shapes of plain activations."""
        ndim, start, lengths = self.columns.shapes()
        codes, names = self.texts("stored_dtype")
        same: dict[tuple[int, ...], tuple[int, ...]] = {}
        shapes = []
        for n, at in zip(ndim[rows].tolist(), start[rows].tolist(), strict=True):
            shape = tuple(lengths[at : at + n].tolist())
            shapes.append(same.setdefault(shape, shape))
        return [names[code] for code in codes[rows].tolist()], shapes

    def alike(self, rows: RowNumbers, dim: int | None = None) -> Alike | None:
        """The type and shapes of plain activations; None unless all have one type and shape.

        Args:
            rows: the activations.
            dim: a dimension in which the shapes may differ.
        """
        if not len(rows) or not self.plain[rows].all():
            return None
        ndim, start, lengths = self.columns.shapes()
        codes, names = self.texts("stored_dtype")
        codes, several = codes[rows], ndim[rows]
        if (codes != codes[0]).any() or (several != several[0]).any():
            return None
        n = int(several[0])
        shapes = lengths[start[rows, None] + np.arange(n)]
        same = (shapes == shapes[0]).all(axis=0)
        if dim is not None:
            if not -n <= dim < n:
                return None
            same[dim] = True
        return Alike(names[codes[0]], shapes) if same.all() else None

    def stored_dtype(self, row: int) -> str | None:
        """The type of an activation's own packets; None if neither index nor caller gives it."""
        known = self.text("stored_dtype", row) or (FLOAT16 if row in self.twins else None)
        return known or (self.said.get(self.name(row)) if self.said else None)

    def untyped(self) -> list[str]:
        """Names of the activations whose type neither index nor caller gives."""
        stored, _ = self.texts("stored_dtype")
        rows = self.activations[stored[self.activations] < 0]
        rows = np.setdiff1d(rows, np.fromiter(self.twins, np.int64))
        names = (self.names[code] for code in np.unique(self.codes[rows]).tolist())
        return [name for name in names if name not in self.said]

    def error(self, row: int) -> str | None:
        """Why a tensor is missing; None for an activation."""
        return self._incomplete.get(row) or self.text("error", row)

    def packet_rows(self, row: int) -> tuple[int, ...]:
        """The rows of all packets of an activation; the twin's rows come last."""
        return (*self.parts.get(row, (row,)), *self.twins.get(row, ()))

    def _valid(self, column: str) -> Mask:
        """A mask of the rows in which a column of texts is not null."""
        mask: Mask = self.texts(column)[0] >= 0
        return mask

    # ---- split tensors and twins ----------------------------------------------

    def _group(self, present: Mask) -> Mask:
        """Fills `parts`, `twins` and `_incomplete`; returns a mask of first rows."""
        part, parts = self.numbers("part"), self.numbers("parts")
        noted_twin, found_twin, subject = self._twin_rows(present)
        twin = noted_twin | found_twin
        walked = (parts > 1) | twin
        if not walked.any():
            return present
        walked |= np.isin(subject, subject[twin])
        rows = np.flatnonzero(walked)
        model, _ = self.texts("model")
        source = [model, *map(self.numbers, ("call", "step", "token", "rank", "thread"))]
        cells = (rows, present, part, parts, twin, found_twin, subject, *source)
        # A thread hands over the packets of a tensor one after the other, the twin's last. Packets
        # of several threads may alternate.
        growing: dict[tuple[Any, ...], _Packets] = {}
        latest: dict[int, _Packets] = {}
        tensors: list[_Packets] = []
        columns = (column if column is rows else column[rows] for column in cells)
        for row, here, number, count, is_twin, by_name, of, *rest in zip(
            *(column.tolist() for column in columns), strict=True
        ):
            key = (of, *rest)
            if not here:
                growing.pop((is_twin, key), None)
                continue
            if number > 0:
                packets = growing.get((is_twin, key))
                if packets and len(packets.rows) == number and packets.parts == count:
                    packets.rows.append(row)
                else:
                    tensors.append(_Packets([row], count))
                continue
            packets = growing[is_twin, key] = _Packets([row], count)
            # A scan finds only the name, so a twin belongs to the latest packet of its base name.
            base = latest.get(of) if by_name else growing.get((False, key))
            if is_twin and base and base.complete and not base.twin:
                base.twin = packets
                continue
            if not is_twin:
                latest[of] = packets
            tensors.append(packets)
        begins = present & ~walked
        for tensor in tensors:
            if self._settle(tensor):
                begins[tensor.rows[0]] = True
        return begins

    def _settle(self, tensor: _Packets) -> bool:
        """Records a tensor that was walked; False if it is incomplete."""
        first = tensor.rows[0]
        if not tensor.complete:
            self._incomplete[first] = (
                f"of its {tensor.parts} parts {len(tensor.rows)} are in the stream"
            )
            return False
        if tensor.parts > 1:
            self.parts[first] = tuple(tensor.rows)
        if tensor.twin and self._settle(tensor.twin):
            self.twins[first] = tuple(tensor.twin.rows)
        return True

    def _twin_rows(self, present: Mask) -> tuple[Mask, Mask, Ints]:
        """Finds twins.

        Returns:
            a mask of the twins that the index marks, a mask of those recognised by name, and for
            each row the number of the name that its values belong to.
        """
        transform, transforms = self.texts("transform")
        noted = np.zeros(len(transform), np.bool_)
        if TWIN_TRANSFORM in transforms:
            noted = present & (transform == transforms.index(TWIN_TRANSFORM))
        base_of = np.arange(len(self.names), dtype=self.codes.dtype)
        for name, number in self._number.items():
            if name.endswith(TWIN_SUFFIX):
                base_of[number] = self._number.get(name.removesuffix(TWIN_SUFFIX), number)
        found = present & ~self._valid("stored_dtype") & (base_of[self.codes] != self.codes)
        return noted, found, np.where(found, base_of[self.codes], self.codes)
