"""Causal graphs: which parts of a model act on which, and by how much, as data::

    graph = load_graph("ioi.json")
    circuit = graph.pruned(top_k=60)         # the 60 largest effects, as far as they are connected
    circuit.plot()
    save_graph(circuit, "circuit.graphml")   # or .json, .dot, .html

A node is a part of the model, an edge what one part passes on to another. An effect is a metric
with an intervention minus the metric without it, so it is a cause and no correlation. This module
runs no model.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..._extras import extra
from ..._json import plain
from ...errors import CorruptError, InvalidArgumentError
from . import _files, _pruning
from ._order import execution_order
from ._overlap import GraphOverlap, edge_auroc, overlap
from .parts import Edge, EdgeInput, EdgeKey, Node, NodeKind, chosen, finite, given

if TYPE_CHECKING:
    import networkx as nx
    import pandas as pd
    from matplotlib.axes import Axes

__all__ = [
    "CausalGraph",
    "Edge",
    "EdgeInput",
    "EdgeKey",
    "GraphOverlap",
    "Node",
    "NodeKind",
    "edge_auroc",
    "load_graph",
    "overlap",
    "save_graph",
    "save_neuronpedia",
]


@dataclasses.dataclass(frozen=True, repr=False)
class CausalGraph:
    """Nodes and edges of a model with their effects, and what these were measured with.

    Two graphs are equal if all their fields are. The order in which nodes and edges are given does
    not count.

    Attributes:
        nodes: in an order in which every edge leads to a later node; layer by layer where the names
            tell it.
        edges: by source, then by target, then by input.
        model: the model's name.
        metric: what the effects are effects on, as "logit difference".
        method: how the effects were measured, as "EAP-IG, 5 steps".
        clean: the metric of the model without interventions, the mean over the examples.
        corrupted: the metric with all of the interventions at once, or of the corrupted examples.
        examples: the number of examples.
        versions: of packages, by name.
        notes: anything else that JSON can hold; NaN becomes None, tuples become lists. Drawings of
            graphs whose nodes are all at positions or spans have a column for each of these, in the
            order of a list "spans", with the texts of a dict "tokens" by position or span.

    Raises:
        InvalidArgumentError: (a ValueError) two nodes or two edges are the same; an edge leads from
            or to a node that is not there; the edges form a cycle; a value is out of its range.
    """

    nodes: tuple[Node, ...]
    edges: tuple[Edge, ...] = ()
    model: str | None = None
    metric: str | None = None
    method: str | None = None
    clean: float | None = None
    corrupted: float | None = None
    examples: int | None = None
    versions: Mapping[str, str] = dataclasses.field(default_factory=dict)
    notes: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        nodes, edges = list(self.nodes), list(self.edges)
        _check_parts(nodes, edges)
        ordered = execution_order(nodes, edges)
        place = {node.id: at for at, node in enumerate(ordered)}
        edges.sort(key=lambda edge: (place[edge.source], place[edge.target], edge.input or ""))
        self._set(nodes=tuple(ordered), edges=tuple(edges))
        for name in ("model", "metric", "method"):
            self._set(**{name: _text(getattr(self, name), name)})
        for name in ("clean", "corrupted"):
            self._set(**{name: finite(getattr(self, name), name)})
        self._set(examples=_count(self.examples), versions=_texts(self.versions))
        self._set(notes=_notes(self.notes))

    def _set(self, **fields: Any) -> None:
        for name, value in fields.items():
            object.__setattr__(self, name, value)

    def __repr__(self) -> str:
        of = f" of {self.model}" if self.model else ""
        on = f", effects on {self.metric}" if self.metric else ""
        counts = f"{_counted(len(self.nodes), 'node')}, {_counted(len(self.edges), 'edge')}"
        return f"<CausalGraph{of}: {counts}{on}>"

    def _repr_html_(self) -> str:
        from ._notebook import graph_html

        return graph_html(self)

    # ---- parts ------------------------------------------------------------------------------

    @property
    def inputs(self) -> tuple[Node, ...]:
        """The nodes where paths begin: ``input``, or else all that no edge leads to."""
        return self._ends("input", "source", "target")

    @property
    def outputs(self) -> tuple[Node, ...]:
        """The nodes where paths end: ``logits``, or else all that no edge leads from."""
        return self._ends("logits", "target", "source")

    def _ends(self, kind: NodeKind, end: str, other: str) -> tuple[Node, ...]:
        """The nodes of a kind, or else those that are at one end of edges only."""
        named = tuple(node for node in self.nodes if node.kind == kind)
        here, there = ({getattr(edge, side) for edge in self.edges} for side in (end, other))
        return named or tuple(node for node in self.nodes if node.id in here - there)

    # ---- pruning ----------------------------------------------------------------------------

    def pruned(
        self,
        *,
        threshold: float | None = None,
        top_k: int | None = None,
        greedy: int | None = None,
    ) -> CausalGraph:
        """The graph of the edges with the largest effects, as far as they are connected.

        Edges are chosen by their absolute effects. Then all edges and nodes go that are on no path
        of chosen edges from an input to an output (`inputs` and `outputs` of this graph). So fewer
        edges than asked for may stay. Of equal effects the first edges of `edges` are chosen.

        Args:
            threshold: choose the edges whose absolute effect is at least this.
            top_k: choose this many edges, the largest ones.
            greedy: choose this many edges one after the other: each time the largest of those that
                lead to an output or to the source of an edge chosen before, as EAP-IG does. So
                every chosen edge is connected to an output.

        Raises:
            InvalidArgumentError: (a ValueError) an edge has no effect; not exactly one of the
                arguments is given, or it is out of its range.
        """
        _pruning.check_choice(threshold=threshold, top_k=top_k, greedy=greedy)
        _pruning.check_effects(self.edges)
        if greedy is not None:
            outputs = [node.id for node in self.outputs]
            edges = _pruning.greedily(self.edges, outputs, greedy)
        else:
            edges = _pruning.largest(self.edges, threshold, top_k)
        return self._connected(self.nodes, edges)

    def pruned_nodes(
        self, *, threshold: float | None = None, top_k: int | None = None
    ) -> CausalGraph:
        """The graph of the nodes with the largest effects, as far as they are connected.

        Nodes are chosen by their absolute effects, and the edges between them stay. Inputs and
        outputs without an effect stay too. Then everything goes that is on no path from an input
        to an output. A graph without edges keeps all chosen nodes.

        Args:
            threshold: choose the nodes whose absolute effect is at least this.
            top_k: choose this many nodes, the largest ones.

        Raises:
            InvalidArgumentError: (a ValueError) a node that is no input and no output has no
                effect; not exactly one of the arguments is given, or it is out of its range.
        """
        _pruning.check_choice(threshold=threshold, top_k=top_k)
        ends = {node.id for node in (*self.inputs, *self.outputs) if node.effect is None}
        measured = [node for node in self.nodes if not (self.edges and node.id in ends)]
        _pruning.check_effects(measured)
        stay = {node.id for node in _pruning.largest(measured, threshold, top_k)} | ends
        nodes = [node for node in self.nodes if node.id in stay]
        edges = [edge for edge in self.edges if edge.source in stay and edge.target in stay]
        if not self.edges:
            return dataclasses.replace(self, nodes=tuple(nodes))
        return self._connected(nodes, edges)

    def _connected(self, nodes: Iterable[Node], edges: Iterable[Edge]) -> CausalGraph:
        """A graph of those of the nodes and edges that are on a path from an input to an output."""
        nodes, edges = list(nodes), list(edges)
        there = {node.id for node in nodes}
        on_paths = _pruning.on_paths(
            edges,
            [node.id for node in self.inputs if node.id in there],
            [node.id for node in self.outputs if node.id in there],
        )
        return dataclasses.replace(
            self,
            nodes=tuple(node for node in nodes if node.id in on_paths),
            edges=tuple(e for e in edges if e.source in on_paths and e.target in on_paths),
        )

    # ---- to and from other things -----------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """The graph as values that JSON has, with the names of the fields. None is left out."""
        about = {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if field.name not in ("nodes", "edges")
        }
        return {
            **{name: plain(value) for name, value in about.items() if value not in (None, {})},
            "nodes": [given(node) for node in self.nodes],
            "edges": [given(edge) for edge in self.edges],
        }

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> CausalGraph:
        """The graph of `to_dict`. Names that are no fields are ignored.

        Raises:
            InvalidArgumentError: (a ValueError) the values are not those of a graph.
        """
        known = {field.name for field in dataclasses.fields(cls)}
        about = {name: value for name, value in record.items() if name in known}
        try:
            about["nodes"] = tuple(Node(**chosen(node, Node)) for node in record["nodes"])
            about["edges"] = tuple(Edge(**chosen(edge, Edge)) for edge in record.get("edges", ()))
            return cls(**about)
        except (AttributeError, KeyError, TypeError, RecursionError) as error:
            raise InvalidArgumentError(f"not the values of a causal graph: {error!r}") from error

    def to_networkx(self, *, merge: bool = False) -> nx.MultiDiGraph[str] | nx.DiGraph[str]:
        """The graph as a `networkx.MultiDiGraph`, whose nodes are the ids.

        Nodes have the attributes ``kind``, ``layer``, ``head``, ``expert``, ``position``, ``span``,
        ``effect``, ``low``, ``high`` and ``p_value``, edges ``input`` and the numbers; those that
        are None are left out. The key of an edge is its input, "" for None.
        `networkx.MultiDiGraph.graph` has the rest.

        Args:
            merge: give a `networkx.DiGraph`, as many algorithms of networkx need. The edges into
                several inputs of a head become one edge. Its effect is the sum of theirs, which
                is the effect of all where effects add up, as those of attribution do.

        Raises:
            InvalidArgumentError: (a ValueError) with `merge` some edges between two nodes have an
                effect, and others have none.
            MissingExtraError: networkx is not installed; the extra "circuits" brings it.
        """
        from ._networkx import to_networkx

        return to_networkx(self, merge)

    @classmethod
    def from_networkx(cls, graph: nx.DiGraph[Any]) -> CausalGraph:
        """The graph of a networkx graph that has the attributes of `to_networkx`.

        Other attributes of nodes and edges are ignored. All but ``effect`` may be missing, and
        that too.

        Raises:
            InvalidArgumentError: (a ValueError) the graph is not directed, or its values are not
                those of a causal graph.
        """
        from ._networkx import from_networkx

        return cls.from_dict(from_networkx(graph))

    def to_dot(self) -> str:
        """The graph in the language of Graphviz, from the bottom to the top.

        Widths tell the absolute effects; negative ones are dashed.
        """
        from ._dot import to_dot

        return to_dot(self)

    def to_pandas(self) -> tuple[pd.DataFrame, pd.DataFrame]:
        """The edges and the nodes as tables.

        Returns:
            the edges (id, source, target, input, effect, low, high, p_value) and the nodes (id,
            kind, layer, head, expert, position, span, effect, low, high, p_value), in the order of
            the graph.
            Numbers that were not measured are NaN.

        Raises:
            MissingExtraError: pandas is not installed; the extra "report" brings it.
        """
        with extra("report", "to_pandas"):
            import pandas as pd

        numbers = dict.fromkeys(("effect", "low", "high", "p_value"), "float64")
        edges = pd.DataFrame(
            [{"id": edge.id, **dataclasses.asdict(edge)} for edge in self.edges],
            columns=["id", "source", "target", "input", *numbers],
        )
        places = ("kind", "layer", "head", "expert", "position", "span")
        nodes = pd.DataFrame(
            [
                {**dataclasses.asdict(node), **{name: getattr(node, name) for name in places}}
                for node in self.nodes
            ],
            columns=["id", *places, *numbers],
        )
        whole = dict.fromkeys(places[1:5], "Int64")
        return edges.astype(numbers), nodes.astype({**numbers, **whole})

    def plot(self, ax: Axes | None = None) -> Axes:
        """Draws the graph from the input at the bottom to the logits at the top.

        The width of an edge tells its absolute effect. Positive ones are blue, negative ones orange
        and dashed, others grey. An edge enters a head at q, k or v. At most 300 edges are drawn. If
        all nodes are at positions or spans, each of these has a column; see `notes`.

        Args:
            ax: the axes to draw to; None makes a figure.

        Raises:
            InvalidArgumentError: (a ValueError) the graph has no nodes, or more edges than can be
                told apart. `pruned` gives a smaller one.
            MissingExtraError: matplotlib is not installed; the extra "report" brings it.
        """
        from ._figure import plot_graph

        return plot_graph(self, ax)


def save_graph(graph: CausalGraph, path: str | os.PathLike[str]) -> Path:
    """Writes a graph in the format that the end of the path names. A file there is replaced.

    ``.json`` and ``.graphml`` hold the whole graph, and `load_graph` reads them. ``.dot`` and
    ``.gv`` are for Graphviz. ``.html`` is a page for browsers, without scripts. The file appears
    when it is complete.

    Args:
        graph: the graph.
        path: the file.

    Returns:
        the path.

    Raises:
        InvalidArgumentError: (a ValueError) the path ends in something else; a page would have more
            edges than can be told apart.
        MissingExtraError: networkx, for GraphML, or pandas and matplotlib, for a page, are not
            installed.
        NoSpaceError, StrapIOError: (an OSError) the file cannot be written.
    """
    return _files.save(graph, Path(path))


def load_graph(path: str | os.PathLike[str]) -> CausalGraph:
    """Reads a ``.json`` or ``.graphml`` file of `save_graph`.

    GraphML of other programs is a graph too if its nodes and edges have the attributes of
    `CausalGraph.to_networkx`.

    Raises:
        NotFoundError: (a FileNotFoundError) there is no such file.
        CorruptError: (a ValueError) the file holds no causal graph.
        UnsupportedError: (a TypeError) a later version wrote the file.
        InvalidArgumentError: (a ValueError) the path ends in something else.
        MissingExtraError: networkx, for GraphML, is not installed.
    """
    record = _files.load(Path(path))
    try:
        return CausalGraph.from_dict(record)
    except InvalidArgumentError as error:
        raise CorruptError(f"{os.fspath(path)} holds no causal graph: {error}") from error


def save_neuronpedia(
    graph: CausalGraph,
    path: str | os.PathLike[str],
    *,
    slug: str,
    scan: str,
    tokens: Iterable[str] = (),
) -> Path:
    """Writes a graph as graph JSON for Neuronpedia, by its schema 1.0.0 of attribution graphs.

    The nodes of `AttributionGraph.pruned` become features of transcoders with activations and
    influences, errors, embeddings, and logits with probabilities. Those of other graphs are parts
    of the model and no features of transcoders. So they have no dashboards, probabilities or
    influences, and the description in the file says so. Edges into several inputs of a head become
    one link with the sum of their effects.

    Args:
        graph: all its edges have an effect.
        path: the file. An existing one is replaced.
        slug: the name of the graph in addresses.
        scan: the id of the model on Neuronpedia, as "gpt2-small".
        tokens: the texts of the tokens of the prompt, by position. Nodes at all positions stand in
            a column of their own behind them. Empty: an attribution graph has its own.

    Returns:
        the path.

    Raises:
        InvalidArgumentError: (a ValueError) an edge has no effect; a node is at a position without
            a token, or at a span; a module has no layer in its name; the slug has other characters
            than letters, digits, "-" and "_".
        NoSpaceError, StrapIOError: (an OSError) the file cannot be written.
    """
    from ._neuronpedia import neuronpedia_record

    record = neuronpedia_record(graph, slug, scan, list(tokens))
    return _files.write_json(Path(path), record)


# ---- checks ---------------------------------------------------------------------------------


def _check_parts(nodes: list[Node], edges: list[Edge]) -> None:
    """
    Raises:
        InvalidArgumentError: a node or edge is there twice; an edge ends at an unknown node.
    """
    known: set[str] = set()
    for node in nodes:
        if node.id in known:
            raise InvalidArgumentError(f"node {node.id!r} is there twice: give each node once")
        known.add(node.id)
    keys: set[EdgeKey] = set()
    for edge in edges:
        for end in (edge.source, edge.target):
            if end not in known:
                raise InvalidArgumentError(
                    f"edge {edge.id!r}: there is no node {end!r}: add it to the nodes"
                )
        if edge.key in keys:
            raise InvalidArgumentError(f"edge {edge.id!r} is there twice: give each edge once")
        keys.add(edge.key)


def _counted(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def _text(value: object, name: str) -> str | None:
    if value is None or (isinstance(value, str) and value.isprintable()):
        return value or None
    raise InvalidArgumentError(f"{name} = {value!r}: give a line of text that can be printed")


def _texts(values: Mapping[str, str]) -> dict[str, str]:
    if not isinstance(values, Mapping) or not all(isinstance(v, str) for v in values.values()):
        raise InvalidArgumentError(f"versions = {values!r}: give a text for each name")
    texts: dict[str, str] = plain(values)
    return texts


def _count(value: object) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not hasattr(value, "__index__") or value.__index__() < 1:
        raise InvalidArgumentError(f"examples = {value!r}: give a number from 1 on, or None")
    number: int = value.__index__()
    return number


def _notes(values: Mapping[str, Any]) -> dict[str, Any]:
    if not isinstance(values, Mapping):
        raise InvalidArgumentError(f"notes = {values!r}: give a dict")
    try:
        notes: dict[str, Any] = plain(values)
    except (TypeError, ValueError) as error:
        raise InvalidArgumentError(f"notes cannot be stored as JSON: {error}") from error
    return notes
