"""The rows of a layer: the vector of each token, with what the token was::

    with ActivationReader("run.stream") as reader:
        rows = reader.rows("model.layers.12")
        rows.at(sequence=3, position=17).to_torch()        # [width], decodes one packet
        rows.to_torch()                                    # [rows, width]
        rows.column("token_id")                            # numpy, one for each row

Rows are in the order of capture. A generation may crop its cache. A crop has one of these meanings:

- A crop that transformers makes in a generation takes tokens back. So does any crop that leaves a
  part of a call, or that leaves a call of one token at the end. The tokens behind are not accepted,
  in all calls that had them. The sequence goes on.
- Any other crop leaves a prompt at the end, for example to begin another answer with the same
  cache. The tokens behind it stay accepted, because they are of a whole text. The tokens of the
  next call are a new sequence, whose positions go on from those of the prompt. The rows of the
  prompt stay in the first sequence.
- A cache that lost tokens and got other rows (`reorder_cache`, `batch_select_indices`) has unknown
  sequences.

So no two accepted rows of a layer have the same sequence and position because of a crop.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, overload

import numpy as np
import numpy.typing as npt

from ..errors import StrapError
from .reading.elements import dtype_name, from_storage, numpy_dtype, storage_dtype, torch_dtype

if TYPE_CHECKING:
    import torch

    from .token_rows.layer_tokens import LayerTokens

__all__ = ["COLUMNS", "NoCallsError", "NotTokenAlignedError", "Row", "Rows"]

Ints = npt.NDArray[np.int64]

#: The columns of rows, each with the value of rows where it is unknown.
COLUMNS: dict[str, Any] = {
    "step": -1,
    "call": -1,
    "batch_row": -1,
    "rank": -1,
    "sequence": -1,
    "position": -1,
    "token_id": -1,
    "token_type": -1,
    "token_hash": 0,
    "padding": -1,
    "accepted": True,
    "document": None,
    "labels": None,
    "request": None,
    "text": None,
}
"""The columns of `Rows.column`, each with the value of rows whose attribute is unknown."""


class NotTokenAlignedError(StrapError, ValueError):
    """The tensors of a layer do not have a vector for each token; the message says their shape.

    - An expert of a mixture has the tokens that the router sent to it, in an order of its own. So
      do the modules inside it.
    - Images, the encoder's keys in a decoder, recurrent states and relative positions have no
      vectors of tokens, even if their shapes fit.
    - Outputs [tokens, width] inside a module that returns [batch, tokens, width] are refused,
      except in models of transformers: a router may have sorted the tokens.
    - Where a batch has as many texts as tokens, other calls or the modules around the layer tell
      whether the batch or the tokens come first. If nothing does, the layer is refused.
    """


class NoCallsError(StrapError, LookupError):
    """The capture does not say what the model was given, so no token is known.

    ``without_calls=True`` gives rows by their places in the tensors alone. Padding, token ids and
    documents are then unknown.
    """


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """One token at one layer.

    Attributes:
        step: number of the model's call.
        call: call of the module within the step.
        batch_row: place in the batch.
        sequence: number of the text in the capture; None: unknown.
        position: place of the token in its text, or the given position id; None: unknown.
        token_id: the token's id; None: unknown.
        document: the label ``document``, or None.
        labels: the other labels, as JSON, or None.
        request: the label ``request``, or else the name from ``for_request``, or None.
        text: the token's text, if ``rows`` was given a tokenizer.
    """

    _rows: Rows
    step: int
    call: int
    batch_row: int
    sequence: int | None
    position: int | None
    token_id: int | None
    document: str | None
    labels: str | None
    request: str | None
    text: str | None

    def to_torch(self, dtype: Any = None) -> torch.Tensor:
        """Its vector, shape [width] or [heads, width]."""
        return self._rows.to_torch(dtype)[0]

    def to_numpy(self, dtype: Any = None) -> npt.NDArray[Any]:
        """Its vector as a numpy array, types as in `Activation.to_numpy`."""
        values: npt.NDArray[Any] = self._rows.to_numpy(dtype)[0]
        return values


class Rows(Sequence["Row"]):
    """The vectors of one layer, a row for each token, in the order of capture.

    `ActivationReader.rows` returns them. ``rows[k]`` is a `Row`; a slice, indices or a mask give
    `Rows`. Values are decoded on demand: of a packet only the blocks that the wanted rows need, and
    of a raw packet only their bytes. The checksum of a packet that is read in part cannot be
    verified.

    Attributes:
        layer: the layer's name.
        shape: shape of a row's vector: (width,) or (heads, width).
        dtype: the type of the values, by torch's name.
        left_out: activations of the layer whose call is not in the calls file.
        unknown_padding: activations of the layer whose call had a mask that does not say which
            tokens are padding. All of their tokens have rows.
    """

    def __init__(self, source: LayerTokens, numbers: Ints) -> None:
        self._source = source
        self._numbers = numbers  # of the tokens, among all tokens of the layer
        self.layer = source.layer
        self.shape = source.shape
        self.dtype = source.dtype
        self.left_out = source.left_out
        self.unknown_padding = source.unknown_padding

    def __len__(self) -> int:
        return len(self._numbers)

    @overload
    def __getitem__(self, at: int) -> Row: ...
    @overload
    def __getitem__(self, at: slice | Iterable[int] | npt.NDArray[Any]) -> Rows: ...
    def __getitem__(self, at: Any) -> Row | Rows:
        """One row, or the rows of a slice, of indices, or of a mask (as in numpy).

        Raises:
            IndexError: there is no such row.
        """
        if isinstance(at, slice):
            return Rows(self._source, self._numbers[at])
        indices = np.asarray(at)
        if indices.ndim > 1:
            raise IndexError(f"indices of shape {list(indices.shape)}: rows have one axis")
        if indices.ndim == 1:
            return Rows(self._source, self._numbers[indices if len(indices) else []])
        place = operator.index(at)
        if not -len(self) <= place < len(self):
            raise IndexError(f"row {place} of {len(self)}")
        place %= len(self)
        return self._row(Rows(self._source, self._numbers[place : place + 1]))

    def __iter__(self) -> Iterator[Row]:
        return (self[place] for place in range(len(self)))

    def __repr__(self) -> str:
        shape = "x".join(map(str, self.shape))
        return f"<Rows of {self.layer!r}: {len(self):,} tokens, {shape} of {self.dtype}>"

    def _row(self, one: Rows) -> Row:
        def value(name: str) -> Any:
            found = one.column(name)[0]
            return None if found is None or found == COLUMNS[name] else _plain(found)

        return Row(
            one, int(one.column("step")[0]), int(one.column("call")[0]),
            int(one.column("batch_row")[0]), value("sequence"), value("position"),
            value("token_id"), value("document"), value("labels"), value("request"),
            value("text") if self._source.has_texts else None,
        )  # fmt: skip

    def column(self, name: str) -> npt.NDArray[Any]:
        """A column of the rows: a numpy array with an element for each row.

        Args:
            name: "step", "call", "batch_row", "rank", "sequence", "position", "token_id",
                "token_type", "token_hash", "padding" (1: the mask leaves the token out, 0: it does
                not), "accepted" (False: the token was taken back, as a wrong guess of a draft
                model), "document", "labels", "request" or "text". Unknown numbers are -1 (0 for
                hashes), unknown texts None.

        Raises:
            InvalidArgumentError: there is no such column; or "text" without a tokenizer.
        """
        return self._source.columns([name], self._numbers)[name]

    def at(
        self,
        *,
        step: int | None = None,
        sequence: int | None = None,
        position: int | None = None,
        document: str | None = None,
        request: str | None = None,
        rank: int | None = None,
    ) -> Row:
        """The single row of a step, sequence, position, document, request or rank.

        Raises:
            LookupError: there is no such row, or there are several.
        """
        given = {
            "step": step, "sequence": sequence, "position": position, "document": document,
            "request": request, "rank": rank,
        }  # fmt: skip
        found = self._where(given)
        if len(found) == 1:
            return found[0]
        asked = ", ".join(f"{k}={v!r}" for k, v in given.items() if v is not None)
        if not len(found):
            raise LookupError(f"{self!r} has no row with {asked or 'any value'}")
        steps = np.unique(found.column("step"))
        raise LookupError(
            f"{len(found)} rows with {asked or 'any value'}, in {len(steps)} steps: name step, "
            "sequence and position, or use select()"
        )

    def select(
        self,
        *,
        step: int | None = None,
        sequence: int | None = None,
        position: int | None = None,
        document: str | None = None,
        request: str | None = None,
        rank: int | None = None,
    ) -> Rows:
        """The rows of a step, sequence, position, document, request and rank; None: all."""
        return self._where(
            {
                "step": step, "sequence": sequence, "position": position, "document": document,
                "request": request, "rank": rank,
            }
        )  # fmt: skip

    def _where(self, wanted: dict[str, Any]) -> Rows:
        kept = np.ones(len(self), np.bool_)
        for name, value in wanted.items():
            if value is not None:
                kept &= self.column(name) == value
        return self[np.flatnonzero(kept)]

    def to_torch(self, dtype: Any = None) -> torch.Tensor:
        """The vectors, shape [rows, *shape], as a CPU tensor.

        Args:
            dtype: convert to this type, a torch dtype or its name; None: `dtype`.

        Raises:
            CorruptError: (a ValueError) the bytes differ from the written ones.
            InvalidStateError: the reader is closed.
        """
        import torch

        values = torch.empty((len(self), *self.shape), dtype=torch_dtype(self.dtype), device="cpu")
        self._source.read(self._numbers, values.data_ptr())
        return values if dtype is None else values.to(torch_dtype(dtype_name(dtype)))

    def to_numpy(self, dtype: Any = None) -> npt.NDArray[Any]:
        """The vectors as an array, shape [rows, *shape]; types as in `Activation.to_numpy`."""
        flat = np.empty(len(self) * math.prod(self.shape), storage_dtype(self.dtype))
        self._source.read(self._numbers, flat.ctypes.data)
        values = from_storage(flat, self.dtype).reshape(len(self), *self.shape)
        return values if dtype is None else values.astype(numpy_dtype(dtype_name(dtype)))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> npt.NDArray[Any]:
        """`to_numpy(dtype)`."""
        return self.to_numpy(dtype)


def _plain(value: Any) -> Any:
    return value.item() if hasattr(value, "item") else value
