"""Reads from attention masks which tokens are padding.

A mask of two dimensions, [rows, columns], says it of each token. One of three or four dimensions,
[rows, heads, queries, keys], says which tokens (keys) each token (query) sees. There a token is
none of padding if it sees itself and another one, or is seen by another one. Some models open the
rows of padding, which would see nothing otherwise: such a row shows all tokens. Others let padding
see itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__ = ["Mask", "Unread", "kept", "read_mask", "undecided"]

# A value that is added to scores hides a token from here down. The models of transformers add
# -10,000 or less; the biases of ALiBi are small numbers. What is between may be either.
_HIDES = -9000.0
_BIASES = -50.0


class Mask(NamedTuple):
    """What of a mask tells padding, as the model was given it.

    Attributes:
        values: [rows, columns], with a column for each token of the call, and perhaps for those in
            the cache before them. With `seen` it is bool [rows, 3, tokens]: of each token whether
            it may be none of padding, whether it sees itself alone and no other sees it, and
            whether the mask is contradictory.
        seen: the values come from a mask of three or four dimensions.
    """

    values: Tensor
    seen: bool = False

    @property
    def may_be_square(self) -> bool:
        """Whether by its shape [rows, columns] it may be one of [queries, keys]."""
        return not self.seen and self.values.shape[-2] == self.values.shape[-1] > 1


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

    `undecided` says later, by the values, which rows the mask leaves open.

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
    token = torch.arange(length, device=value.device)
    sees = _shown(value, 3, _HIDES)
    own = sees.index_select(2, token + first)  # [rows, queries, tokens]
    if queries == length > 1:
        itself = own[:, token, token]
        opened = _opened(own)
        closed = own & ~opened[:, :, None]
        candidate = itself & ~opened
        others = closed.sum(1) - (closed[:, token, token]).long()
        alone = candidate & (sees.sum(2) == 1) & (others == 0)
        real = candidate & ~alone
        # A token that is none of padding sees nothing that is, and is seen by a later one.
        contradicted = (own & real[:, :, None] & ~candidate[:, None]).any(2)
        later = real.flip(1).cumsum(1).flip(1) - real.long() > 0
        contradicted |= real & (others == 0) & later
    else:
        candidate, alone = own[:, -1], torch.zeros_like(own[:, -1])
        contradicted = alone
    contradicted = contradicted | _may_be_biases(value)
    parts = torch.stack([candidate, alone, contradicted], 1)
    return Mask(parts if len(parts) == rows else parts.expand(rows, -1, -1), seen=True)


def _opened(own: Tensor) -> Tensor:
    """The rows [rows, queries] that show all tokens because they would have shown none.

    Their own tokens are padding, which no other row shows. The last token of a causal mask sees
    all others too, and is seen by none. Its row is open only if it shows other padding.
    """
    every = own.all(2)
    by_others = (own & ~every[:, :, None]).any(1)
    opened = every & ~every.all(1, keepdim=True) & ~by_others
    padding = opened[:, :-1] | ~own[:, :-1, :-1].any(1)
    opened[:, -1] &= padding.any(1)
    return opened


def _may_be_biases(value: Tensor) -> Tensor:
    """Whether what is added to scores is too small to hide a token, and large for a bias."""
    if not value.is_floating_point() or not value.numel():
        return torch.zeros((), dtype=torch.bool, device=value.device)
    least = value.amin()
    return (value.amax() <= 0) & (least > _HIDES) & (least < _BIASES)


def _least(held: int | Tensor, most: int) -> Any:
    return held.clamp(max=most) if isinstance(held, Tensor) else min(held, most)


def kept(mask: Mask) -> Tensor:
    """Where a mask keeps tokens: False is padding.

    Args:
        mask: the mask of a call; or the masks of several with [calls] before their dimensions.

    Returns:
        bool of the shape of the values, without the dimension of 3.
    """
    if not mask.seen:
        return _shown(mask.values, 2, 0.0)
    candidate, alone, _ = mask.values.unbind(-2)
    only = candidate.sum(-1, keepdim=True) == 1  # a text of one token sees itself alone
    return candidate & (~alone | only)


def undecided(mask: Mask) -> Tensor:
    """For which rows of a mask :func:`kept` may be wrong.

    These are rows in which several tokens see themselves alone: padding, or texts of one token. And
    a mask [rows, columns] with as many rows as columns in which each token sees those before it: of
    one long text, or of texts that become longer. And numbers to add that hide little.

    Returns:
        bool [rows], with [calls] before it as `kept` has it.
    """
    values = mask.values
    if mask.seen:
        candidate, alone, contradicted = values.unbind(-2)
        return (alone.any(-1) & (candidate.sum(-1) > 1)) | contradicted.any(-1)
    if not mask.may_be_square:
        return torch.zeros(values.shape[:-1], dtype=torch.bool, device=values.device)
    shown = kept(mask)
    causal = torch.ones_like(shown).tril()
    return (shown == causal).flatten(-2).all(-1, keepdim=True).expand(shown.shape[:-1])


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
