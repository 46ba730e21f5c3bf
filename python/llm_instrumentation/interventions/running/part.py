"""The elements of a site in a tensor."""

from __future__ import annotations

import functools
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ...core.calls.arguments import Given, Text
from ...core.calls.masks import Unread, kept, undecided
from ...errors import InvalidArgumentError, UnsupportedError
from .spots import Spot

__all__ = ["Ints", "Part"]

Ints: TypeAlias = npt.NDArray[np.int64]

# Layouts of tensors that no mask of a text is for, also where the shape looks so.
_NO_TEXT = frozenset({"foreign", "pairs", "width_first"})


class Part:
    """The elements of a site in the tensors of one shape.

    Args:
        spot: the site.
        shape: the shape of the tensors: [batch, tokens, ...], or [batch * tokens, ...] as modules
            with experts have it.
        given: what the model was given in this step; None: unknown.

    Raises:
        InvalidArgumentError: the shape has no such positions, sequences or head.
    """

    def __init__(self, spot: Spot, shape: torch.Size, given: Given | None) -> None:
        self._spot = spot
        self._given = given
        self.shape = shape
        self._index = self._make_index()

    def take(self, tensor: Tensor) -> Tensor:
        """The elements in a tensor: [batch, tokens, width], or [tokens, width] of a mask."""
        return tensor.reshape(self._view)[self._index] if self._index else tensor

    def put(self, tensor: Tensor, values: Tensor) -> Tensor:
        """A copy of a tensor with these elements, in memory laid out as the tensor is.

        Kernels may round differently for another layout.
        """
        if not self._index:
            return values if values.stride() == tensor.stride() else _copied(values, tensor)
        changed = _copied(tensor, tensor).reshape(self._view)
        changed[self._index] = values
        return changed.reshape(self.shape)

    def examples(self, count: int) -> Ints | None:
        """Which example each row of the whole tensor is of. A row is all but the last dimension.

        Args:
            count: the number of examples of the batch.

        Returns:
            [rows], numbers from 0; None: a row is of several examples, or it is not known of which.

        Raises:
            UnsupportedError: the rows are tokens in an order of their own, as inside experts, or
                the batch may be on either of two axes.
        """
        self.check_rows()
        shape = self._rows_of(self.shape)
        if count == 1:
            return np.zeros(shape.numel(), np.int64)
        if not shape:
            return None
        if self._spot.batch_first is False:
            if len(shape) < 2 or shape[1] != count or count in shape[2:]:
                return None
            sequences = np.arange(count).reshape(1, count, *[1] * (len(shape) - 2))
            return np.broadcast_to(sequences, shape).reshape(-1)
        if shape[0] % count:
            return None
        for text in self._texts:
            self._check_order(text.rows, text.length)
        if self._spot.batch_first is None and shape[0] != count and count in shape[1:2]:
            return None  # the batch may be the second one
        return np.arange(shape.numel()) // (shape.numel() // count)

    @property
    def rows(self) -> Ints | None:
        """Which rows of the whole tensor the site has, see `examples`; None: all."""
        if not self._places:
            return None
        shape = self._rows_of(self._view)
        chosen = tuple(one.numpy() if isinstance(one, Tensor) else one for one in self._places)
        found: Ints = np.arange(shape.numel()).reshape(shape)[chosen].reshape(-1)
        return found

    def _rows_of(self, shape: torch.Size) -> torch.Size:
        """A shape without the dimension that heads and experts have columns of."""
        return shape[:-1] if len(shape) > 1 or self._spot.columns is not None else shape

    def fit(self, values: Tensor, what: str) -> Tensor:
        """The elements that belong to the site in a tensor that a caller gives.

        Args:
            values: a tensor of the whole shape, or of the shape of the part, or a vector that
                stands for each row.
            what: names it in messages.

        Raises:
            InvalidArgumentError: it has another shape.
        """
        if values.shape == self.shape:
            return self.take(values)
        if values.shape == self.part_shape:
            return values
        if values.dim() == 1 and self.part_shape:
            if self._spot.columns is not None and len(values) == self.shape[-1]:
                values = values[self._spot.columns]
            if len(values) == self.part_shape[-1]:
                return values.expand(self.part_shape)
        part = "" if self.part_shape == self.shape else f", {list(self.part_shape)}"
        vector = f" or [{self.part_shape[-1]}]" if self.part_shape else ""
        raise InvalidArgumentError(
            f"{self._spot.site}: {what} has the shape {list(values.shape)}; give "
            f"{list(self.shape)}{part}{vector}"
        )

    @functools.cached_property
    def part_shape(self) -> torch.Size:
        """The shape of the elements."""
        return self.take(torch.empty(self.shape, device="meta")).shape

    def batch(self, tensor: Tensor) -> Tensor:
        """A tensor as [batch, ...].

        Raises:
            InvalidArgumentError: the shape has no batch.
        """
        return tensor.reshape(self._batched(tokens=False, sequences=True))

    def take_of_batch(self, tensor: Tensor) -> Tensor:
        """As `take`, of what `batch` returned."""
        return self.take(tensor.reshape(self.shape))

    @functools.cached_property
    def real_tokens(self) -> Tensor | None:
        """Booleans [batch, tokens]: no padding. None: the model was given no mask.

        It is None too for a tensor of something else than tokens, as of the patches of an image.

        Raises:
            UnsupportedError: the model was given a mask that does not say which tokens are padding,
                or the tensor may have the tokens of the encoder or of the decoder.
        """
        if self._spot.layout in _NO_TEXT:
            return None
        texts = [text for text in self._texts if self._has_tokens_of(text)]
        if not texts:
            return None
        if self._spot.layout == "both" and (len(texts) > 1 or len(self._texts) < 2):
            if all(text.mask is None and text.ended is None for text in texts):
                return None
            raise UnsupportedError(
                f"{self._spot.site}: it runs on the tokens of the encoder and on those of the "
                f"decoder, and the shape {list(self.shape)} does not say which of them this call "
                "has, so it is unknown which are padding: choose a layer of the encoder or of the "
                "decoder, or take the mean yourself and give it with replace()"
            )
        text = texts[0]
        real = self._real_of(text)
        if text.ended is not None:
            places = torch.arange(text.length, device=text.ended.device).flip(0)
            goes_on = places >= text.ended[:, None]
            real = goes_on if real is None else real & goes_on
        if real is None:
            return None
        self._check_order(text.rows, text.length)
        return real.T if self._spot.batch_first is False else real

    def _has_tokens_of(self, text: Text) -> bool:
        """Whether the shape is that of vectors of a text's tokens."""
        rows, length = text.rows, text.length
        lying = (length, rows) if self._spot.batch_first is False else (rows, length)
        return self.shape[:2] == lying or self.shape[:1] == (rows * length,)

    def _real_of(self, text: Text) -> Tensor | None:
        if text.mask is None:
            return None
        mask = text.mask
        if isinstance(mask, Unread) or bool(undecided(mask).any()):
            told = mask if isinstance(mask, Unread) else "which has several readings"
            raise UnsupportedError(
                f"{self._spot.site}: the mask, {told}, does not say which tokens are padding, "
                "so the mean of the others is unknown: give the model a mask of [batch, tokens], "
                "or take the mean yourself and give it with replace()"
            )
        real, held = kept(mask), None if self._given is None else self._given.held
        end = real.shape[1]
        if isinstance(held, int) and held + text.length <= end:
            end = held + text.length
        return real[:, end - text.length : end]

    @functools.cached_property
    def _texts(self) -> list[Text]:
        """What the model was given; first the text that the module has most likely."""
        if self._given is None:
            return []
        texts = [self._given.decoder, self._given.text]
        if self._spot.in_encoder:
            texts.reverse()
        return [text for text in texts if text is not None]

    # ---- where --------------------------------------------------------------------------------

    def _make_index(self) -> tuple[Any, ...]:
        spot, site = self._spot, self._spot.site
        self._view = self.shape
        rows = tokens = None
        if site.positions is not None or site.sequences is not None:
            self._view = self._batched(
                tokens=site.positions is not None, sequences=site.sequences is not None
            )
            rows = self._chosen("sequences", site.sequences, self._view[0])
        index: tuple[Any, ...] = ()
        self._is_masked = site.has_mask
        if self._is_masked:
            index = self._masked(site.positions, rows)
        elif site.positions is not None:
            tokens = self._chosen("positions", site.positions, self._view[1])
            index = (slice(None), tokens) if rows is None else (rows[:, None], tokens)
        elif rows is not None:
            index = (rows,)
        if spot.width is not None and (not self.shape or self.shape[-1] != spot.width):
            raise InvalidArgumentError(
                f"{site}: the tensor has the shape {list(self.shape)}, and the heads of "
                f"{spot.name!r} have {spot.width} columns: see register_heads"
            )
        self._places = index
        return (*index, ..., spot.columns) if spot.columns is not None else index

    def check_rows(self) -> None:
        """Refuses tensors whose rows may be other tokens in another run.

        Raises:
            UnsupportedError: they are in an order of their own.
        """
        if self._spot.layout == "unordered":
            raise UnsupportedError(
                f"{self._spot.site}: inside experts the rows are the tokens that the router sent "
                "to them, in an order of their own: take the layer that joins the experts"
            )

    def _check_order(self, rows: int, length: int) -> None:
        """Refuses tensors that have tokens in another order, or perhaps.

        Raises:
            UnsupportedError: which row is which token's is unknown.
        """
        self.check_rows()
        # The batch may be on either axis where it is as long as the texts.
        square = self.shape[:2] == (rows, length) and rows == length > 1
        if square and self._spot.batch_first is None:
            raise UnsupportedError(
                f"{self._spot.site}: the shape {list(self.shape)} may be [batch, tokens, ...] or "
                f"[tokens, batch, ...], because {rows} texts have {length} tokens: give the model "
                "a batch with more or fewer texts than tokens"
            )

    def _batched(self, *, tokens: bool, sequences: bool) -> torch.Size:
        """The shape as [batch, tokens, ...] or, without `tokens`, [batch, ...].

        Raises:
            InvalidArgumentError: the shape has no batch, or no tokens behind it.
            UnsupportedError: which row is which token's is unknown.
        """
        if self._spot.batch_first is False:
            raise UnsupportedError(
                f"{self._spot.site}: its tensors are [tokens, batch, ...], and positions and "
                "sequences need [batch, tokens, ...]: choose another layer"
            )
        if tokens and self._spot.layout == "width_first":
            raise UnsupportedError(
                f"{self._spot.site}: its tensors are [batch, width, tokens], and positions need "
                "[batch, tokens, ...]: choose the layer around it"
            )
        for text in self._texts:
            self._check_order(text.rows, text.length)
        shape, least = self.shape, 3 if tokens else 2
        if not self._texts and len(shape) >= least:
            return shape
        for text in self._texts:
            batches = (text.rows,) if sequences else (text.rows, 1)
            if len(shape) >= least and shape[0] in batches:
                lengths = [one.length for one in self._texts]
                if not tokens or len(shape) == 3 or shape[1] in lengths:
                    return shape
            if len(shape) >= 2 and shape[0] == text.rows * text.length:
                return torch.Size((text.rows, text.length, *shape[1:]))
        got = " and ".join(f"{text.rows} x {text.length} tokens" for text in self._texts)
        raise InvalidArgumentError(
            f"{self._spot.site}: the tensor has the shape {list(shape)}"
            + (f", and the model was given {got}" if got else "")
            + f": {'positions' if tokens else 'sequences'} need "
            + ("[batch, tokens, ...]" if tokens else "[batch, ...]")
        )

    def _chosen(self, name: str, wanted: Any, length: int) -> Tensor | None:
        """The indices of positions or sequences, sorted."""
        if wanted is None:
            return None
        if isinstance(wanted, slice):
            found = sorted(range(length)[wanted])
        else:
            for one in wanted:
                if not -length <= one < length:
                    raise InvalidArgumentError(
                        f"{self._spot.site}: {name} = {one}, and this call has {length}"
                        + (": use steps to choose the calls" if name == "positions" else "")
                    )
            found = sorted({one % length for one in wanted})
        if not found:
            raise InvalidArgumentError(
                f"{self._spot.site}: {name} = {wanted} has none of the {length} of this call"
            )
        return torch.tensor(found)

    def _masked(self, wanted: tuple[tuple[bool, ...], ...], rows: Tensor | None) -> tuple[Any, ...]:
        mask = torch.tensor(wanted)
        if mask.shape != self._view[:2]:
            raise InvalidArgumentError(
                f"{self._spot.site}: the mask has the shape {list(mask.shape)}, and this call has "
                f"{list(self._view[:2])}: use steps to choose the calls"
            )
        if rows is not None:
            kept = torch.zeros(len(mask), dtype=torch.bool)
            kept[rows] = True
            mask = mask & kept[:, None]
        if not mask.any():
            raise InvalidArgumentError(
                f"{self._spot.site}: the mask has no token of these sequences"
            )
        return tuple(mask.nonzero(as_tuple=True))


def _copied(values: Tensor, like: Tensor) -> Tensor:
    """A copy of values, with the strides of a tensor if no two of its elements share memory."""
    end = 1
    for stride, size in sorted(zip(like.stride(), like.shape, strict=True)):
        if size > 1 and stride < end:
            return values.clone()
        end = max(end, stride * size)
    new = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=like.device)
    return new.copy_(values)
