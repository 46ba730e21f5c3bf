"""Reads from attention masks which tokens are padding.

A mask of two dimensions, [rows, columns], says it of each token. One of three or four dimensions,
[rows, heads, queries, keys], says which tokens (keys) each token (query) sees. Padding shows in it:
a query of padding sees itself only in rows that the model opened because they saw nothing, and no
later token sees padding.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__ = ["Mask", "Unread", "kept", "read_mask"]

# A value that is added to scores hides a token from here down. The models of transformers add
# -10,000 or less; the biases of ALiBi are small numbers.
_HIDES = -9000.0


class Mask(NamedTuple):
    """What of a mask tells padding, as the model was given it.

    Attributes:
        values: [rows, columns], with a column for each token of the call, and perhaps for those in
            the cache before them. With `seen` it is [rows, 3, tokens]: of each token whether the
            last one sees it, whether it sees itself, and whether it sees the next one.
        seen: the values come from a mask of three or four dimensions.
    """

    values: Tensor
    seen: bool = False


class Unread(NamedTuple):
    """A mask that cannot be read, so padding is unknown.

    Attributes:
        shape: its shape; () if it has none.
        kind: its type, or that of its elements.
    """

    shape: tuple[int | str, ...]
    kind: str

    def __str__(self) -> str:
        return f"{list(self.shape)} of {self.kind}" if self.shape else self.kind


def read_mask(
    value: Any, rows: int, length: int, held: int | Tensor | None
) -> Mask | Unread | None:
    """Reads an attention mask. It copies nothing of [rows, columns], and waits for no device.

    Args:
        value: the mask, or several by kind of layer. None: there is none.
        rows: sequences in the batch.
        length: tokens of each in this call.
        held: tokens in the cache before them; None: unknown.

    Returns:
        the mask; or what it is if it cannot be read; None: there is none, so no token is padding.
    """
    if isinstance(value, Mapping):  # as Gemma 3 has them
        names = sorted(value, key=lambda name: name != "full_attention")
        several = [read_mask(value[name], rows, length, held) for name in names]
        unread = several[0] if several else None
        return next((one for one in several if not isinstance(one, Unread)), unread)
    if value is None:
        return None
    if not isinstance(value, Tensor):
        shape = tuple(n for n in getattr(value, "shape", ()) if isinstance(n, int))
        return Unread(shape, type(value).__name__)
    found = None
    if value.layout is torch.strided and not value.is_nested:
        if value.dim() <= 2:
            found = _of_columns(value, rows, length)
        elif value.dim() <= 4:
            found = _of_queries(value, rows, length, held)
    kind = str(value.dtype).removeprefix("torch.")
    return found or Unread(tuple(value.shape), kind)


def _of_columns(value: Tensor, rows: int, length: int) -> Mask | None:
    given = value[None] if value.dim() == 1 else value
    if given.dim() != 2 or given.shape[0] not in (1, rows) or given.shape[1] < length:
        return None
    return Mask(given if given.shape[0] == rows else given.expand(rows, -1))


def _of_queries(value: Tensor, rows: int, length: int, held: int | Tensor | None) -> Mask | None:
    queries, keys = value.shape[-2:]
    if queries not in (1, length) or keys < length or value.shape[0] not in (1, rows):
        return None
    if value.dim() == 4:
        value = value.amax(1) if value.shape[1] > 1 else value[:, 0]
    if held is None and keys > length:
        return None
    # The keys of the call stand behind those of the cache. Static caches have more keys, and those
    # of a window fewer, of which the last ones are the call's.
    first: Any = 0 if held is None else _least(held, keys - length)
    own = torch.arange(length, device=value.device) + first
    query = torch.arange(queries, device=value.device)
    last = value[:, -1].index_select(1, own)
    if queries == length:
        itself = value[:, query, own]
        following = value[:, query[:-1], own[1:]]
        # The last token has no following one. Its own value in place of that decides nothing.
        following = torch.cat([following, itself[:, -1:]], 1)
    else:
        itself = following = last
    parts = torch.stack([last, itself, following], 1)
    return Mask(parts if len(parts) == rows else parts.expand(rows, -1, -1), seen=True)


def _least(held: int | Tensor, most: int) -> Any:
    return held.clamp(max=most) if isinstance(held, Tensor) else min(held, most)


def kept(mask: Mask) -> Tensor:
    """Where a mask keeps tokens: False is padding.

    Args:
        mask: the mask of a call; or the masks of several with [calls] before their dimensions.

    Returns:
        bool of the shape of the values, without the dimension of 3.
    """
    values = mask.values
    if not mask.seen:
        return _shown(values, 2, 0.0)
    last, itself, following = _shown(values, 3, _HIDES).unbind(-2)
    # A row that sees nothing is often opened, as some kernels cannot have it. An open row shows all
    # tokens, also padding, which its other rows show.
    opened = last.all(-1, keepdim=True) & ~itself.all(-1, keepdim=True)
    following[..., -1] = False
    real = (itself & ~following) | (last & ~opened)
    real[..., -1:] &= ~opened
    return real


def _shown(values: Tensor, dimensions: int, least: float) -> Tensor:
    """Where a mask shows tokens.

    Numbers that are added to scores show a token from `least` up, others where they are not 0. A
    call has the numbers of one kind: to add, if none is above 0, or one hides a token.

    Args:
        values: the mask; its last dimensions are those of a call.
        dimensions: the number of those.
        least: the least number to add that shows a token.
    """
    if not values.is_floating_point() or not values.numel():
        return values != 0
    over = tuple(range(-dimensions, 0))
    added = (values.amax(over, keepdim=True) <= 0) | (values.amin(over, keepdim=True) < least)
    return torch.where(added, values >= least, values != 0)
