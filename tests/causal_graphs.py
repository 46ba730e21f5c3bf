"""Causal graphs for tests: a small circuit, and graphs that Hypothesis draws."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st
from llm_instrumentation.analysis.causal_graph import CausalGraph, Edge, Node


def induction() -> CausalGraph:
    """A previous-token head and an induction head, as in attention-only models of two layers."""
    return CausalGraph(
        [Node("input"), Node("a0.h3"), Node("a0.h1", effect=0.1), Node("a1.h6"), Node("logits")],
        [
            Edge("input", "a0.h3", "q", effect=0.2),
            Edge("input", "a0.h3", "v", effect=1.5, low=1.25, high=1.75, p_value=0.001),
            Edge("a0.h3", "a1.h6", "k", effect=1.25),
            Edge("input", "a1.h6", "v", effect=0.75),
            Edge("a0.h1", "a1.h6", "q", effect=-0.5),
            Edge("a1.h6", "logits", effect=2.0),
            Edge("input", "logits", effect=-0.125),
        ],
        model="attn-only-2l",
        metric="log probability",
        method="path patching",
        clean=-1.5,
        corrupted=-6.0,
        examples=50,
        versions={"torch": "2.6.0"},
        notes={"prompts": ["A B … A", 'say "<b>" & \\'], "seed": 0},
    )


# What formats may stumble over: quotes, brackets, backslashes, entities, arrows, other scripts.
strange = st.text(st.sampled_from("ab.1\"'<>&;\\[](){}@-|:#$%é漢🦙 \u0301"), min_size=1, max_size=8)
printable = st.text(min_size=1, max_size=6).filter(str.isprintable)
modules = st.one_of(
    strange.filter(str.isprintable),
    printable,
    st.sampled_from(["model.layers.3.self_attn.o_proj", "h.0['key']", "a->b", "&amp;", "\\", '"']),
)
layers, heads, positions = st.integers(0, 3), st.integers(0, 2), st.sampled_from(["", "@0", "@2"])
parts = st.one_of(
    st.just("input"),
    st.just("logits"),
    st.builds("a{}.h{}{}".format, layers, heads, positions),
    st.builds("m{}{}".format, layers, positions),
)
numbers = st.floats(allow_nan=False, allow_infinity=False)
json = st.recursive(
    st.none() | st.booleans() | st.integers() | numbers | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=5,
)


@st.composite
def measured(draw: Any) -> dict[str, float | None]:
    """The numbers of a node or an edge; any of them may be missing."""
    low, high = sorted(draw(st.tuples(numbers, numbers)))
    with_interval = draw(st.booleans())
    return {
        "effect": draw(st.none() | numbers),
        "low": low if with_interval else None,
        "high": high if with_interval else None,
        "p_value": draw(st.none() | st.floats(0, 1)),
    }


@st.composite
def graphs(draw: Any, names: Any = parts | modules, effects: Any = None) -> CausalGraph:
    """Any graph. Its edges lead from earlier to later nodes of a list in any order.

    Args:
        draw: given by Hypothesis.
        names: the ids of the nodes.
        effects: the effects of all nodes and edges; None: any numbers, or none.
    """
    numbers_of = measured() if effects is None else st.fixed_dictionaries({"effect": effects})
    ids = draw(st.lists(names, min_size=1, max_size=8, unique=True))
    ids.sort(key=lambda name: (name == "logits", name != "input"))
    nodes = [Node(name, **draw(numbers_of)) for name in ids]
    edges: dict[Any, Edge] = {}
    for _ in range(draw(st.integers(0, 14)) if len(ids) > 1 else 0):
        first = draw(st.integers(0, len(ids) - 2))
        second = draw(st.integers(first + 1, len(ids) - 1))
        takes_qkv = nodes[second].kind in ("head", "module")
        enters = draw(st.sampled_from([None, "q", "k", "v"])) if takes_qkv else None
        edge = Edge(ids[first], ids[second], enters, **draw(numbers_of))
        edges[edge.key] = edge
    line = st.none() | st.text(max_size=8).filter(str.isprintable)
    return CausalGraph(
        nodes,
        list(edges.values()),
        model=draw(line),
        metric=draw(line),
        method=draw(line),
        clean=draw(st.none() | numbers),
        corrupted=draw(st.none() | numbers),
        examples=draw(st.none() | st.integers(1, 10**9)),
        versions=draw(st.dictionaries(st.text(max_size=4), st.text(max_size=4), max_size=2)),
        notes=draw(st.dictionaries(st.text(max_size=4), json, max_size=3)),
    )


def decoder_graphs(effects: Any = None) -> Any:
    """Graphs of heads, MLPs, input and logits, in which every edge leads to a later layer."""

    def later(graph: CausalGraph) -> CausalGraph:
        order = {node.id: (node.kind == "logits", node.kind != "input", node.layer or 0,
                           node.kind == "mlp") for node in graph.nodes}  # fmt: skip
        edges = [edge for edge in graph.edges if order[edge.source] < order[edge.target]]
        return CausalGraph(graph.nodes, edges)

    return graphs(parts, effects).map(later)
