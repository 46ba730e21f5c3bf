"""Small pictures as SVG elements, which stand in the cells of a table and need no matplotlib.

They take the colour of the text around them, so they fit light and dark pages.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

__all__ = ["bars", "sparkline"]


def bars(counts: Sequence[int], told: str, *, width: int = 300, height: int = 48) -> str:
    """A histogram: a bar for each count. A bar that is not 0 has at least one pixel.

    Args:
        counts: at least one.
        told: text for readers who do not see it.
        width, height: in CSS pixels.
    """
    most = max(counts) or 1
    each = width / len(counts)
    # One path for all bars takes a fifth of the bytes of an element for each.
    path = "".join(
        f"M{k * each:g} {height}v-{math.ceil(count / most * height)}h{each * 0.8:g}V{height}"
        for k, count in enumerate(counts)
        if count
    )
    return _svg(f'<path d="{path}"/>', told, width, height, 'fill="currentColor" opacity="0.7"')


def sparkline(values: Sequence[float], told: str, *, width: int = 96, height: int = 20) -> str:
    """A line through values at equal distances, from the smallest at the bottom to the largest.

    Values that are not finite leave a gap. A single value is a dot.
    """
    known = [value for value in values if math.isfinite(value)]
    if not known:
        return ""
    low, span = min(known), max(known) - min(known)
    step = (width - 4) / max(1, len(values) - 1)
    path, gap = "", True
    for k, value in enumerate(values):
        if not math.isfinite(value):
            gap = True
            continue
        y = height - 2 - (value - low) / span * (height - 4) if span else height / 2
        # A line of no length with round ends is a dot.
        path += f"{'M' if gap else 'L'}{2 + k * step:.3g} {y:.3g}{'h0' if gap else ''}"
        gap = False
    look = 'fill="none" stroke="currentColor" stroke-width="1.5" stroke-linecap="round"'
    return _svg(f'<path d="{path}"/>', told, width, height, look)


def _svg(inner: str, told: str, width: int, height: int, look: str) -> str:
    text = escape(told)
    return (
        f'<svg role="img" aria-label="{text}" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" {look}><title>{text}</title>{inner}</svg>'
    )
