"""Causal graphs as networkx graphs and as GraphML."""

from __future__ import annotations

import dataclasses
import io
import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..._extras import extra

with extra("circuits", "A networkx graph"):
    import networkx as nx

from ..._json import load_json
from ...errors import InvalidArgumentError
from .parts import Edge, given, merged

if TYPE_CHECKING:
    from . import CausalGraph

__all__ = ["from_graphml", "from_networkx", "to_graphml", "to_networkx"]

_PLACES = ("kind", "layer", "head", "expert", "position", "span")
# Fields that GraphML holds as JSON, because its values are texts and numbers.
_AS_JSON = ("versions", "notes")


def to_networkx(graph: CausalGraph, merge: bool) -> Any:
    """See `causal_graph.CausalGraph.to_networkx`."""
    if not merge:
        return _filled(nx.MultiDiGraph(), graph, lambda edge: {"key": edge.input or ""})
    edges = tuple(merged(graph.edges))
    return _filled(nx.DiGraph(), dataclasses.replace(graph, edges=edges), lambda _: {})


def _filled(made: Any, graph: CausalGraph, key: Callable[[Edge], dict[str, str]]) -> Any:
    record = graph.to_dict()
    made.graph.update({name: record[name] for name in record if name not in ("nodes", "edges")})
    for node in graph.nodes:
        values = given(node)
        places = {name: getattr(node, name) for name in _PLACES}
        values |= {name: value for name, value in places.items() if value is not None}
        made.add_node(values.pop("id"), **values)
    for edge in graph.edges:
        values = given(edge)
        made.add_edge(values.pop("source"), values.pop("target"), **key(edge), **values)
    return made


def from_networkx(graph: Any) -> dict[str, Any]:
    """The values of a networkx graph, for `CausalGraph.from_dict`.

    Raises:
        InvalidArgumentError: the graph is not directed.
    """
    if not graph.is_directed():
        raise InvalidArgumentError("the edges of the graph have no direction: give a DiGraph")
    return {
        **graph.graph,
        "nodes": [{**values, "id": node} for node, values in graph.nodes(data=True)],
        "edges": [
            {**values, "source": source, "target": target}
            for source, target, values in graph.edges(data=True)
        ],
    }


def to_graphml(graph: CausalGraph) -> str:
    """The graph as GraphML."""
    # The ids of edges are unique, as some programs expect.
    made = _filled(nx.MultiDiGraph(), graph, lambda edge: {"key": edge.id})
    made.graph.update(
        {name: json.dumps(made.graph[name]) for name in _AS_JSON if name in made.graph}
    )
    return "\n".join(nx.generate_graphml(made)) + "\n"


def from_graphml(text: bytes) -> dict[str, Any]:
    """The values of a GraphML file, for `CausalGraph.from_dict`.

    Raises:
        InvalidArgumentError: its graph has no direction.
        Exception: it is no GraphML; the parsers raise many kinds.
    """
    made = nx.read_graphml(io.BytesIO(text), edge_key_type=str, force_multigraph=True)
    for name in _AS_JSON:
        if isinstance(made.graph.get(name), str):
            made.graph[name] = load_json(made.graph[name])
    return from_networkx(made)
