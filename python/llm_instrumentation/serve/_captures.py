"""A capture as the pages ask for it: plain data, read as far as it is needed."""

from __future__ import annotations

import itertools
import os
import re
from typing import Any

import numpy as np
import numpy.typing as npt

from ..analysis.activation import Activation
from ..analysis.files.stored_effects import StoredNode
from ..analysis.neurons.unit_logits import UnitLogits
from ..analysis.reader import ActivationReader, ActivationView
from ..analysis.reading.summary import LayerSummary, layers, summary
from ..analysis.rows import Rows
from ..analysis.token_rows.text_rows import token_labels
from ..errors import NotFoundError
from ._axes import GivenTokens, axes_of
from ._tensors import Cache, Tensor, Tile
from ._texts import Texts
from ._units import Units

__all__ = ["Capture"]

_MISSING = 50  # tensors without a packet that the overview lists
_POINTS = 48  # of a line of norms
#: The columns of the index that the page of a tensor has.
_COLUMNS = (
    "model", "request", "step", "token", "call", "rank", "thread", "source_dtype", "codec",
    "transform", "parameters", "mse", "mean_square", "mantissa_bits", "length",
)  # fmt: skip
_GENERATIONS = itertools.count()


class Capture:
    """A capture that pages look into. One thread at a time may use it.

    Args:
        source: the path of a stream, or an open reader.
        tokenizer: its `decode` gives the texts of tokens; or None.
        cache: keeps values of tensors.
        logits: what units write to the logits of the model; None: that is unknown.

    Attributes:
        units: the units of its layers.

    Raises:
        StrapError: the stream cannot be read; see `ActivationReader`.
    """

    def __init__(
        self,
        source: str | os.PathLike[str] | ActivationReader,
        tokenizer: Any,
        cache: Cache,
        logits: UnitLogits | None = None,
    ) -> None:
        if isinstance(source, ActivationReader):
            self._reader, self._owned = source, False
        else:
            self._reader, self._owned = ActivationReader(source, warn=False), True
        self._tokenizer, self._cache, self._logits = tokenizer, cache, logits
        self._forget()

    @property
    def path(self) -> str:
        """The path of the stream."""
        return self._reader.path

    def close(self) -> None:
        """Closes the reader, unless it was given open."""
        if self._owned:
            self._reader.close()

    def _forget(self) -> None:
        """Lets go of what was found in the capture before it changed."""
        self._generation = next(_GENERATIONS)
        self._overview: dict[str, Any] | None = None
        self._layers: list[LayerSummary] | None = None
        self._found_texts: Texts | None = None
        self.units = Units(self._reader, self._tokenizer, self._logits)

    # ---- overview -------------------------------------------------------------

    def refresh(self) -> None:
        """Takes in what was written since. A stream that was replaced is opened anew.

        Raises:
            StrapError: the stream cannot be read any more.
        """
        try:
            self._reader.refresh()
        except NotFoundError:
            anew = ActivationReader(self.path, warn=False)
            self.close()
            self._reader, self._owned = anew, True
        self._forget()

    def prepare(self) -> None:
        """Finds what the first pages ask for, while nobody asks."""
        self.overview()
        self.layers("", 0, 1)
        self._reader._catalogue.columns.load(*_COLUMNS)  # together it takes less time

    def overview(self) -> dict[str, Any]:
        """The facts about the capture; its problems."""
        if self._overview is None:
            self._overview = {
                **vars(summary(self._reader)),
                "untyped": len(self._reader._catalogue.untyped()),
                "missing_tensors": [
                    {"name": one.name, "step": one.step, "row": one.row, "error": one.error}
                    for one in self._reader.missing[:_MISSING]
                ],
            }
        return self._overview

    def layers(self, wanted: str, begin: int, count: int) -> dict[str, Any]:
        """The layers whose names have `wanted` in them, with a line of their norms."""
        if self._layers is None:
            self._layers = layers(self._reader.select())
        wanted = wanted.casefold()
        found = [one for one in self._layers if wanted in one.name.casefold()]
        shown = found[begin : begin + count]
        return {
            "total": len(found),
            "layers": [{**vars(one), "norms": self._norms(one.name)} for one in shown],
        }

    def _norms(self, layer: str) -> list[float] | None:
        """Root mean squares of a layer's tensors in the order of capture, means of up to 48 runs.

        None: the index does not have them.
        """
        rows = self._reader._catalogue.rows_by_name[layer]
        squares = self._reader._catalogue.numbers("mean_square")[rows]
        squares = squares[np.isfinite(squares)]
        if not len(squares):
            return None
        points = min(len(squares), _POINTS)
        edges = np.arange(points + 1) * len(squares) // points
        means = np.add.reduceat(np.sqrt(squares), edges[:-1]) / np.diff(edges)
        found: list[float] = means.tolist()
        return found

    # ---- one layer, one tensor ------------------------------------------------

    def of_node(self, node: StoredNode) -> list[dict[str, Any]]:
        """What the capture has of a node: its layer, and of attention the weights.

        Returns:
            for each the name of a tensor, and the number of the matrix that belongs to the node's
            head; None: the node is no head, or the tensor has no matrix for each.
        """
        name = node.layer + ("!input" if node.side == "input" else "")
        found: list[dict[str, Any]] = []
        if name in self._reader.layers:
            found.append({"layer": name, "lead": None})
        if node.kind not in ("attention", "heads"):
            return found
        for name in self._reader.layers:
            if name.startswith((f"{node.layer}.", f"{node.layer}[")):
                first = self._reader[name][0]
                if len(first.shape or ()) == 4 and self._is_attention(first):
                    return [*found, {"layer": name, "lead": node.head}]
        return found

    def _is_attention(self, activation: Activation) -> bool:
        return activation.transform is None and self._tensor(activation, 0).is_attention()

    def activations(self, layer: str, begin: int, count: int, step: int | None) -> dict[str, Any]:
        """Some tensors of a layer, in the order of capture; and the layers of its kind.

        These have the same name but for the numbers in it: the same part of every block.

        Args:
            layer: its name.
            begin: the first to give.
            count: how many.
            step: give those around the first one of this step, or of a later one, instead.
        """
        view = self._reader[layer]
        if step is not None:
            later = np.flatnonzero(view._column("step") >= step)
            begin = int(later[0]) // count * count if len(later) else begin
        return {
            "total": len(view),
            "begin": begin,
            "alike": [name for name in self._reader.layers if _kind(name) == _kind(layer)],
            "activations": [_listed(one) for one in view[begin : begin + count]],
        }

    def activation(self, row: int, fold: int) -> dict[str, Any]:
        """What the index says of a tensor, how it is shown, and statistics of its values."""
        activation, place, of = self._activation(row)
        tensor = self._tensor(activation, fold)
        found = tensor.summary()
        attention = self._is_attention(activation)
        whole = tensor.size > 0 and len(tensor.shape) > 1
        return {
            **_described(activation),
            "place": place, "of": of,
            "attention": attention,
            "token_rows": whole and bool(
                axes_of(self._reader, activation, 0, attention=attention).rows
            ),
            "shown": {
                "shape": tensor.shape, "dtype": tensor.dtype, "lead": tensor.lead,
                "rows": tensor.rows, "columns": tensor.columns, "size": tensor.size,
            },
            "values": {
                **vars(found.statistics),
                "read": found.read, "edges": found.edges, "counts": found.counts,
                "scale": found.scale,
            },
        }  # fmt: skip

    def tile(
        self,
        row: int,
        fold: int,
        lead: int,
        rect: tuple[int, int, int, int],
        rows: int,
        columns: int,
        pool: str,
    ) -> Tile:
        """A part of a tensor in fewer values; see `Tensor.tile`."""
        return self._tensor(self._activation(row)[0], fold).tile(lead, rect, rows, columns, pool)

    def axes(self, row: int, lead: int, rect: tuple[int, int, int, int]) -> dict[str, Any]:
        """What the rows and columns of a part of a matrix are, where they are tokens.

        Args:
            row: the tensor's row in the index.
            lead: the number of the matrix.
            rect: first row, first column, rows and columns of the part.

        Returns:
            rows and columns: for each a label, and whether it is padding (None: unknown); None: no
            tokens, or unknown ones. And the problem: why tokens are unknown, or None.
        """
        activation = self._activation(row)[0]
        attention = self._is_attention(activation)
        found = axes_of(self._reader, activation, lead, attention=attention)
        top, left, height, width = rect

        def labelled(tokens: GivenTokens | None, first: int, count: int) -> list[list[Any]] | None:
            some = None if tokens is None else tokens[first : first + count]
            return None if some is None else self._texts().labelled(some)

        return {
            "rows": labelled(found.rows, top, height),
            "columns": labelled(found.columns, left, width),
            "problem": found.problem,
        }

    def value(self, row: int, at: int) -> dict[str, Any]:
        """One value of a tensor, exactly, as a text; and its place in each dimension."""
        tensor = self._tensor(self._activation(row)[0], 0)
        return {"value": repr(tensor.value(at)), "index": tensor.index(at)}

    def _activation(self, row: int) -> tuple[Activation, int, int]:
        """The activation of a row, its place in its layer, and how many the layer has.

        Raises:
            NotFoundError: there is none.
        """
        catalogue = self._reader._catalogue
        for rows in (catalogue.activations, catalogue.missing):
            place = int(np.searchsorted(rows, row))
            if place < len(rows) and rows[place] == row:
                activation = ActivationView(self._reader._snapshot, rows[place : place + 1])[0]
                its = catalogue.rows_by_name.get(activation.name, rows[:0])
                return activation, int(np.searchsorted(its, row)), len(its)
        raise NotFoundError(f"row = {row}: {self.path} has no tensor there")

    def _tensor(self, activation: Activation, fold: int) -> Tensor:
        row = activation.row
        key = self._generation, row
        return Tensor(self._reader._snapshot, row, self._cache, key, fold)

    # ---- texts and tokens -----------------------------------------------------

    def _texts(self) -> Texts:
        if self._found_texts is None:
            self._found_texts = Texts(self._reader, self._tokenizer)
        return self._found_texts

    def texts(self, begin: int, count: int) -> dict[str, Any]:
        """Some of the texts that the model was given."""
        texts = self._texts()
        return {"total": len(texts), "texts": texts.listing(begin, count)}

    def text(
        self,
        sequence: int,
        layers: str,
        begin: int,
        count: int,
        at: tuple[int, int] | None,
    ) -> dict[str, Any]:
        """Some tokens of a text, and the layers that its vectors are asked for.

        Args:
            sequence: the number of the text.
            layers: a name or pattern; "": the blocks of the model.
            begin: the first token to give.
            count: how many.
            at: give those around the token of this step and position instead.
        """
        texts = self._texts()
        rows = texts.tokens(sequence, layers)
        place = None if at is None else texts.place(rows, *at)
        if place is not None:
            begin = place // count * count
        return {
            "sequence": sequence,
            "document": texts.document(sequence),
            "total": len(rows),
            "begin": begin,
            "place": place,
            "layers": texts.layers(layers),
            "tokens": _tokens(rows[begin : begin + count]),
        }

    def norms(
        self, sequence: int, layers: str, first: int, many: int, begin: int, count: int
    ) -> tuple[npt.NDArray[np.float32], dict[str, str]]:
        """The norms of the vectors of some tokens at some layers; see `Texts.norms`."""
        names = self._texts().layers(layers)[first : first + many]
        return self._texts().norms(sequence, names, begin, count)

    def vectors(
        self, sequence: int, layers: str, first: int, many: int, token: int, columns: int
    ) -> tuple[npt.NDArray[np.float32], dict[str, str]]:
        """The vector of a token at some layers, each in at most `columns` values."""
        names = self._texts().layers(layers)[first : first + many]
        vectors, problems = self._texts().vectors(sequence, names, token)
        found = np.full((len(names), columns), np.nan, np.float32)
        width = 0
        for out, vector in zip(found, vectors, strict=True):
            if vector is not None and len(vector):
                shown = narrowed(vector, columns)
                out[: len(shown)] = shown
                width = max(width, len(shown))
        return np.ascontiguousarray(found[:, :width]), problems

    def search(self, kind: str, wanted: str, begin: int, count: int) -> dict[str, Any]:
        """Tokens or texts; see `Texts.search`."""
        return self._texts().search(kind, wanted, begin, count)


