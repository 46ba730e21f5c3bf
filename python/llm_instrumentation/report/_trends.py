"""What the index says of the values of each layer: their size over the steps, and the error.

The index has both for tensors that were converted or rounded. No packet is decoded.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from ..analysis.reader import ActivationReader
from ..analysis.reading.columns import distinct
from ..analysis.reading.summary import tensor_bytes

__all__ = ["Trend", "trends"]

_POINTS = 32  # of a line


@dataclasses.dataclass(frozen=True)
class Trend:
    """The values of all tensors of a layer.

    Attributes:
        rms: their root mean square; NaN if the index does not have it.
        by_step: the rms in each of up to 32 groups of steps that follow each other; NaN: no tensor.
        error: squared error of storing over squared values; NaN if nothing was measured.
    """

    rms: float
    by_step: list[float]
    error: float


def trends(reader: ActivationReader) -> tuple[dict[str, Trend], float]:
    """The trend of each layer, by name, and the error of all layers together."""
    view = reader.select()
    catalogue, rows = view._snapshot.catalogue, view._rows
    if not len(rows):
        return {}, math.nan
    codes, layer_of = distinct(catalogue.codes[rows])
    count = len(codes)
    squares = catalogue.numbers("mean_square")[rows]
    errors = catalogue.numbers("mse")[rows]
    # A tensor counts as often as it has values; all tensors of a layer mostly have one type.
    weights = np.maximum(tensor_bytes(catalogue, rows), 1).astype(np.float64)
    known = np.isfinite(squares)
    weights[~known] = 0
    squares = np.where(known, squares, 0.0)
    errors = np.where(known & np.isfinite(errors), errors, 0.0)

    total = np.bincount(layer_of, weights, count)
    of_squares = np.bincount(layer_of, squares * weights, count)
    of_errors = np.bincount(layer_of, errors * weights, count)
    with np.errstate(invalid="ignore", divide="ignore"):
        rms = np.sqrt(of_squares / total)
        error = of_errors / of_squares
        whole = float(of_errors.sum() / of_squares.sum())

    steps = catalogue.numbers("step")[rows].astype(np.int64)
    there = known & (steps >= 0)
    lines = np.full((count, 1), math.nan)
    if there.any():
        low, high = int(steps[there].min()), int(steps[there].max())
        points = min(_POINTS, high - low + 1)
        group = (steps[there] - low) * points // (high - low + 1)
        at = layer_of[there] * points + group
        sums = np.bincount(at, squares[there] * weights[there], count * points)
        with np.errstate(invalid="ignore"):
            lines = np.sqrt(sums / np.bincount(at, weights[there], count * points))
        lines = lines.reshape(count, points)
    found = {
        catalogue.names[code]: Trend(float(rms[k]), lines[k].tolist(), float(error[k]))
        for k, code in enumerate(codes)
    }
    return found, whole
