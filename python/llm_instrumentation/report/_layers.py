"""The layers as a table: shapes, types, sizes, the size of values over the steps, their spread."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from .._pages import page, small, units
from ..analysis.reading.summary import LayerSummary
from ._sample import LayerValues
from ._trends import Trend

__all__ = ["layer_tables"]

_OPEN = 40  # layers of the table that is not folded
_FOLDED = 100  # layers of each table that is
_MOST = 3000  # layers that are listed
_HEADS = (
    "layer", "tensors", "shape", "type", "stored", "ratio", "error", "RMS", "by step",
    "range", "zeros", "values",
)  # fmt: skip


def layer_tables(
    layers: Sequence[LayerSummary],
    trends: Mapping[str, Trend],
    values: Mapping[str, LayerValues],
) -> Iterator[str]:
    """A table of the first layers, and folded ones of the others.

    Args:
        layers: in the order of execution.
        trends: what the index says, by layer.
        values: what was read, by layer.
    """
    if not layers:
        return
    rows = [_row(layer, trends[layer.name], values.get(layer.name)) for layer in layers[:_MOST]]
    yield page.listing(_HEADS, rows[:_OPEN])
    for first in range(_OPEN, len(rows), _FOLDED):
        some = rows[first : first + _FOLDED]
        summary = f"Layers {first + 1:,} to {first + len(some):,}: {some[0][0]} to {some[-1][0]}"
        yield page.details(summary, page.listing(_HEADS, some))
    if len(layers) > _MOST:
        yield page.paragraph(f"{len(layers) - _MOST:,} more layers are not listed.")
    yield page.paragraph(
        "RMS is the root mean square of a layer's values; the line beside it is the RMS over the "
        "steps. The error is the squared error that storing made, divided by the sum of the "
        "squared values. The histogram on the right divides the range into 40 equal parts.",
        "sub",
    )


def _row(layer: LayerSummary, trend: Trend, found: LayerValues | None) -> tuple[str, ...]:
    name = layer.name or "<root>"
    rms, line = trend.rms, trend.by_step
    if math.isnan(rms) and found is not None:
        rms, line = found.rms, found.by_packet
    return (
        name,
        f"{layer.tensors:,}",
        _shape(layer.shape),
        _types(layer),
        units.size(layer.stored_bytes),
        units.UNKNOWN if layer.ratio is None else f"{layer.ratio:.2f}",
        _number(trend.error, 2),
        _number(rms),
        page.Markup(_line(line)),
        units.UNKNOWN if found is None or math.isnan(found.min)
        else f"{found.min:.3g} to {found.max:.3g}",
        units.UNKNOWN if found is None or not found.values
        else f"{100 * found.zeros / found.values:.2g} %",
        page.Markup(_histogram(found)),
    )  # fmt: skip


def _types(layer: LayerSummary) -> str:
    """The type of the tensors, and that of the stored values if it is another one."""
    source, stored = (", ".join(t) for t in (layer.source_dtypes, layer.stored_dtypes))
    if source == stored or not stored:
        return source or units.UNKNOWN
    return f"{source or units.UNKNOWN} → {stored}"


def _shape(shape: Sequence[int | None] | None) -> str:
    if shape is None:
        return units.UNKNOWN
    return "×".join("*" if size is None else f"{size:,}" for size in shape) or "scalar"


def _number(value: float, digits: int = 3) -> str:
    return f"{value:.{digits}g}" if math.isfinite(value) else units.UNKNOWN


def _line(values: Sequence[float]) -> str:
    known = [value for value in values if math.isfinite(value)]
    if len(known) < 2:
        return units.UNKNOWN
    return small.sparkline(
        values, f"from {known[0]:.3g} to {known[-1]:.3g}, between {min(known):.3g} and "
        f"{max(known):.3g}", width=76,
    )  # fmt: skip


def _histogram(found: LayerValues | None) -> str:
    if found is None or not found.counts:
        return units.UNKNOWN
    told = f"Histogram from {found.min:.3g} to {found.max:.3g}"
    return small.bars(found.counts, told, width=84, height=22)
