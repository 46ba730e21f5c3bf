"""The tokens of a layer, and where their vectors lie in its tensors."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ...core.last_position import TRANSFORM as LAST_POSITION
from ...core.tensors.layouts import Layouts
from ...errors import InvalidArgumentError
from ..reading.calls import Calls, LayerCalls
from ..reading.elements import element_size
from ..rows import COLUMNS, NoCallsError, NotTokenAlignedError
from .layout import fits, is_flattened_inside, sequence_first_of_relatives

if TYPE_CHECKING:
    from ..reading.snapshot import Snapshot

__all__ = ["LayerTokens"]

Ints = npt.NDArray[np.int64]

_OF_TOKENS = {
    "position": "positions",
    "token_id": "token_ids",
    "token_type": "token_types",
    "token_hash": "token_hashes",
}
_EXPERT = re.compile(r"(^|\.)experts\.\d+(\.|$)")
_PIECE = 1 << 17  # tokens whose masks are looked at together


class LayerTokens:
    """All tokens of a layer, also those of padding, and where their vectors are.

    Tokens are numbered through all the layer's activations, in capture order; in an activation
    they stand in the order of their rows in the batch.

    Args:
        snapshot: the capture.
        activations: the activations of the layer.
        calls: the calls; None: tokens are known by their places in the tensors alone.
        tokenizer: has ``decode``; for the column "text".

    Raises:
        NotTokenAlignedError: the tensors have no vector for each token.
        NoCallsError: no activation has a call.
    """

    def __init__(
        self, snapshot: Snapshot, activations: Ints, calls: Calls | None, tokenizer: Any
    ) -> None:
        catalogue = snapshot.catalogue
        self.snapshot = snapshot
        self._calls = calls
        self._tokenizer = tokenizer
        self.has_texts = tokenizer is not None
        first = int(activations[0])
        self.layer = catalogue.name(first)
        self.model = catalogue.text("model", first) or ""
        self._module = catalogue.text("layer", first) or ""
        self._path = catalogue.text("path", first) or ""
        self._layouts = Layouts({}, (), True) if calls is None else calls.layouts(self.model)
        self._kind = self._layouts.of(self._module, self._path)
        if _EXPERT.search(self._module):
            self._kind = "unordered"
        self._check_kind()
        steps = catalogue.numbers("step")[activations].astype(np.int64)
        chosen = self._choose(activations, steps)
        known = chosen.first >= 0 if calls is not None else np.ones(len(steps), np.bool_)
        self.left_out = int((~known).sum())
        self._activations, self.steps = activations[known], steps[known]
        self._first, self._rows, self._tokens, self._total = (
            column[known] for column in (chosen.first, chosen.rows, chosen.tokens, chosen.total)
        )
        self._side = "decoder_" if chosen.decoder else ""
        shapes = self._shapes()
        # What each axis is, and whether only the last token of each row is there; see `fits`.
        self._axes, self._last = self._find_axes(shapes)
        self._heads = int(shapes[0, self._axes.index("h")]) if "h" in self._axes else 1
        width = int(shapes[0, self._axes.index("w")])
        self.shape = (self._heads, width) if "h" in self._axes else (width,)
        self._check_width(shapes)
        # The length of the axis of tokens.
        self._along = shapes[:, self._axes.index("t")]
        self.dtype = self._common_dtype()
        unread = None if calls is None else calls.unread_mask(self._side)
        self._unread = None if unread is None or not unread[self._first].any() else unread
        self.unknown_padding = 0 if self._unread is None else int(self._unread[self._first].sum())
        there = self._rows if self._last else self._total
        self._ends = np.cumsum(there)
        self._starts = self._ends - there

    def _check_kind(self) -> None:
        """Refuses modules whose tensors have vectors of tokens by accident only."""
        if self._kind == "unordered":
            raise NotTokenAlignedError(
                f"{self.layer!r} is inside experts: its rows are the tokens that the router sent "
                "to it, in an order of its own. Take the layer that joins the experts"
            )
        if self._kind == "foreign":
            raise NotTokenAlignedError(
                f"{self.layer!r} is of something else than the text, as images or a cache: its "
                "tensors have no vector for each token"
            )
        if self._kind == "both":
            raise NotTokenAlignedError(
                f"{self.layer!r} is used for the encoder's text and for the decoder's: its tensors "
                "do not say of which they are"
            )
        if self._kind == "width_first":
            raise NotTokenAlignedError(
                f"{self.layer!r} returns [batch, width, tokens]: take the layer around it"
            )
        if self._kind == "pairs":
            raise NotTokenAlignedError(
                f"{self.layer!r} returns a vector for each pair of places, not for each token"
            )

    def _choose(self, activations: Ints, steps: Ints) -> LayerCalls:
        if self._calls is None:
            return self._by_shape(activations)
        if self._calls.shares(self.model, self._module):
            raise NotTokenAlignedError(
                f"{self.layer!r} is used by the encoder and the decoder of {self.model!r}: its "
                "tensors do not say of which text they are"
            )
        ranks = self.snapshot.catalogue.numbers("rank")[activations].astype(np.int64)
        of_encoder = self._kind == "encoder"
        chosen = self._calls.of_layer(self.model, self._module, steps, ranks, of_encoder)
        if (chosen.first < 0).all():
            raise NoCallsError(
                f"the calls file of {self.snapshot.path} has no call for {self.layer!r}: "
                "rows(layer, without_calls=True) gives the rows by their places alone"
            )
        if (chosen.tokens[chosen.first >= 0] < 0).any():
            side = "text for the decoder, as with labels alone" if chosen.decoder else "text"
            raise NotTokenAlignedError(
                f"{self.layer!r} has calls without {side}: what the model was given has no tokens"
            )
        return chosen

    def _by_shape(self, activations: Ints) -> LayerCalls:
        """Rows and tokens as the shapes [batch, tokens, width] and [tokens, width] say."""
        rows, tokens = [], []
        for activation in activations.tolist():
            shape = self.snapshot.catalogue.shape(activation)
            if shape is None:
                raise NotTokenAlignedError(
                    f"the shape of {self.layer!r} is unknown, because no index describes it: strap "
                    "import --format stream-1.3.1 --width makes a capture with shapes of a stream"
                )
            if len(shape) not in (2, 3):
                raise NotTokenAlignedError(
                    f"{self.layer!r} has the shape {list(shape)} in step "
                    f"{self.snapshot.catalogue.numbers('step')[activation]}: without calls rows "
                    "need [batch, tokens, width] or [tokens, width]"
                )
            rows.append(shape[0] if len(shape) == 3 else 1)
            tokens.append(shape[-2])
        unknown, (of_batch, each) = np.full(len(rows), -1), np.array([rows, tokens])
        return LayerCalls(unknown, of_batch, each, of_batch * each, False)

    def _shapes(self) -> Ints:
        """The shapes of the activations, [activations, dimensions]."""
        ndim, start, lengths = self.snapshot.catalogue.columns.shapes()
        several = ndim[self._activations]
        if (several != several[0]).any():
            odd = int(np.flatnonzero(several != several[0])[0])
            raise self._not_aligned(odd, "its number of dimensions changes")
        shapes: Ints = lengths[start[self._activations, None] + np.arange(int(several[0]))]
        return shapes

    def _find_axes(self, shapes: Ints) -> tuple[str, bool]:
        transform, transforms = self.snapshot.catalogue.texts("transform")
        codes = np.unique(transform[self._activations])
        names = {transforms[code] if code >= 0 else None for code in codes.tolist()}
        if names - {None, "overflow_float32", LAST_POSITION}:
            raise NotTokenAlignedError(
                f"{self.layer!r} is stored in part ({', '.join(map(str, names))}): rows need whole "
                "tensors"
            )
        # A step of a generation has one token, and its tensors are whole.
        last = LAST_POSITION in names
        rows, tokens = self._rows, np.ones_like(self._tokens) if last else self._tokens
        total = rows if last else self._total
        tried = fits(shapes, rows, tokens, total, last)
        self._leave_out_impossible(tried)
        found = [axes for axes, fit in tried.items() if fit.all()]
        if found == ["btw", "tbw"]:
            found = [self._batch_or_tokens_first(shapes)]
        if found == ["tw"]:
            self._check_flattened(shapes)
        if len(found) == 1:
            return found[0], last
        if found:
            raise NotTokenAlignedError(
                f"{self.layer!r} has the shape {shapes[0].tolist()} in step {self.steps[0]}, and "
                f"{tokens[0]} tokens: axis 1 or axis 2 may be the tokens. Capture texts of another "
                "length too"
            )
        odd = 0
        if tried:
            best = max(tried.values(), key=lambda fit: int(fit.sum()))
            odd = int(np.flatnonzero(~best)[0])
        raise self._not_aligned(odd, "no axis has the tokens")

    def _check_flattened(self, shapes: Ints) -> None:
        """Refuses tensors [tokens, width] whose tokens may have an order of their own.

        The modules of transformers that sort tokens are known, see :class:`Layouts`.
        """
        several = self._total > 1
        if self._calls is None or self._layouts.batch_first or not several.any():
            return
        catalogue, total = self.snapshot.catalogue, self._total[several]
        if is_flattened_inside(catalogue, self.model, self._module, total):
            raise NotTokenAlignedError(
                f"{self.layer!r} has the shape {shapes[0].tolist()} in step {self.steps[0]}, "
                "inside modules with [batch, tokens, width]: its rows may be the tokens in another "
                "order, as a router sorts them. Take the layer around it"
            )

    def _leave_out_impossible(self, tried: dict[str, npt.NDArray[np.bool_]]) -> None:
        """Removes layouts that the model's structure excludes."""
        if self._layouts.sequence_first(self._module, self._path):
            for axes in [axes for axes in tried if axes != "tbw"]:
                # One text, or one token of each, lies alike in all layouts.
                tried[axes] &= (self._rows == 1) | (self._tokens == 1)
        elif (
            self._layouts.has_batch_first(self._module, self._path)
            and "btw" in tried
            and tried["btw"].all()
        ):
            del tried["tbw"]

    def _batch_or_tokens_first(self, shapes: Ints) -> str:
        """The layout of tensors with as many texts as tokens in all calls."""
        if (shapes[:, :2] == 1).all():
            return "btw"
        assert self._calls is not None
        first = sequence_first_of_relatives(
            self.snapshot.catalogue, self._calls, self.model, self._module
        )
        if first is not None:
            return "tbw" if first else "btw"
        raise NotTokenAlignedError(
            f"{self.layer!r} has the shape {shapes[0].tolist()} in step {self.steps[0]}, where "
            f"{self._rows[0]} texts have {self._tokens[0]} tokens: it may be [batch, tokens, "
            "width] or [tokens, batch, width], and no other call tells. Capture a batch with more "
            "or fewer texts than tokens too"
        )

    def _not_aligned(self, at: int, why: str) -> NotTokenAlignedError:
        shape = self.snapshot.catalogue.shape(int(self._activations[at]))
        return NotTokenAlignedError(
            f"{self.layer!r} is not aligned with the tokens: its shape is {list(shape or ())} in "
            f"step {self.steps[at]}, where {self._rows[at]} rows have {self._total[at]} tokens, "
            f"and {why}. steps= chooses the steps to read"
        )

    def _check_width(self, shapes: Ints) -> None:
        for axis, letter in enumerate(self._axes):
            column = shapes[:, axis]
            if letter in "hw" and (column != column[0]).any():
                odd = int(np.flatnonzero(column != column[0])[0])
                raise self._not_aligned(odd, f"before, axis {axis} had {column[0]}")

    def _common_dtype(self) -> str:
        catalogue = self.snapshot.catalogue
        kinds = {catalogue.stored_dtype(int(row)) for row in self._one_of_each_type()}
        if np.isin(self._activations, np.fromiter(catalogue.twins, np.int64)).any():
            kinds.add("float32")
        if kinds == {"float16", "float32"}:
            return "float32"
        if len(kinds) != 1 or None in kinds:
            raise NotTokenAlignedError(
                f"{self.layer!r} has values of several types: {', '.join(sorted(map(str, kinds)))}"
            )
        return str(kinds.pop())

    def _one_of_each_type(self) -> Ints:
        codes = self.snapshot.catalogue.texts("stored_dtype")[0][self._activations]
        _, places = np.unique(codes, return_index=True)
        return self._activations[places]

    # ---- tokens ---------------------------------------------------------------

    def difference(self, other: LayerTokens) -> str:
        """How the tokens of another layer differ from those of this one; "" if they do not."""
        if len(self.steps) != len(other.steps):
            return (
                f"{self.layer!r} has {len(self.steps)} activations, {other.layer!r} has "
                f"{len(other.steps)}"
            )
        mine = np.stack([self.steps, self._first, self._rows, self._total])
        its = np.stack([other.steps, other._first, other._rows, other._total])
        for at in np.flatnonzero((mine != its).any(axis=0)).tolist():
            one, two = mine[:, at].tolist(), its[:, at].tolist()
            return (
                f"{self.layer!r} has {one[2]} rows with {one[3]} tokens in step {one[0]}, "
                f"{other.layer!r} has {two[2]} rows with {two[3]} tokens in step {two[0]}"
            )
        if self._last != other._last:
            return f"only one of {self.layer!r} and {other.layer!r} has all positions"
        return ""

    @property
    def tokens(self) -> int:
        """How many tokens there are."""
        return int(self._ends[-1]) if len(self._ends) else 0

    def kept(
        self, padding: bool, without_tokens: Iterable[int], refused: bool = False
    ) -> Ints | None:
        """The numbers of the tokens that the masks keep and that are not left out; None: all.

        Args:
            padding: also those that the masks leave out.
            without_tokens: ids of tokens to leave out.
            refused: also those that were taken back.
        """
        left_out = np.array(sorted(without_tokens), np.int64)
        pieces = []
        for first in range(0, self.tokens, _PIECE):
            numbers = np.arange(first, min(first + _PIECE, self.tokens))
            row, token, _ = self._find(numbers)
            keep = np.ones(len(numbers), np.bool_) if padding else self.unmasked(numbers)
            if self._calls is not None and not refused:
                keep &= self._calls.accepted(row, token)
            if len(left_out):
                keep &= ~np.isin(self._token_column("token_id", row, token), left_out)
            pieces.append(keep)
        if self._calls is not None and not padding:
            self._calls.forget(f"{self._side}mask")
        if all(keep.all() for keep in pieces):
            return None
        return np.flatnonzero(np.concatenate(pieces))

    def of_matrix(self, activation: int, lead: int) -> Ints | None:
        """The numbers of the tokens whose vectors are the rows of a matrix of a tensor.

        Args:
            activation: the row of the tensor in the index.
            lead: the number of the matrix among those of the dimensions before the last two.

        Returns:
            None: the rows are no tokens but the heads of one.

        Raises:
            NoCallsError: the calls do not have the tensor's call.
        """
        found = np.flatnonzero(self._activations == activation)
        if not len(found):
            raise NoCallsError(f"the calls file has no call for this tensor of {self.layer!r}")
        at = int(found[0])
        axes, along = self._axes, int(self._along[at])
        if axes == "bthw":
            return None
        if axes == "tbw":
            local = lead + along * np.arange(int(self._rows[at]))
        else:
            local = lead // self._heads * along + np.arange(along)
        numbers: Ints = self._starts[at] + local
        return numbers

    def given(self, numbers: Ints) -> tuple[Ints, Ints, str]:
        """For tokens: their rows in the calls file, their places in these rows, and their side.

        The side is "" or "decoder_".
        """
        rows, tokens, _ = self._find(numbers)
        return rows, tokens, self._side

    def unmasked(self, numbers: Ints) -> npt.NDArray[np.bool_]:
        """Whether the masks keep tokens; all, if there are no calls."""
        if self._calls is None:
            return np.ones(len(numbers), np.bool_)
        row, token, _ = self._find(numbers)
        return self._calls.lists(f"{self._side}mask").at(row, token, True)

    def _find(self, numbers: Ints) -> tuple[Ints, Ints, Ints]:
        """For tokens: the row in the calls file, the place in that row, and the activation."""
        at = np.searchsorted(self._ends, numbers, side="right")
        local = numbers - self._starts[at]
        if self._last:
            return self._first[at] + local, self._tokens[at] - 1, at
        each = self._tokens[at]
        if self._calls is not None and not each.all():  # packed
            positions = self._calls.lists(f"{self._side}positions")
            return *positions.place(self._first[at], local), at
        batch_row, token = np.divmod(local, each)
        return self._first[at] + batch_row, token, at

    def columns(self, names: Iterable[str], numbers: Ints) -> dict[str, npt.NDArray[Any]]:
        """Columns of tokens, by name.

        Raises:
            InvalidArgumentError: there is no such column; or "text" without a tokenizer.
        """
        found = self._find(numbers)
        return {name: self._column(name, *found) for name in names}

    def _column(self, name: str, row: Ints, token: Ints, at: Ints) -> npt.NDArray[Any]:
        if name not in COLUMNS:
            raise InvalidArgumentError(f"no column {name!r}: choose one of {', '.join(COLUMNS)}")
        if name == "step":
            return self.steps[at]
        if name in ("call", "rank"):
            return self.snapshot.catalogue.numbers(name)[self._activations[at]]
        if name == "batch_row":
            return row - self._first[at]
        if name == "text":
            return self._texts(self._token_column("token_id", row, token))
        if name == "accepted":
            if self._calls is None:
                return np.ones(len(row), np.bool_)
            return self._calls.accepted(row, token)
        if name == "padding":
            return self._padding(row, token)
        if name in _OF_TOKENS:
            return self._token_column(name, row, token)
        if self._calls is None:
            return np.full(len(row), COLUMNS[name], object if COLUMNS[name] is None else None)
        return self._calls.cells(name, row)

    def _padding(self, row: Ints, token: Ints) -> Ints:
        if self._calls is None:
            return np.full(len(row), -1)
        kept = self._calls.lists(f"{self._side}mask").at(row, token, True)
        padding = (~kept).astype(np.int64)
        if self._unread is not None:
            padding[self._unread[row]] = -1
        return padding

    def _token_column(self, name: str, row: Ints, token: Ints) -> npt.NDArray[Any]:
        if self._calls is None:
            return token if name == "position" else np.full(len(row), COLUMNS[name])
        return self._calls.lists(self._side + _OF_TOKENS[name]).at(row, token, COLUMNS[name])

    def _texts(self, ids: npt.NDArray[Any]) -> npt.NDArray[Any]:
        if self._tokenizer is None:
            raise InvalidArgumentError(
                "the column 'text' needs a tokenizer: rows(layer, tokenizer=tokenizer)"
            )
        distinct, places = np.unique(ids, return_inverse=True)
        texts = [None if n < 0 else self._tokenizer.decode([n]) for n in distinct.tolist()]
        return np.array(texts, object)[places]

    # ---- values ---------------------------------------------------------------

    def spans(self, numbers: Ints) -> tuple[Ints, Ints, Ints]:
        """Joins tokens that follow each other in one tensor.

        Returns:
            For each span the number of its activation among the layer's, the number of its first
            token among those of the activation, and how many tokens.
        """
        at = np.searchsorted(self._ends, numbers, side="right")
        local = numbers - self._starts[at]
        joins = (at[1:] == at[:-1]) & (local[1:] == local[:-1] + 1)
        begins = np.flatnonzero(np.append(len(at) > 0, ~joins))
        return at[begins], local[begins], np.diff(np.append(begins, len(at)))

    def ranges(self, spans: tuple[Ints, Ints, Ints], begin: int = 0) -> Ints:
        """The elements of tokens and the places of their vectors, which follow each other.

        Args:
            spans: the tokens, as `spans` gives them.
            begin: the place of the first vector.

        Returns:
            [ranges, 4] as for `Snapshot.read_elements`.
        """
        at, local, count = spans
        size = self._heads * self.shape[-1]
        if self._axes == "bhtw":  # the heads of a token lie apart
            local = np.repeat(local - np.cumsum(count) + count, count) + np.arange(count.sum())
            at = np.repeat(at, count)
            tokens = self._along[at]
            batch_row, token = np.divmod(local, tokens)
            head = batch_row[:, None] * self._heads + np.arange(self._heads)
            local = (head * tokens[:, None] + token[:, None]).reshape(-1)
            at, size = np.repeat(at, self._heads), self.shape[-1]
            count = np.ones(len(at), np.int64)
        elif self._axes == "tbw":  # the tokens of a text lie apart
            local = np.repeat(local - np.cumsum(count) + count, count) + np.arange(count.sum())
            at = np.repeat(at, count)
            batch_row, token = np.divmod(local, self._along[at])
            local, count = token * self._rows[at] + batch_row, np.ones(len(at), np.int64)
        found = np.empty((len(at), 4), np.int64)
        found[:, 0], found[:, 1] = self._activations[at], local * size
        np.multiply(count, size, out=found[:, 2])
        lengths = found[:, 2] * element_size(self.dtype)
        found[:, 3] = begin + np.cumsum(lengths) - lengths
        return found

    def read(self, numbers: Ints, address: int) -> None:
        """Decodes the vectors of tokens one after the other, from `address` on."""
        room = len(numbers) * self.vector_bytes
        self.snapshot.read_elements(self.ranges(self.spans(numbers)), self.dtype, address, room)

    @property
    def vector_bytes(self) -> int:
        """Bytes of the vector of a token."""
        return self._heads * self.shape[-1] * element_size(self.dtype)
