"""The rows of several layers and captures, as aligned blocks for a writer."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ...errors import CorruptError, InvalidArgumentError
from ..reader import ActivationReader
from ..reading.elements import element_size
from ..reading.selection import Selector
from ..rows import COLUMNS, Rows
from ..token_rows.capture_tokens import LayersDifferError

if TYPE_CHECKING:
    import torch

__all__ = [
    "CAPTURE",
    "COLUMNS_OF_EXPORTS",
    "Block",
    "Layer",
    "Source",
    "column_dtype",
]

Ints = npt.NDArray[np.int64]

#: The column with the number of the capture, in the order in which the captures were given.
CAPTURE = "capture"
COLUMNS_OF_EXPORTS = (*(name for name in COLUMNS if name != "text"), CAPTURE)

_BLOCK_BYTES = 32 << 20  # values that are in memory at a time
_COMPARED = 1 << 20  # rows whose tokens are compared together
_WAY_OUT = "Export them apart, or only the steps that both have"
_TOKEN = ("step", "batch_row", "position", "token_id", "token_hash")  # what identifies a token


class Layer(NamedTuple):
    """A layer of an export.

    Attributes:
        name: the layer's name in the captures.
        shape: shape of a row's vector: (width,) or (heads, width).
        dtype: the type of its values in the export, by torch's name.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str


class Block:
    """Consecutive rows of one capture: the values of each layer, and the columns.

    Args:
        capture: number of the capture.
        path: of its stream, for messages.
        rows: the rows of each layer.
        layers: the layers.
    """

    def __init__(
        self, capture: int, path: str, rows: Sequence[Rows], layers: Sequence[Layer]
    ) -> None:
        self._capture = capture
        self._path = path
        self._rows = rows
        self._layers = layers

    def __len__(self) -> int:
        return len(self._rows[0])

    def numpy(self, layer: int) -> npt.NDArray[Any]:
        """The vectors of a layer, shape [rows, *shape]."""
        with self._naming_the_capture():
            values = self._rows[layer].to_numpy()
        return values.astype(self._layers[layer].dtype, copy=False)

    def torch(self, layer: int) -> torch.Tensor:
        """The vectors of a layer, shape [rows, *shape]."""
        with self._naming_the_capture():
            return self._rows[layer].to_torch(self._layers[layer].dtype)

    @contextlib.contextmanager
    def _naming_the_capture(self) -> Iterator[None]:
        """Adds the stream to errors that name a packet only."""
        try:
            yield
        except CorruptError as error:
            raise CorruptError(f"{self._path}: {error}") from error

    def column(self, name: str) -> npt.NDArray[Any]:
        """A column: int64 (uint64 for hashes), or objects for texts."""
        if name == CAPTURE:
            return np.full(len(self), self._capture, np.int64)
        return self._rows[0].column(name).astype(column_dtype(name), copy=False)


def column_dtype(name: str) -> Any:
    """The numpy type of a column; object for texts."""
    if name == CAPTURE or isinstance(COLUMNS[name], int):
        return np.uint64 if name == "token_hash" else np.int64
    return object


