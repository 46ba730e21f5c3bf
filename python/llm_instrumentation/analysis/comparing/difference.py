"""Measures how much two arrays differ, in float64 and in bounded memory."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

__all__ = ["ArrayDifference", "cosine", "difference", "relative_error"]

_PIECE = 1 << 18  # values that are converted to float64 at a time; three such arrays fit the cache


class ArrayDifference(NamedTuple):
    """Sums over the values that are finite in both arrays.

    Attributes:
        values: the number of all values.
        nonfinite: the number of values that are NaN or infinite in one array, and not the same in
            the other.
        max_abs_error: the largest absolute value of b - a.
        error_squares, a_squares, b_squares: the sums of (b - a)², a² and b².
        products: the sum of a·b.
    """

    values: int
    nonfinite: int
    max_abs_error: float
    error_squares: float
    a_squares: float
    b_squares: float
    products: float


def difference(a: npt.NDArray[Any], b: npt.NDArray[Any]) -> ArrayDifference:
    """Measures the difference of two arrays with as many values.

    Complex numbers count as two values, booleans as 0 and 1.
    """
    flat_a, flat_b = _real(a), _real(b)
    nonfinite, largest, sums = 0, 0.0, np.zeros(4)
    with np.errstate(invalid="ignore", over="ignore"):
        for first in range(0, len(flat_a), _PIECE):
            x = flat_a[first : first + _PIECE].astype(np.float64)
            y = flat_b[first : first + _PIECE].astype(np.float64)
            error = y - x
            if not math.isfinite(error.sum()):
                finite = np.isfinite(x) & np.isfinite(y)
                same = (x == y) | (np.isnan(x) & np.isnan(y))
                nonfinite += int((~finite & ~same).sum())
                x, y, error = x[finite], y[finite], error[finite]
            if len(error):
                largest = max(largest, float(np.abs(error).max()))
            sums += error @ error, x @ x, y @ y, x @ y
    return ArrayDifference(len(flat_a), nonfinite, largest, *sums.tolist())


def relative_error(error_squares: float, a_squares: float) -> float:
    """‖b - a‖ / ‖a‖: 0 if the arrays are equal, infinite if only a is 0."""
    if error_squares == 0:
        return 0.0
    return math.sqrt(error_squares / a_squares) if a_squares else math.inf


def cosine(products: float, a_squares: float, b_squares: float) -> float:
    """The cosine of the angle between a and b; NaN if one of them is 0."""
    length = math.sqrt(a_squares) * math.sqrt(b_squares)
    return max(-1.0, min(1.0, products / length)) if length else math.nan


def _real(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    flat = np.ascontiguousarray(values).reshape(-1)
    return flat.view(flat.real.dtype) if flat.dtype.kind == "c" else flat
