"""How the edges of causal graphs look in figures, on pages and in Graphviz."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

from ..._pages.theme import COLORS
from .parts import Edge

if TYPE_CHECKING:
    from . import CausalGraph

__all__ = ["LOOKS", "WIDEST", "EdgeLook", "largest_effect", "look_of", "title", "width"]

WIDEST = 4.5  # points
_THINNEST = 0.6


class EdgeLook(NamedTuple):
    """The look of edges of one sign. Dashes tell the sign in print without colour."""

    color: str  # on white
    variable: str  # the CSS variable of the colour
    dashed: bool
    told: str


#: By the sign of the effect.
LOOKS = {
    "positive": EdgeLook(COLORS["blue"][0], "--blue", False, "effect above 0"),
    "negative": EdgeLook(COLORS["vermillion"][0], "--vermillion", True, "effect below 0"),
    "unknown": EdgeLook(COLORS["gray"][0], "--gray", False, "effect 0 or not measured"),
}


def look_of(edge: Edge) -> str:
    """The name of the edge's look."""
    if not edge.effect:
        return "unknown"
    return "positive" if edge.effect > 0 else "negative"


def largest_effect(edges: Iterable[Edge]) -> float:
    """The largest absolute effect; 0 if there is none."""
    return max((abs(edge.effect) for edge in edges if edge.effect is not None), default=0.0)


def width(edge: Edge, largest: float) -> float:
    """The width of an edge in points: it grows with the absolute effect, up to the largest one."""
    share = abs(edge.effect) / largest if edge.effect is not None and largest else 0.0
    return _THINNEST + (WIDEST - _THINNEST) * share


def title(graph: CausalGraph) -> str:
    """What a drawing of the graph shows, in a line."""
    if graph.metric:
        return f"Effects on {graph.metric}" + (f" in {graph.model}" if graph.model else "")
    return f"Causal graph of {graph.model}" if graph.model else "Causal graph"