class Source:
    """The rows of some layers of captures, one capture after the other.

    Args:
        captures: the streams.
        layers: names or patterns.
        steps, padding, without_tokens: as for `ActivationReader.rows`.
        dtype_of: gives the type of a layer's values in the export, for the layer's name and its
            stored types.
        context: keep whole contexts of so many tokens only; None: keep all rows.
        opened: closes the readers.

    Attributes:
        layers: the layers.
        length: number of rows.
        left_out_rows: rows that are in no whole context.
        left_out_activations: activations whose call is unknown, in the layer that has the most.
        row_bytes: bytes of the values of a row.

    Raises:
        LayersDifferError: layers of a capture have different tokens.
        InvalidArgumentError: captures differ in layers, shapes or types; or no row is left.
    """

    def __init__(
        self,
        captures: Sequence[str | os.PathLike[str]],
        layers: Iterable[str],
        *,
        steps: Selector,
        padding: bool,
        without_tokens: Iterable[int],
        dtype_of: Callable[[str, set[str]], str],
        context: int | None,
        opened: contextlib.ExitStack,
    ) -> None:
        patterns = list(layers)
        steps = list(steps) if isinstance(steps, Iterable) else steps  # read for each layer
        how = {"steps": steps, "padding": padding, "without_tokens": list(without_tokens)}
        self._context = context
        self._paths = [os.fspath(capture) for capture in captures]
        self._parts: list[list[Rows]] = []
        self.left_out_rows = self.left_out_activations = 0
        longest = 0
        for capture in self._paths:
            reader = opened.enter_context(ActivationReader(capture))
            rows = _aligned(reader, patterns, how)
            if self._parts:
                _check_alike(self._paths[0], self._parts[0], capture, rows)
            self.left_out_activations += max(one.left_out for one in rows)
            if context is not None:
                chosen, longest_here = whole_contexts(rows[0], context)
                longest = max(longest, longest_here)
                self.left_out_rows += len(rows[0]) - len(chosen)
                rows = _taken(rows, chosen)
            self._parts.append(rows)
        self.length = sum(len(rows[0]) for rows in self._parts)
        if not self.length and context is not None:
            raise InvalidArgumentError(
                f"context={context}: no text has so many rows, the longest has {longest}"
            )
        if not self.length:
            raise InvalidArgumentError("no row is left: padding or without_tokens leave out all")
        self.layers = [
            Layer(
                rows[0].layer, rows[0].shape, dtype_of(rows[0].layer, {one.dtype for one in rows})
            )
            for rows in zip(*self._parts, strict=True)
        ]
        self.row_bytes = sum(
            math.prod(layer.shape) * element_size(layer.dtype) for layer in self.layers
        )

    def rows_in(self, size: int) -> int:
        """Rows whose values have about `size` bytes, at least one; whole contexts if there are."""
        unit = self._context or 1
        return max(1, size // max(1, self.row_bytes * unit)) * unit

    def blocks(self, first: int, stop: int, size: int | None = None) -> Iterator[Block]:
        """The rows from `first` to `stop`, as blocks of at most `size` rows.

        None: rows of 32 MiB.
        """
        size = size or self.rows_in(_BLOCK_BYTES)
        at = 0
        for capture, rows in enumerate(self._parts):
            end = at + len(rows[0])
            low, high = max(first, at), min(stop, end)
            for start in range(low, high, size):
                some = slice(start - at, min(start + size, high) - at)
                yield Block(capture, self._paths[capture], [one[some] for one in rows], self.layers)
            at = end


def _aligned(reader: ActivationReader, patterns: list[str], how: dict[str, Any]) -> list[Rows]:
    """The rows of the layers that fit the patterns, which have the same tokens."""
    names = dict.fromkeys(name for pattern in patterns for name in reader._fitting(pattern))
    found: list[Rows] = []
    for name in names:
        rows = reader.rows(name, **how)
        if found:
            _compare(reader.path, found[0], rows)
            rows = _sharing(rows, found[0])
        found.append(rows)
    if not found:
        raise InvalidArgumentError("layers: name at least one")
    return found


def _compare(path: str, first: Rows, other: Rows) -> None:
    """Refuses layers whose tokens differ.

    Raises:
        LayersDifferError: they do.
    """
    common = min(len(first), len(other))
    for start in range(0, common, _COMPARED):
        some = slice(start, min(start + _COMPARED, common))
        pieces = first[some], other[some]
        differ = np.zeros(len(pieces[0]), np.bool_)
        for name in _TOKEN:
            differ |= pieces[0].column(name) != pieces[1].column(name)
        if differ.any():
            place = start + int(np.flatnonzero(differ)[0])
            raise LayersDifferError(
                f"{path}: {first.layer!r} and {other.layer!r} have different tokens from row "
                f"{place} on: {_told(first, place)}, but {_told(other, place)}. {_WAY_OUT}"
            )
    if len(first) != len(other):
        raise LayersDifferError(
            f"{path}: {first.layer!r} has {len(first)} rows and {other.layer!r} has {len(other)}, "
            f"the first {common} of them with the same tokens. {_WAY_OUT}"
        )


def _told(rows: Rows, place: int) -> str:
    row = rows[place]
    return (
        f"token {row.token_id} at position {row.position} of batch row {row.batch_row} in step "
        f"{row.step}"
    )


def _sharing(rows: Rows, first: Rows) -> Rows:
    """The same rows, without places of their own if they are those of `first`.

    So an export of many layers has 8 bytes in memory for each row, not for each row and layer.
    """
    same = np.array_equal(rows._numbers, first._numbers)
    return Rows(rows._source, first._numbers) if same else rows


def _taken(rows: list[Rows], chosen: Ints) -> list[Rows]:
    first = rows[0][chosen]
    return [first, *(_sharing(one[chosen], first) for one in rows[1:])]


def _check_alike(first: str, ours: list[Rows], capture: str, rows: list[Rows]) -> None:
    """Refuses a capture whose layers differ from those of the first one."""
    names, others = ([one.layer for one in layers] for layers in (ours, rows))
    if odd := sorted(set(names) ^ set(others)):
        raise InvalidArgumentError(
            f"{first} and {capture} differ in the layers "
            f"{', '.join(map(repr, odd[:3]))}: name layers that all captures have"
        )
    rows.sort(key=lambda one: names.index(one.layer))
    for one, other in zip(ours, rows, strict=True):
        if one.shape != other.shape:
            raise InvalidArgumentError(
                f"{one.layer!r} has vectors of shape {list(one.shape)} in {first} and "
                f"{list(other.shape)} in {capture}: export the captures apart"
            )


def text_order(rows: Rows) -> tuple[Ints, Ints, Ints]:
    """The rows text by text.

    A text is a sequence of one call of the module in its steps. If the sequence is unknown, it is
    a row of the batch in one step. Rows of a text stay in the order of capture.

    Returns:
        the places of all rows, where each text begins among them, and the rows of each text.
    """
    sequence = rows.column("sequence").astype(np.int64)
    known = sequence >= 0
    keys = [rows.column("call"), sequence, np.where(known, -1, rows.column("step"))]
    keys.append(np.where(known, -1, rows.column("batch_row")))
    order = np.lexsort(keys)  # stable, so rows of a text stay in the order of capture
    begins = np.zeros(len(order), np.bool_)
    begins[:1] = True
    for key in keys:
        begins[1:] |= key[order][1:] != key[order][:-1]
    starts = np.flatnonzero(begins)
    return order, starts, np.diff(np.append(starts, len(order)))


def whole_contexts(rows: Rows, context: int) -> tuple[Ints, int]:
    """The places of the rows in whole contexts, one context after the other.

    The rows of a text, see `text_order`, are cut into contexts from its first row on. Contexts are
    in the order of their first rows.

    Returns:
        the places, and the rows of the longest text.
    """
    order, starts, lengths = text_order(rows)
    place = np.arange(len(order)) - np.repeat(starts, lengths)
    kept = order[place < np.repeat(lengths // context * context, lengths)].reshape(-1, context)
    kept = kept[np.argsort(kept[:, 0], kind="stable")]
    return kept.reshape(-1), int(lengths.max(initial=0))