def _kind(layer: str) -> str:
    """The name of a layer with # for each number in it."""
    return re.sub("[0-9]+", "#", layer)


def narrowed(vector: npt.NDArray[np.float32], columns: int) -> npt.NDArray[np.float32]:
    """A vector in at most `columns` values: of several, the one with the largest magnitude."""
    if len(vector) <= columns:
        return vector
    starts = np.arange(columns) * len(vector) // columns
    high, low = np.maximum.reduceat(vector, starts), np.minimum.reduceat(vector, starts)
    return np.where(high >= -low, high, low)


def _tokens(rows: Rows) -> list[dict[str, Any]]:
    columns = [rows.column(name).tolist() for name in ("step", "position", "token_id", "text")]
    labels = token_labels(rows)
    return [
        {"step": step, "position": position, "token_id": number, "text": text, "label": label}
        for step, position, number, text, label in zip(*columns, labels, strict=True)
    ]


def _listed(activation: Activation) -> dict[str, Any]:
    names = ("row", "step", "token", "call", "request", "shape", "stored_bytes")
    return {name: getattr(activation, name) for name in names}


def _described(activation: Activation) -> dict[str, Any]:
    names = (
        "row", "name", "model", "layer", "path", "request", "step", "token", "call", "rank",
        "thread", "shape", "source_shape", "dtype", "source_dtype", "codec", "transform",
        "parameters", "mse", "normalized_mse", "mantissa_bits", "overflowed", "stored_bytes",
    )  # fmt: skip
    return {name: getattr(activation, name) for name in names}
