"""What a notebook shows of a causal graph."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..._html import block, table
from ..._pages import units
from ._parts import Edge, Node

if TYPE_CHECKING:
    from . import CausalGraph

__all__ = ["graph_html"]

_ROWS = 20


def graph_html(graph: CausalGraph) -> str:
    """What the graph is, and its largest effects: of edges, or of nodes if it has no edges."""
    parts: tuple[Node | Edge, ...] = graph.edges or graph.nodes
    what = "edge" if graph.edges else "node"
    ranked = sorted(parts, key=lambda part: -abs(part.effect or 0.0))
    left_out = len(ranked) - _ROWS
    rows = table(
        [what, "effect", "interval", "p"],
        map(_row, ranked[:_ROWS]),
        f"and {left_out:,} more {what}s with smaller effects" if left_out > 0 else "",
    )
    return block(repr(graph).strip("<>"), rows)


def _row(part: Node | Edge) -> tuple[str, ...]:
    return (
        part.id,
        units.UNKNOWN if part.effect is None else f"{part.effect:+.4g}",
        units.UNKNOWN if part.low is None else f"{part.low:+.4g} to {part.high:+.4g}",
        units.UNKNOWN if part.p_value is None else f"{part.p_value:.3g}",
    )
