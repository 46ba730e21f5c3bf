"""Reads from the attention mask that a caller gives which tokens of a batch are real."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ...errors import UnsupportedError
from .masks import Unread, kept, read_mask, undecided

__all__ = ["real_tokens"]


def real_tokens(mask: Any, rows: int, length: int, *, of: str) -> Tensor | None:
    """Which tokens are no padding.

    Numbers that are added to scores count too: 0 keeps a token, a very negative number hides it.

    Args:
        mask: the attention mask, as a model takes it, of two to four dimensions; None: there is
            none.
        rows: sequences in the batch.
        length: tokens of each. A mask with more columns has those of a prefix first.
        of: names the mask in messages.

    Returns:
        bool [rows, length]; None: there is no mask, so no token is padding.

    Raises:
        UnsupportedError: the mask does not say which tokens are padding.
    """
    found = read_mask(mask, rows, length, 0)
    if found is None:
        return None
    if isinstance(found, Unread):
        raise UnsupportedError(_unknown(of, str(found), rows, length))
    values = found.values
    # Whether 0 keeps a token or hides it is unknown: integers may be added to scores too.
    if not values.is_floating_point() and values.dtype.is_signed and bool((values < 0).any()):
        raise UnsupportedError(_unknown(of, "which has integers below 0", rows, length))
    if bool(undecided(found).any()):
        if found.may_be_square:
            raise UnsupportedError(
                f"{of} may show which of {length} tokens each token sees, or {rows} texts of 1 to "
                f"{rows} tokens, so it does not say which tokens are padding: give the texts in "
                "another order"
            )
        raise UnsupportedError(_unknown(of, "which has several readings", rows, length))
    return kept(found)[:, -length:] if length else kept(found)[:, :0]


def _unknown(of: str, why: str, rows: int, length: int) -> str:
    return (
        f"{of}, {why}, does not say which tokens are padding: give a mask of "
        f"[{rows}, {length}], with 1 for each token and 0 for padding"
    )
