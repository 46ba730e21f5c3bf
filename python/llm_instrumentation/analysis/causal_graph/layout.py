"""Where the nodes and edges of a causal graph stand in a drawing.

Layers stand above each other, and every edge leads upwards. An edge across several rows has a
place of its own in each of them, so it passes beside the nodes there. The order within the rows
comes from sweeps that move each place to the mean of its neighbours (Sugiyama's method).
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from ...errors import InvalidArgumentError
from .parts import INPUTS, Edge, EdgeInput, Node, split_span

if TYPE_CHECKING:
    from . import CausalGraph

__all__ = [
    "HEADING", "HEIGHT", "LETTERS", "MOST_EDGES", "Drawing", "DrawnEdge", "DrawnNode", "draw",
]  # fmt: skip

#: More edges than these cannot be told apart.
MOST_EDGES = 300

# Points, as all lengths here.
HEIGHT, LETTERS = 14.0, 7.0  # of a node, and of the letters q, k and v below its name
HEADING = 16.0  # of the names of columns, below all nodes
_CHARACTER, _PADDING = 4.7, 11.0  # of a node's width
_NODE_GAP, _EDGE_GAP, _COLUMN_GAP = 9.0, 6.0, 18.0
_TALLEST, _ROW_GAP, _LEAST_GAP = 600.0, 30.0, 15.0
_LONGEST = 28  # characters of a name
_STRETCH = 3.0  # times that distances may grow to fill a width
_SWEEPS, _MOVES = 12, 24


@dataclasses.dataclass(frozen=True)
class DrawnNode:
    """A box: its centre, its size, the inputs that edges enter, and its text."""

    node: Node
    x: float
    y: float
    width: float
    height: float
    letters: tuple[EdgeInput, ...]
    text: str

    def port(self, letter: EdgeInput) -> float:
        """Where on the lower side the edges into an input end."""
        return self.x + _port(letter, self.width)


@dataclasses.dataclass(frozen=True)
class DrawnEdge:
    """A line: its points from the source to the target. It is vertical at each of them."""

    edge: Edge
    points: tuple[tuple[float, float], ...]


@dataclasses.dataclass(frozen=True)
class Drawing:
    """A drawing; x to the right and y upwards, from 0.

    Attributes:
        width, height: of all of it.
        nodes, edges: its boxes and lines.
        bands: the lower and upper end of each layer, and its name; empty if rows are no layers.
        columns: the left and right end of each position or span, and its name; empty if nodes have
            none.
    """

    width: float
    height: float
    nodes: tuple[DrawnNode, ...]
    edges: tuple[DrawnEdge, ...]
    bands: tuple[tuple[float, float, str], ...]
    columns: tuple[tuple[float, float, str], ...]


def label(name: str) -> str:
    """A name, without the middle of a long one."""
    if len(name) <= _LONGEST:
        return name
    half = (_LONGEST - 1) // 2
    return f"{name[:half]}…{name[-half:]}"


def draw(graph: CausalGraph, least: float = 0.0) -> Drawing:
    """Places the nodes and edges of a graph.

    Args:
        graph: the graph.
        least: the width to fill, in points. A narrower drawing is stretched, as far as its rows
            have different places. Boxes keep their size.

    Raises:
        InvalidArgumentError: it has no nodes, or more than `MOST_EDGES` edges.
    """
    if not graph.nodes:
        raise InvalidArgumentError("the graph has no nodes, so there is nothing to draw")
    if len(graph.edges) > MOST_EDGES:
        raise InvalidArgumentError(
            f"{len(graph.edges):,} edges cannot be told apart: draw at most {MOST_EDGES}, as those "
            "of graph.pruned(top_k=60)"
        )
    grid = _Grid(graph, _rows(graph), _columns(graph))
    grid.sort_rows()
    if grid.names:
        grid.place_in_columns()
    else:
        grid.place()
    grid.stretch(least)
    return grid.drawing()


# ---- rows -----------------------------------------------------------------------------------


def _rows(graph: CausalGraph) -> dict[str, int]:
    """The row of each node, from 0 at the bottom."""
    named = {node.id: _named_row(node) for node in graph.nodes if node.kind != "module"}
    if len(named) == len(graph.nodes) and all(
        named[edge.source] < named[edge.target] for edge in graph.edges
    ):
        places = sorted(set(named.values()))
        return {name: places.index(place) for name, place in named.items()}
    # The names do not tell the order: the row is the number of nodes on the longest path to it.
    deep = {node.id: 0 for node in graph.nodes}
    for edge in graph.edges:  # sorted by the order of execution of their sources
        deep[edge.target] = max(deep[edge.target], deep[edge.source] + 1)
    top = max(deep.values())
    return {node.id: top if node.kind == "logits" else deep[node.id] for node in graph.nodes}


def _named_row(node: Node) -> tuple[float, int]:
    """The layer, and the part of the layer."""
    ends = {"input": -1.0, "logits": math.inf}
    return ends.get(node.kind, float(node.layer or 0)), int(node.kind in ("mlp", "expert"))


# ---- columns --------------------------------------------------------------------------------


def _columns(graph: CausalGraph) -> list[str]:
    """The positions or spans of the nodes, from left to right; empty if a node has none.

    `CausalGraph.notes` may tell their order, as "spans".
    """
    names = dict.fromkeys(split_span(node.id)[1] for node in graph.nodes)
    found = [name for name in names if name is not None]
    if len(found) < len(names):
        return []
    noted = graph.notes.get("spans")
    order = [str(name) for name in noted] if isinstance(noted, list) else []
    place = {name: at for at, name in enumerate(order)}

    def key(name: str) -> tuple[int, int, str]:
        number = int(name) if name.lstrip("-").isdigit() else 0
        return place.get(name, len(place)), number, name

    return sorted(found, key=key)


def _heading(graph: CausalGraph, name: str) -> str:
    """The name of a column, with the text of its tokens if `CausalGraph.notes` have it."""
    tokens = graph.notes.get("tokens")
    text = tokens.get(name) if isinstance(tokens, dict) else None
    return label(name if text is None else f"{name}: {str(text).strip()}")


# ---- places ---------------------------------------------------------------------------------


def _port(letter: EdgeInput, width: float) -> float:
    return (INPUTS.index(letter) - 1) * width * 0.3


class _Item(NamedTuple):
    """What needs room in a row: a node, or an edge on its way across."""

    row: int
    width: float
    node: Node | None
    column: float = 0.0


class _Link(NamedTuple):
    """A part of an edge from an item to one in the next row."""

    lower: int
    upper: int
    shift: float  # of its end from the middle of the upper item
    weight: float  # how much it wants to be vertical


class _Grid:
    """The rows with their items, first in an order and then at places."""

    def __init__(self, graph: CausalGraph, rows: Mapping[str, int], columns: Sequence[str]) -> None:
        self._graph, self._rows_of, self.names = graph, rows, columns
        self._letters: dict[str, set[EdgeInput]] = defaultdict(set)
        for edge in graph.edges:
            if edge.input:
                self._letters[edge.target].add(edge.input)
        self._texts = [
            label(split_span(node.id)[0] if columns else node.id) for node in graph.nodes
        ]
        place = {name: float(at) for at, name in enumerate(columns)}
        self._items = [
            _Item(
                rows[node.id],
                _width(text),
                node,
                place[str(split_span(node.id)[1])] if place else 0,
            )
            for node, text in zip(graph.nodes, self._texts, strict=True)
        ]
        self._ends_of_columns: list[tuple[float, float]] = []
        self._at = {node.id: at for at, node in enumerate(graph.nodes)}
        self._paths: list[list[int]] = []
        self._below: dict[int, list[_Link]] = defaultdict(list)
        self._above: dict[int, list[_Link]] = defaultdict(list)
        for edge in graph.edges:
            self._add(edge)
        self._order: list[list[int]] = [[] for _ in range(1 + max(rows.values()))]
        for at, item in enumerate(self._items):
            self._order[item.row].append(at)
        self._x = [0.0] * len(self._items)

    def _add(self, edge: Edge) -> None:
        source, target = self._at[edge.source], self._at[edge.target]
        between = range(self._items[source].row + 1, self._items[target].row)
        first = len(self._items)
        begin, end = self._items[source], self._items[target]
        self._items += [
            _Item(
                row, 0.0, None,
                begin.column
                + (end.column - begin.column) * (row - begin.row) / (end.row - begin.row),
            )
            for row in between
        ]  # fmt: skip
        path = [source, *range(first, len(self._items)), target]
        self._paths.append(path)
        for lower, upper in itertools.pairwise(path):
            ends = sum(at < len(self._at) for at in (lower, upper))
            shift = 0.0
            if upper == target and edge.input:
                shift = _port(edge.input, self._items[target].width)
            link = _Link(lower, upper, shift, (8.0, 2.0, 1.0)[ends])
            self._above[lower].append(link)
            self._below[upper].append(link)

    # ---- the order within the rows --------------------------------------------------------

    def sort_rows(self) -> None:
        """Sorts the items of each row so that few edges cross."""
        place = {at: float(k) for row in self._order for k, at in enumerate(row)}
        best, fewest = [list(row) for row in self._order], self._crossings(place)
        for sweep in range(_SWEEPS):
            upwards = sweep % 2 == 0
            for row in self._order if upwards else reversed(self._order):
                self._sort(row, place, upwards)
            crossings = self._crossings(place)
            if crossings < fewest:
                best, fewest = [list(row) for row in self._order], crossings
        self._order = best

    def _sort(self, row: list[int], place: dict[int, float], upwards: bool) -> None:
        """Sorts a row by the mean place of the neighbours in the row before."""

        def wanted(at: int) -> float:
            if upwards:
                ends = [place[link.lower] for link in self._below[at]]
            else:
                ends = [place[link.upper] + link.shift / 1e3 for link in self._above[at]]
            return sum(ends) / len(ends) if ends else place[at]

        row.sort(key=lambda at: (self._items[at].column, wanted(at)))
        place.update((at, float(k)) for k, at in enumerate(row))

    def _crossings(self, place: Mapping[int, float]) -> int:
        """How many pairs of links cross."""
        count = 0
        for row in self._order:
            ends = sorted(
                (place[at], place[link.upper] + link.shift / 1e3)
                for at in row
                for link in self._above[at]
            )
            seen: list[float] = []
            for _, end in ends:
                count += len(seen) - bisect.bisect_right(seen, end)
                bisect.insort(seen, end)
        return count

    # ---- places ---------------------------------------------------------------------------

    def place(self) -> None:
        """Gives each item its x. Edges are as vertical as the order and the widths allow."""
        for row in self._order:
            self._settle(row, lambda _: ())
        for move in range(_MOVES):
            for row in self._order:
                self._settle(row, self._below.__getitem__)
            for row in reversed(self._order):
                self._settle(row, self._above.__getitem__)
            if move >= _MOVES // 2:
                for row in self._order:
                    self._settle(row, lambda at: (*self._below[at], *self._above[at]))

    def place_in_columns(self) -> None:
        """Gives each item its x in the middle of its column, side by side with others there."""
        cells: dict[tuple[int, int], list[int]] = defaultdict(list)
        for number, row in enumerate(self._order):
            for at in row:
                cells[number, round(self._items[at].column)].append(at)
        widths = [0.0] * len(self.names)
        for (_, column), items in cells.items():
            widths[column] = max(widths[column], self._offsets(items)[1])
        left = 0.0
        for width in widths:
            self._ends_of_columns.append((left, left + width + _COLUMN_GAP))
            left += width + _COLUMN_GAP
        for (_, column), items in cells.items():
            offsets, across = self._offsets(items)
            middle = sum(self._ends_of_columns[column]) / 2
            for at, offset in zip(items, offsets, strict=True):
                self._x[at] = middle - across / 2 + offset

    def _offsets(self, items: Sequence[int]) -> tuple[list[float], float]:
        """The centres of items side by side, from the left end of the first, and their width."""
        offsets: list[float] = []
        across = 0.0
        before: _Item | None = None
        for item in (self._items[at] for at in items):
            if before is not None:
                across += _NODE_GAP if item.node and before.node else _EDGE_GAP
            before = item
            offsets.append(across + item.width / 2)
            across += item.width
        return offsets, across

    def _settle(self, row: list[int], links: Callable[[int], Iterable[_Link]]) -> None:
        """Moves the items of a row to where their links are vertical, as far as they have room."""
        wanted, weights = [], []
        for at in row:
            ends = [
                (self._x[link.lower] - link.shift, link.weight)
                if link.upper == at
                else (self._x[link.upper] + link.shift, link.weight)
                for link in links(at)
            ]
            total = sum(weight for _, weight in ends)
            wanted.append(sum(x * weight for x, weight in ends) / total if ends else self._x[at])
            weights.append(total or 0.1)
        room = [0.0]
        for left, right in itertools.pairwise(row):
            a, b = self._items[left], self._items[right]
            gap = _NODE_GAP if a.node and b.node else _EDGE_GAP
            room.append(room[-1] + (a.width + b.width) / 2 + gap)
        free = [x - before for x, before in zip(wanted, room, strict=True)]
        for at, x, before in zip(row, _rising(free, weights), room, strict=True):
            self._x[at] = x + before

    def stretch(self, least: float) -> None:
        """Moves the items apart, so that they are about as wide as ``least`` points."""
        left, right = self._ends()
        span = max(self._x) - min(self._x)
        if right - left < least and span:
            factor = min(_STRETCH, 1 + (least - (right - left)) / span)
            self._x = [x * factor for x in self._x]
            self._ends_of_columns = [(a * factor, b * factor) for a, b in self._ends_of_columns]

    # ---- the result -----------------------------------------------------------------------

    def _ends(self) -> tuple[float, float]:
        """The left and the right end of all items."""
        if self._ends_of_columns:
            return self._ends_of_columns[0][0], self._ends_of_columns[-1][1]
        items = list(zip(self._x, self._items, strict=True))
        return min(x - item.width / 2 for x, item in items), max(
            x + item.width / 2 for x, item in items
        )

    def drawing(self) -> Drawing:
        """The boxes and lines at their places."""
        left, right = self._ends()
        heights = [HEIGHT] * len(self._order)
        for name in self._letters:
            heights[self._rows_of[name]] = HEIGHT + LETTERS
        gaps = len(heights) - 1
        gap = max(_LEAST_GAP, min(_ROW_GAP, (_TALLEST - sum(heights)) / gaps)) if gaps else 0.0
        bottoms = [sum(heights[:row]) + gap * row for row in range(len(heights))]
        nodes = []
        for at, node in enumerate(self._graph.nodes):
            letters = tuple(letter for letter in INPUTS if letter in self._letters[node.id])
            row, height = self._rows_of[node.id], HEIGHT + (LETTERS if letters else 0.0)
            y = bottoms[row] + heights[row] / 2
            nodes.append(
                DrawnNode(
                    node,
                    self._x[at] - left,
                    y,
                    self._items[at].width,
                    height,
                    letters,
                    self._texts[at],
                )
            )
        lines = [
            [
                (self._x[at] - left, y)
                for at in path[1:-1]
                for y in (
                    bottoms[self._items[at].row],
                    bottoms[self._items[at].row] + heights[self._items[at].row],
                )
            ]
            for path in self._paths
        ]
        return Drawing(
            right - left, bottoms[-1] + heights[-1], tuple(nodes),
            self._with_ends(nodes, lines), self._bands(bottoms, heights, gap),
            tuple(
                (a - left, b - left, _heading(self._graph, name))
                for (a, b), name in zip(self._ends_of_columns, self.names, strict=True)
            ),
        )  # fmt: skip

    def _with_ends(
        self, nodes: Sequence[DrawnNode], lines: Sequence[list[tuple[float, float]]]
    ) -> tuple[DrawnEdge, ...]:
        """The edges with their first and last points, side by side on the sides of the nodes."""
        leaving: dict[int, list[tuple[float, int]]] = defaultdict(list)
        entering: dict[int, list[tuple[float, int]]] = defaultdict(list)
        for at, (path, line) in enumerate(zip(self._paths, lines, strict=True)):
            source, target = nodes[path[0]], nodes[path[-1]]
            leaving[path[0]].append((line[0][0] if line else target.x, at))
            if not self._graph.edges[at].input:
                entering[path[-1]].append((line[-1][0] if line else source.x, at))
        starts = _side_by_side(nodes, leaving)
        ends = _side_by_side(nodes, entering)
        drawn = []
        for at, edge in enumerate(self._graph.edges):
            source, target = nodes[self._paths[at][0]], nodes[self._paths[at][-1]]
            end = target.port(edge.input) if edge.input else ends[at]
            first = starts[at], source.y + source.height / 2
            last = end, target.y - target.height / 2
            drawn.append(DrawnEdge(edge, (first, *lines[at], last)))
        return tuple(drawn)

    def _bands(
        self, bottoms: Sequence[float], heights: Sequence[float], gap: float
    ) -> tuple[tuple[float, float, str], ...]:
        """The layers as bands of rows, if each row has nodes of one layer, in rising order."""
        of_rows: dict[int, set[int | None]] = defaultdict(set)
        for node in self._graph.nodes:
            of_rows[self._rows_of[node.id]].add(node.layer)
        layers = [of_rows[row].pop() if len(of_rows[row]) == 1 else None for row in sorted(of_rows)]
        known = [layer for layer in layers if layer is not None]
        if known != sorted(known) or None in layers[1:-1]:
            return ()
        bands = []
        for layer in sorted(set(known)):
            first, last = layers.index(layer), len(layers) - 1 - layers[::-1].index(layer)
            end = bottoms[last] + heights[last] + gap / 2
            bands.append((bottoms[first] - gap / 2, end, f"layer {layer}"))
        return tuple(bands)


def _width(text: str) -> float:
    return _PADDING + _CHARACTER * max(3, len(text))


def _side_by_side(
    nodes: Sequence[DrawnNode], lines: Mapping[int, list[tuple[float, int]]]
) -> dict[int, float]:
    """Where each edge meets its node, so that the edges of a node do not cross there.

    Args:
        nodes: the boxes.
        lines: for each node the x that a line comes from or goes to, and the number of its edge.
    """
    found = {}
    for at, ends in lines.items():
        node, count = nodes[at], len(ends)
        apart = min(node.width * 0.75 / count, 7.0)
        for k, (_, edge) in enumerate(sorted(ends)):
            found[edge] = node.x + (k - (count - 1) / 2) * apart
    return found


def _rising(values: Sequence[float], weights: Sequence[float]) -> list[float]:
    """The rising numbers with the least weighted sum of squared distances from the values."""
    pools: list[tuple[float, float, int]] = []  # mean, weight, number of values
    for value, weight in zip(values, weights, strict=True):
        pool = (value, weight, 1)
        while pools and pools[-1][0] > pool[0]:
            mean, before, count = pools.pop()
            total = before + pool[1]
            pool = ((mean * before + pool[0] * pool[1]) / total, total, count + pool[2])
        pools.append(pool)
    return [mean for mean, _, count in pools for _ in range(count)]
