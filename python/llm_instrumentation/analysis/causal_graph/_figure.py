"""The figure of a causal graph."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

from ..._extras import extra

with extra("report", "A figure"):
    from matplotlib.patches import FancyBboxPatch, PathPatch
    from matplotlib.path import Path

from ..._pages import drawing
from ..figures import canvas
from ._look import LOOKS, WIDEST, EdgeLook, largest_effect, look_of, title, width
from .layout import HEADING, HEIGHT, LETTERS, DrawnEdge, DrawnNode, draw

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from . import CausalGraph

__all__ = ["plot_graph"]

_SIDE, _BAND, _TOP = 8.0, 34.0, 44.0  # points: margins, the names of layers, the title
_LEAST = 310.0  # points: the width of the legend
_SHADE, _RULE = "#f3f5f7", "#d5dae0"


def plot_graph(graph: CausalGraph, ax: Axes | None) -> Axes:
    """See `causal_graph.CausalGraph.plot`."""
    made = draw(graph, _LEAST - _BAND - _SIDE)
    left = _BAND if made.bands else _SIDE
    below = _SIDE + (HEADING if made.columns else 0.0)
    across, up = left + made.width + _SIDE, made.height + _SIDE + below
    spare = max(0.0, _LEAST - across)
    with canvas.canvas(ax, ((across + spare) / 72, (up + _TOP) / 72)) as axes:
        left += spare / 2
        axes.set_xlim(-left, made.width + _SIDE + spare / 2)
        axes.set_ylim(-below, made.height + _SIDE)
        axes.set_axis_off()
        for at, (low, high, name) in enumerate(made.bands):
            if at % 2 == 0:
                axes.axhspan(low, high, color=_SHADE, linewidth=0, zorder=0)
            axes.text(
                -left + 2, (low + high) / 2, name, va="center", fontsize=6.5, color=drawing.MUTED
            )
        for at, (first, last, name) in enumerate(made.columns):
            if at:
                axes.plot([first] * 2, [-below, made.height], color=_RULE, linewidth=0.7, zorder=0)
            axes.text(
                (first + last) / 2, -HEADING / 2 - 2, drawing.shown(name), ha="center",
                va="center", fontsize=6.5, color=drawing.MUTED,
            )  # fmt: skip
        largest = largest_effect(graph.edges)
        # Wide edges below narrow ones, so that none is hidden.
        for edge in sorted(made.edges, key=lambda edge: -width(edge.edge, largest)):
            axes.add_patch(_line(edge, width(edge.edge, largest)))
        for node in made.nodes:
            _box(axes, node)
        looks = {look_of(edge) for edge in graph.edges}
        for name, look in LOOKS.items():
            if name in looks:
                axes.plot([], [], color=look.color, linestyle=_style(look), label=look.told)
        if largest:
            axes.plot(
                [],
                [],
                color=drawing.MUTED,
                linewidth=WIDEST,
                label=f"absolute effect {largest:.3g}",
            )
        drawing.title(axes, title(graph), legend=bool(graph.edges))
        return axes


def _line(drawn: DrawnEdge, points: float) -> PathPatch:
    corners, codes = [drawn.points[0]], [Path.MOVETO]
    for (x0, y0), (x1, y1) in itertools.pairwise(drawn.points):
        middle = (y0 + y1) / 2  # both ends are vertical
        corners += [(x0, middle), (x1, middle), (x1, y1)]
        codes += [Path.CURVE4] * 3
    look = LOOKS[look_of(drawn.edge)]
    return PathPatch(
        Path(corners, codes), facecolor="none", edgecolor=look.color, linewidth=points,
        linestyle=_style(look), capstyle="butt", alpha=0.85, zorder=1,
    )  # fmt: skip


def _style(look: EdgeLook) -> Any:
    return (0, (3, 1.2)) if look.dashed else "-"


def _box(axes: Axes, drawn: DrawnNode) -> None:
    low = drawn.y - drawn.height / 2
    axes.add_patch(
        FancyBboxPatch(
            (drawn.x - drawn.width / 2, low), drawn.width, drawn.height,
            boxstyle="round,pad=0,rounding_size=3", facecolor=drawing.SURFACE,
            edgecolor=drawing.MUTED, linewidth=0.7, zorder=2,
        )
    )  # fmt: skip
    name = low + drawn.height - HEIGHT / 2
    axes.text(
        drawn.x, name, drawing.shown(drawn.text), ha="center", va="center_baseline",
        fontsize=7, zorder=3,
    )  # fmt: skip
    for letter in drawn.letters:
        axes.text(
            drawn.port(letter), low + LETTERS / 2 + 0.5, letter, ha="center", va="center",
            fontsize=5.5, color=drawing.MUTED, zorder=3,
        )  # fmt: skip
