"""Computes statistics of the values of one tensor, in bounded memory."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["Statistics", "statistics"]

_PIECE = 1 << 20  # number of values that are converted to float64 at a time


@dataclasses.dataclass(frozen=True)
class Statistics:
    """Statistics of the values of a tensor.

    Complex values count by their magnitudes, booleans as 0 and 1.

    Attributes:
        values: number of values.
        nan, inf, zeros: number of values that are NaN, infinite, and 0.
        min, max, mean, std: of the finite values, computed in float64; None if there are no finite
            values. std is the root of the mean squared distance from the mean.
    """

    values: int
    nan: int
    inf: int
    zeros: int
    min: float | None
    max: float | None
    mean: float | None
    std: float | None


def statistics(values: npt.NDArray[Any]) -> Statistics:
    """Computes the statistics of an array of any shape, in two passes."""
    flat = values.reshape(-1)
    finite = nan = inf = zeros = 0
    low, high, total = math.inf, -math.inf, 0.0
    for piece in _pieces(flat):
        known = piece[np.isfinite(piece)]
        nan += int(np.isnan(piece).sum())
        inf += int(np.isinf(piece).sum())
        zeros += int((piece == 0).sum())
        finite += len(known)
        if len(known):
            low, high = min(low, float(known.min())), max(high, float(known.max()))
            total += float(known.sum())
    if not finite:
        return Statistics(len(flat), nan, inf, zeros, None, None, None, None)
    mean = total / finite
    squares = sum(
        float(np.square(piece[np.isfinite(piece)] - mean).sum()) for piece in _pieces(flat)
    )
    return Statistics(len(flat), nan, inf, zeros, low, high, mean, math.sqrt(squares / finite))


def _pieces(flat: npt.NDArray[Any]) -> Any:
    for first in range(0, len(flat), _PIECE):
        piece = flat[first : first + _PIECE]
        yield (np.abs(piece) if piece.dtype.kind == "c" else piece).astype(np.float64)
