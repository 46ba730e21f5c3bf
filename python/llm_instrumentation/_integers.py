"""Integers that are given as arguments: one or several, also those of NumPy and torch."""

from __future__ import annotations

import contextlib
import operator
from typing import Any

from .errors import InvalidArgumentError

__all__ = ["integers"]


def integers(name: str, given: Any) -> int | list[int]:
    """An argument's integer or integers, as Python has them.

    Args:
        name: of the argument, for messages.
        given: an integer, or several.

    Raises:
        InvalidArgumentError: it is something else, or has booleans.
    """
    with contextlib.suppress(TypeError):  # it is no integer, so it has several
        return _integer(given)
    try:
        return [_integer(one) for one in given]
    except TypeError:
        raise InvalidArgumentError(
            f"{name} = {given!r}: give an integer, or a list of integers"
        ) from None


def _integer(value: Any) -> int:
    """
    Raises:
        TypeError: it is no integer, or a boolean.
    """
    # A tensor of one boolean has an index too.
    if isinstance(value, bool) or str(getattr(value, "dtype", "")).endswith("bool"):
        raise TypeError(f"{value!r} is a boolean")
    return operator.index(value)
