"""The calls of a capture, for looking up what a token of a step was."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ..errors import CorruptError
from .rows import NotTokenAlignedError

__all__ = ["Calls", "Chosen"]

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


class Chosen(NamedTuple):
    """For each of some activations the call that it belongs to.

    Attributes:
        first: the call's first row in the table; -1: there is no call.
        rows: sequences in its batch.
        tokens: tokens of each row.
        decoder: whether the tokens of the decoder count.
    """

    first: Ints
    rows: Ints
    tokens: Ints
    decoder: bool


class _Lists:
    """A column of lists as arrays.

    Attributes:
        values: the values of all cells.
        starts: the place of each cell's first value.
        lengths: values of each cell; -1: the cell is null.
    """

    def __init__(self, column: pa.ChunkedArray) -> None:
        cells = column.combine_chunks()
        if isinstance(cells, pa.ChunkedArray):
            cells = pa.concat_arrays(cells.chunks) if cells.num_chunks else pa.array([], cells.type)
        offsets = np.asarray(cells.offsets).astype(np.int64)
        self.values = np.asarray(cells.values)
        self.starts = offsets[:-1]
        self.lengths = np.where(np.asarray(cells.is_valid()), np.diff(offsets), -1)

    def at(self, rows: Ints, tokens: Ints, unknown: Any) -> npt.NDArray[Any]:
        """The values at some places; `unknown` where a cell is null."""
        known = self.lengths[rows] > tokens
        values: npt.NDArray[Any]
        if known.all():
            values = self.values[self.starts[rows] + tokens]
            return values
        values = np.full(len(rows), unknown, self.values.dtype)
        values[known] = self.values[self.starts[rows[known]] + tokens[known]]
        return values


class Calls:
    """The rows of a calls file.

    Args:
        path: of the file, for messages.
        table: its rows.

    Raises:
        CorruptError: the list of encoders is damaged.
    """

    def __init__(self, path: str, table: pa.Table) -> None:
        self._table = table
        metadata = table.schema.metadata or {}
        try:
            self.encoders = json.loads(metadata.get(b"encoders", b"{}"))
        except ValueError:
            raise CorruptError(f"{path}: its list of encoders is damaged") from None
        self._step = table["step"].to_numpy()
        row = table["row"].to_numpy()
        self._lists: dict[str, _Lists] = {}
        # Numbers; or the places of texts, and the texts, the last of which is for null.
        self._cells: dict[str, tuple[Ints, npt.NDArray[Any] | None]] = {}
        # The calls: their first rows, and the sequences in their batches.
        self._first = np.flatnonzero(row == 0)
        self._rows = np.diff(np.append(self._first, len(row)))
        first = pa.array(self._first)
        self._model, self._models = _codes(table["model"].take(first))
        self._entry, self._entries = _codes(table["entry"].take(first))

    def lists(self, name: str) -> _Lists:
        """A column of lists."""
        found = self._lists.get(name)
        if found is None:
            found = self._lists[name] = _Lists(self._table[name])
        return found

    def cells(self, name: str, rows: Ints) -> npt.NDArray[Any]:
        """Cells of a column of numbers or texts; a null number is -1, a null text None."""
        if name not in self._cells:
            column = self._table[name]
            if pa.types.is_integer(column.type):
                self._cells[name] = column.fill_null(-1).to_numpy(), None
            else:
                codes, distinct = _codes(column)
                self._cells[name] = codes, np.array([*distinct, None], object)
        numbers, texts = self._cells[name]
        found: npt.NDArray[Any] = numbers[rows] if texts is None else texts[numbers[rows]]
        return found

    def of_layer(self, model: str, layer: str, steps: Ints) -> Chosen:
        """The calls to which the activations of a layer belong.

        A step may have several calls, of modules side by side. A layer belongs to the call of a
        module that contains it.

        Args:
            model: the model's name in the index.
            layer: the module's name.
            steps: the step of each activation.

        Raises:
            NotTokenAlignedError: a step has several calls that contain the layer.
        """
        inside = np.array([_holds(entry, layer) for entry in self._entries], np.bool_)
        right = np.array([name == model for name in self._models], np.bool_)
        of = np.flatnonzero(right[self._model] & inside[self._entry])
        of = of[np.argsort(self._step[self._first[of]], kind="stable")]
        step = self._step[self._first[of]]
        begins, ends = (np.searchsorted(step, steps, side) for side in ("left", "right"))
        if len(several := steps[ends - begins > 1]):
            raise NotTokenAlignedError(
                f"step {several[0]} has several calls of modules that contain {layer!r}: its "
                "tensors do not say of which call they are"
            )
        found = ends > begins
        call = of[begins[found]]
        decoder = self._is_of_decoder(model, layer, call)
        positions = self.lists("decoder_positions" if decoder else "positions")
        first, rows, tokens = (np.full(len(steps), n, np.int64) for n in (-1, 0, -1))
        first[found], rows[found] = self._first[call], self._rows[call]
        tokens[found] = positions.lengths[self._first[call]]
        return Chosen(first, rows, tokens, decoder)

    def shares(self, model: str, layer: str) -> bool:
        """Whether both the encoder and the decoder of a model use the layer's module."""
        return layer in self.encoders.get(model, {}).get("shared", ())

    def _is_of_decoder(self, model: str, layer: str, calls: Ints) -> bool:
        """Whether the layer has the tokens of the decoder in some of the calls."""
        encoders = self.encoders.get(model, {}).get("modules", ())
        if any(_holds(name, layer) for name in encoders):
            return False
        if not encoders:
            given = self.lists("decoder_positions").lengths[self._first[calls]] >= 0
            return bool(given.any())
        # A call of the decoder alone has its text under the names without "decoder_".
        both = [any(_holds(entry, name) for name in encoders) for entry in self._entries]
        return bool(np.array(both, np.bool_)[self._entry[calls]].any())


def _holds(module: str, name: str) -> bool:
    """Whether a module is the one with this name, or contains it."""
    return module in ("", name) or name.startswith(f"{module}.")


def _codes(column: pa.ChunkedArray) -> tuple[Ints, list[str]]:
    """A column of texts as numbers into its distinct texts; null is -1."""
    encoded = column.dictionary_encode().combine_chunks()
    if isinstance(encoded, pa.ChunkedArray):
        encoded = encoded.unify_dictionaries()
        if not encoded.num_chunks:
            return np.zeros(0, np.int64), []
        encoded = pa.concat_arrays(encoded.chunks)
    indices = encoded.indices.fill_null(-1).to_numpy(zero_copy_only=False)
    return indices.astype(np.int64), encoded.dictionary.to_pylist()
