"""Selects steps, tokens and calls by number."""

from __future__ import annotations

import operator
import sys
from collections.abc import Iterable
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from ...errors import InvalidArgumentError

Selector: TypeAlias = "int | slice | Iterable[int] | None"
"""One number, a half-open range (slice) of numbers, a collection of numbers, or None for all."""


def bounds(wanted: int | slice | Iterable[int], what: str) -> tuple[int, int] | None:
    """The half-open range of a number or of a slice without a stride; None for other selectors.

    Raises:
        InvalidArgumentError: a number is negative, or `wanted` is no selector.
    """
    try:
        if isinstance(wanted, slice):
            start, stop, stride = _range(wanted, what)
            return (start, max(start, stop)) if stride == 1 else None
        if isinstance(wanted, Iterable):
            return None
        number = operator.index(wanted)
    except TypeError:
        raise InvalidArgumentError(_no_selector(wanted, what)) from None
    if number < 0:
        raise InvalidArgumentError(_negative(number, what))
    number = min(number, sys.maxsize - 1)
    return number, number + 1


def among(
    values: npt.NDArray[Any], wanted: int | slice | Iterable[int], what: str
) -> npt.NDArray[np.bool_]:
    """A mask of the values that a selector matches. An unknown value is -1 and never matches.

    Raises:
        InvalidArgumentError: a number is negative, or `wanted` is no selector.
    """
    try:
        if isinstance(wanted, slice):
            return _in_range(values, wanted, what)
        several = wanted if isinstance(wanted, Iterable) else (wanted,)
        numbers = [operator.index(n) for n in several]
    except TypeError:
        raise InvalidArgumentError(_no_selector(wanted, what)) from None
    if min(numbers, default=0) < 0:
        raise InvalidArgumentError(_negative(min(numbers), what))
    return np.isin(values, np.array(numbers, np.int64))


def _in_range(values: npt.NDArray[Any], wanted: slice, what: str) -> npt.NDArray[np.bool_]:
    start, stop, stride = _range(wanted, what)
    values = values.astype(np.int64)
    fits: npt.NDArray[np.bool_] = (
        (values >= start) & (values < stop) & ((values - start) % stride == 0)
    )
    return fits


def _range(wanted: slice, what: str) -> tuple[int, int, int]:
    start = 0 if wanted.start is None else operator.index(wanted.start)
    stop = sys.maxsize if wanted.stop is None else operator.index(wanted.stop)
    stride = 1 if wanted.step is None else operator.index(wanted.step)
    if start < 0 or stop < 0 or stride < 1:
        raise InvalidArgumentError(
            f"{what}: {wanted} is a range by value, from 0 up; it cannot count from the end"
        )
    return min(start, sys.maxsize), min(stop, sys.maxsize), stride


def _no_selector(wanted: object, what: str) -> str:
    return f"{what}: {wanted!r} is no number, slice or collection of numbers"


def _negative(number: int, what: str) -> str:
    return f"{what}: {number} is negative; they count from 0"
