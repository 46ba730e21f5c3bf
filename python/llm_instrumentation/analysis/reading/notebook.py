"""What a notebook shows of a capture, a selection of activations, and an activation."""

from __future__ import annotations

import math
from html import escape
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ..._html import block, table
from ..._pages import small, units
from ...errors import StrapError
from .statistics import statistics
from .summary import LayerSummary, layers

if TYPE_CHECKING:
    from ..activation import Activation
    from ..reader import ActivationReader, ActivationView

__all__ = ["activation_html", "capture_html", "view_html"]

_LAYERS = 30  # rows of a table
_MOST_VALUES = 1 << 24  # of an activation that is decoded to show it
_BARS = 60  # of the histogram


def capture_html(reader: ActivationReader) -> str:
    """The facts about a capture, and its layers."""
    return block(repr(reader).strip("<>"), _layers(reader.select()))


def view_html(view: ActivationView) -> str:
    """The layers of a selection."""
    return block(repr(view).strip("<>"), _layers(view))


def _layers(view: ActivationView) -> str:
    found = layers(view)
    left_out = len(found) - _LAYERS
    return table(
        ["layer", "activations", "steps", "shape", "type", "stored as", "stored", "ratio"],
        map(_row, found[:_LAYERS]),
        f"and {left_out:,} more layers" if left_out > 0 else "",
    )


def _row(layer: LayerSummary) -> tuple[str, ...]:
    first, last = layer.first_step, layer.last_step
    shape = units.UNKNOWN
    if layer.shape is not None:
        shape = f"[{', '.join('*' if n is None else str(n) for n in layer.shape)}]"
    return (
        layer.name or "<root>",
        f"{layer.tensors:,}",
        units.UNKNOWN if first is None else f"{first}" if first == last else f"{first} to {last}",
        shape,
        ", ".join(layer.source_dtypes) or units.UNKNOWN,
        ", ".join(layer.stored_dtypes) or units.UNKNOWN,
        units.size(layer.stored_bytes),
        units.UNKNOWN if layer.ratio is None else f"{layer.ratio:.2f}",
    )


def activation_html(activation: Activation) -> str:
    """The facts about an activation, with the statistics and a histogram of its values."""
    said = repr(activation).strip("<>")
    if activation.error is not None:
        return block(said)
    if activation.shape is not None and math.prod(activation.shape) > _MOST_VALUES:
        return block(said, "<div>Too many values to show: to_numpy() reads them.</div>")
    try:
        values = activation.to_numpy()
    except (StrapError, ValueError) as error:
        return block(said, f"<div>The values cannot be read: {escape(str(error))}</div>")
    found = statistics(values)
    numbers = [
        units.UNKNOWN if number is None else f"{number:.4g}"
        for number in (found.min, found.mean, found.std, found.max)
    ]
    share = found.zeros / found.values if found.values else 0.0
    facts = table(
        ["values", "min", "mean", "std", "max", "zeros", "NaN", "infinite"],
        [
            [
                f"{found.values:,}", *numbers, units.percent(share), f"{found.nan:,}",
                f"{found.inf:,}",
            ]
        ],
    )  # fmt: skip
    return block(said, facts, _histogram(values, found.min, found.max))


def _histogram(values: npt.NDArray[Any], low: float | None, high: float | None) -> str:
    """How many of the finite values are in each of equal parts of their range."""
    if low is None or high is None or low == high:
        return ""
    flat = values.reshape(-1)
    flat = np.abs(flat) if np.iscomplexobj(flat) else flat
    counts = np.histogram(flat.astype(np.float64), _BARS, (low, high))[0]
    return small.bars(counts.tolist(), f"Histogram of the values from {low:.4g} to {high:.4g}")
