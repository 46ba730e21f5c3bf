"""What a notebook shows of a causal graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..._html import block, table
from ..._pages import units
from ..significance import width_remark
from .parts import Edge, Node

if TYPE_CHECKING:
    from . import CausalGraph

__all__ = ["graph_html", "why_wide"]

_ROWS = 20


def graph_html(graph: CausalGraph) -> str:
    """What the graph is, and its largest effects: of edges, or of nodes if it has no edges."""
    parts: tuple[Node | Edge, ...] = graph.edges or graph.nodes
    what = "edge" if graph.edges else "node"
    ranked = sorted(parts, key=lambda part: -abs(part.effect or 0.0))
    left_out = len(ranked) - _ROWS
    more = f"and {left_out:,} more {what}s with smaller effects" if left_out > 0 else ""
    rows = table(
        [what, "effect", "interval", "p"],
        map(_row, ranked[:_ROWS]),
        "; ".join(filter(None, [more, why_wide(graph, ranked[:_ROWS])])),
    )
    return block(repr(graph).strip("<>"), rows)


def why_wide(graph: CausalGraph, parts: Sequence[Node | Edge]) -> str:
    """Why the intervals of some parts are wide, if most are; else ""."""
    bounded = [part for part in parts if part.low is not None and part.effect is not None]
    if graph.examples is None or not bounded:
        return ""
    effects, low, high = zip(*((part.effect, part.low, part.high) for part in bounded), strict=True)
    return width_remark(effects, low, high, graph.examples)


def _row(part: Node | Edge) -> tuple[str, ...]:
    return (
        part.id,
        units.UNKNOWN if part.effect is None else f"{part.effect:+.4g}",
        units.UNKNOWN if part.low is None else f"{part.low:+.4g} to {part.high:+.4g}",
        units.UNKNOWN if part.p_value is None else f"{part.p_value:.3g}",
    )
