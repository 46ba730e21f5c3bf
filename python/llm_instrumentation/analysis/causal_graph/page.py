"""Causal graphs on pages: an SVG that needs no script, and what is known of each node and edge."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from typing import TYPE_CHECKING

from ..._pages import page, units
from ._look import LOOKS, WIDEST, largest_effect, look_of, title, width
from ._notebook import why_wide
from .layout import HEADING, HEIGHT, LETTERS, Drawing, DrawnEdge, DrawnNode, draw
from .parts import Edge, Node

if TYPE_CHECKING:
    from . import CausalGraph

__all__ = ["graph_page", "graph_parts"]

_GENERATOR = "llm_instrumentation causal graph"
_SIDE, _BAND, _LEGEND = 6.0, 40.0, 24.0  # points: margins, the names of layers, the legend
_LEAST = 290.0  # points: the width of the legend
_POINTS_PER_IN = 58  # so that letters of the drawing have the size of those in tables
_SHOWN = 30  # rows of the table of edges; the others are folded

# `:has` finds what the pointer or the focus is on, and dims everything else.
_STYLE = """
.causal .e { fill: none }
.causal .near { stroke: transparent; stroke-width: 9 }
.causal text { fill: var(--ink); font-size: 7.5px; text-anchor: middle }
.causal .muted { fill: var(--muted) } .causal .start { text-anchor: start }
.causal rect { fill: var(--surface); stroke: var(--muted); stroke-width: .7 }
.causal .band { fill: var(--grid); stroke: none; opacity: .55 }
.causal .rule { stroke: var(--grid); stroke-width: .8; fill: none }
.causal a { text-decoration: none }
.causal a:is(:hover, :focus-visible) rect { stroke: var(--ink); stroke-width: 1.8 }
.causal a:focus { outline: none }
.causal:has(.e:hover) .e:not(:hover) { opacity: .12 }
.part:target { outline: 2px solid var(--muted); outline-offset: 4px; border-radius: 2px }
"""


def graph_page(graph: CausalGraph) -> str:
    """A page about a graph. It needs no other file, no script and no network.

    Raises:
        InvalidArgumentError: the graph has no nodes, or more edges than can be told apart.
        MissingExtraError: pandas or matplotlib is not installed; the extra "report" brings both.
    """
    heading = title(graph)
    counts = f"{len(graph.nodes):,} nodes, {len(graph.edges):,} edges"
    head = f"<header><h1>{escape(heading)}</h1>{page.paragraph(counts, 'sub')}</header>"
    return page.page(heading, "\n".join([head, *graph_parts(graph)]), generator=_GENERATOR)


def graph_parts(graph: CausalGraph, name: str = "graph", *, level: int = 2) -> Iterator[str]:
    """The parts of a page about a graph: the drawing, the edges, the nodes, and where it is from.

    Args:
        graph: the graph.
        name: begins the anchors of the nodes. Graphs on one page need different ones.
        level: of the headings.

    Raises:
        InvalidArgumentError: the graph has no nodes, or more edges than can be told apart.
    """
    made = draw(graph, _LEAST - _BAND - _SIDE)
    svg, across = _svg(graph, made, name)
    yield page.paragraph(
        "Edges lead upwards, and enter a head at q, k or v. Point at a node or an edge to see it "
        "alone. A node links to its edges below."
    )
    yield page.figure(svg, width_in=across / _POINTS_PER_IN)
    ranked = sorted(graph.edges, key=lambda edge: -abs(edge.effect or 0.0))
    if why := why_wide(graph, ranked[:_SHOWN] or graph.nodes):
        yield page.paragraph(f"{why[:1].upper()}{why[1:]}.")
    shown, others = _edges(ranked[:_SHOWN]), _edges(ranked[_SHOWN:])
    more = f"{len(ranked) - _SHOWN:,} edges with smaller effects"
    nodes = (_node(graph, at, name) for at in range(len(graph.nodes)))
    yield page.section("Edges", shown, page.details(more, others), level=level)
    yield page.section("Nodes", *nodes, level=level)
    yield page.section(
        "How the effects were measured", page.definitions(_facts(graph)), level=level
    )


# ---- the drawing ----------------------------------------------------------------------------


def _svg(graph: CausalGraph, made: Drawing, name: str) -> tuple[str, float]:
    """The drawing as an SVG element, and its width in points."""
    left = _BAND if made.bands else _SIDE
    across = left + made.width + _SIDE
    spare = max(0.0, _LEAST - across)
    left, across = left + spare / 2, across + spare
    below = _SIDE + (HEADING if made.columns else 0.0)
    up = made.height + _LEGEND + _SIDE + below
    place = {node.id: at for at, node in enumerate(graph.nodes)}
    largest = largest_effect(graph.edges)
    rules = "".join(
        f".causal:has(.{name}-{at}:is(:hover,:focus-visible)) .e:not(.to-{name}-{at})"
        "{opacity:.12}\n"
        for at in place.values()
    )
    wide_first = sorted(made.edges, key=lambda drawn: -width(drawn.edge, largest))
    parts = [
        f"<style>{_STYLE}{rules}</style>",
        f'<g transform="translate(0 {_SIDE + 9:g})">{_legend(graph, largest)}</g>',
        f'<g transform="translate({left:g} {up - below:g})">',
        *(_band(band, left, across, at % 2 == 0) for at, band in enumerate(made.bands)),
        *(_column(column, made.height, at > 0) for at, column in enumerate(made.columns)),
        *(_line(drawn, width(drawn.edge, largest), place, name) for drawn in wide_first),
        *(_box(drawn, place[drawn.node.id], name) for drawn in made.nodes),
        "</g>",
    ]
    told = escape(f"{title(graph)}: {len(graph.nodes)} nodes and {len(graph.edges)} edges")
    svg = (
        f'<svg class="causal" role="group" aria-label="{told}" viewBox="0 0 {across:g} {up:g}">'
        f"{''.join(parts)}</svg>"
    )
    return svg, across


def _band(band: tuple[float, float, str], left: float, across: float, shaded: bool) -> str:
    low, high, name = band
    shade = (
        f'<rect class="band" x="{-left:g}" y="{-high:.1f}" width="{across:g}" '
        f'height="{high - low:.1f}"/>'
        if shaded
        else ""
    )
    return (
        f'{shade}<text class="muted start" x="{3 - left:g}" y="{2.5 - (low + high) / 2:.1f}">'
        f"{escape(name)}</text>"
    )


def _column(column: tuple[float, float, str], height: float, ruled: bool) -> str:
    first, last, name = column
    rule = f'<path class="rule" d="M{first:.1f} {HEADING:g}V{-height:.1f}"/>' if ruled else ""
    return (
        f'{rule}<text class="muted" x="{(first + last) / 2:.1f}" y="{HEADING / 2 + 4:g}">'
        f"{escape(name)}</text>"
    )


def _line(drawn: DrawnEdge, points: float, place: dict[str, int], name: str) -> str:
    (x, y), *_ = drawn.points
    path = f"M{x:.1f} {-y:.1f}"
    for (x0, y0), (x1, y1) in itertools.pairwise(drawn.points):
        middle = -(y0 + y1) / 2  # both ends are vertical
        path += f"C{x0:.1f} {middle:.1f} {x1:.1f} {middle:.1f} {x1:.1f} {-y1:.1f}"
    edge = drawn.edge
    ends = f"to-{name}-{place[edge.source]} to-{name}-{place[edge.target]}"
    return (
        f'<g class="e {ends}"><title>{escape(_told(edge))}</title>'
        f'<path class="near" d="{path}"/>{_stroke(look_of(edge), points, path)}</g>'
    )


def _stroke(name: str, points: float, path: str) -> str:
    look = LOOKS[name]
    dashes = f' stroke-dasharray="{3 * points:.1f} {1.2 * points:.1f}"' if look.dashed else ""
    return f'<path d="{path}" stroke="var({look.variable})" stroke-width="{points:.2f}"{dashes}/>'


def _box(drawn: DrawnNode, at: int, name: str) -> str:
    top = -drawn.y - drawn.height / 2
    letters = "".join(
        f'<text class="muted" x="{drawn.port(letter):.1f}" y="{top + HEIGHT + LETTERS / 2:.1f}">'
        f"{letter}</text>"
        for letter in drawn.letters
    )
    name_y = top + HEIGHT / 2 + 2.6
    told = drawn.node.id if drawn.node.effect is None else f"{drawn.node.id}: {_effect(drawn.node)}"
    return (
        f'<a class="{name}-{at}" href="#{name}-{at}" aria-label="{escape(drawn.node.id)}">'
        f"<title>{escape(told)}</title>"
        f'<rect x="{drawn.x - drawn.width / 2:.1f}" y="{top:.1f}" width="{drawn.width:.1f}" '
        f'height="{drawn.height:.1f}" rx="3"/>'
        f'<text x="{drawn.x:.1f}" y="{name_y:.1f}">{escape(drawn.text)}</text>'
        f"{letters}</a>"
    )


def _legend(graph: CausalGraph, largest: float) -> str:
    """The looks that the drawing has, and the effect of the widest line."""
    used = {look_of(edge) for edge in graph.edges}
    parts, x = [], _SIDE
    for name, look in LOOKS.items():
        if name in used:
            parts.append(_stroke(name, 2.0, f"M{x:g} -2.5h16"))
            parts.append(f'<text class="start" x="{x + 20:g}">{look.told}</text>')
            x += 32 + 3.7 * len(look.told)
    if largest:
        told = f"absolute effect {largest:.3g}"
        line = f"M{x:g} -2.5h16"
        parts.append(f'<path d="{line}" stroke="var(--muted)" stroke-width="{WIDEST}"/>')
        parts.append(f'<text class="start" x="{x + 20:g}">{told}</text>')
    return "".join(parts)


# ---- tables ---------------------------------------------------------------------------------


def _edges(edges: Sequence[Edge]) -> str:
    told = [any(_extras(edge)[at] for edge in edges) for at in range(2)]
    heads = [head for head, there in zip(("interval", "p"), told, strict=True) if there]
    rows = [
        [_arrow(edge), _effect(edge), *itertools.compress(_extras(edge), told)] for edge in edges
    ]
    return page.listing(["edge", "effect", *heads], rows)


def _node(graph: CausalGraph, at: int, name: str) -> str:
    """A node, folded with its edges. A link to the anchor within unfolds it."""
    node = graph.nodes[at]
    edges = [edge for edge in graph.edges if node.id in (edge.source, edge.target)]
    entering = sum(edge.target == node.id for edge in edges)
    counts = f"{entering} in, {len(edges) - entering} out"
    interval, p_value = _extras(node)
    facts = [
        ("effect", _effect(node) if node.effect is not None else None),
        ("interval", interval), ("p", p_value), ("kind", node.kind), ("layer", node.layer),
        ("head", node.head), ("expert", node.expert), ("position", node.position),
        ("span", node.span),
    ]  # fmt: skip
    inner = page.definitions(facts) + _edges(edges)
    return page.details(
        f"{node.id} ({counts})", f'<div class="part" id="{name}-{at}">{inner}</div>'
    )


def _facts(graph: CausalGraph) -> Iterable[tuple[str, object]]:
    about = graph.to_dict()
    names = ("model", "metric", "method", "clean", "corrupted", "examples", "versions", "notes")
    return [(name, about.get(name)) for name in names]


def _arrow(edge: Edge) -> str:
    return f"{edge.source} → {edge.target}" + (f" ({edge.input})" if edge.input else "")


def _told(edge: Edge) -> str:
    return f"{_arrow(edge)}: {_effect(edge)}"


def _effect(part: Node | Edge) -> str:
    return units.UNKNOWN if part.effect is None else f"{part.effect:+.4g}"


def _extras(part: Node | Edge) -> tuple[str, str]:
    interval = "" if part.low is None else f"{part.low:+.4g} to {part.high:+.4g}"
    return interval, "" if part.p_value is None else f"{part.p_value:.3g}"
