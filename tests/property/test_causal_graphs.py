"""Properties of causal graphs that Hypothesis tries to refute."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from causal_graphs import decoder_graphs, graphs
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from llm_instrumentation.analysis.causal_graph import (
    CausalGraph,
    edge_auroc,
    load_graph,
    save_graph,
)
from llm_instrumentation.analysis.causal_graph.layout import draw
from llm_instrumentation.errors import InvalidArgumentError

pytest.importorskip("networkx")
pytest.importorskip("scipy")

# Few values, so that many are equal.
effects = st.sampled_from([-2.0, -1.0, -0.5, 0.0, 0.5, 1.0, 2.0])


# ---- round trips ------------------------------------------------------------------------------


@given(graphs(), st.sampled_from([".json", ".graphml"]))
def test_a_file_gives_the_same_graph(graph, ending):
    with TemporaryDirectory() as folder:
        path = save_graph(graph, Path(folder, f"graph{ending}"))
        assert load_graph(path) == graph


@given(graphs())
def test_networkx_gives_the_same_graph(graph):
    made = graph.to_networkx()
    assert (made.number_of_nodes(), made.number_of_edges()) == (len(graph.nodes), len(graph.edges))
    assert CausalGraph.from_networkx(made) == graph
    assert CausalGraph.from_dict(json.loads(json.dumps(graph.to_dict()))) == graph


@given(graphs(), st.randoms(use_true_random=False))
def test_the_order_in_which_parts_are_given_does_not_count(graph, chance):
    nodes, edges = list(graph.nodes), list(graph.edges)
    chance.shuffle(nodes)
    chance.shuffle(edges)
    shuffled = CausalGraph.from_dict({**graph.to_dict(), "nodes": [], "edges": []})
    assert shuffled.nodes == ()
    record = {
        **graph.to_dict(),
        "nodes": [vars(n) for n in nodes],
        "edges": [vars(e) for e in edges],
    }
    assert CausalGraph.from_dict(record) == graph
    place = {node.id: at for at, node in enumerate(graph.nodes)}
    assert all(place[edge.source] < place[edge.target] for edge in graph.edges)


@given(graphs(), st.data())
def test_an_edge_backwards_makes_a_cycle(graph, data):
    inner = [e for e in graph.edges if e.source != "input" and e.target != "logits"]
    assume(inner)
    edge = data.draw(st.sampled_from(inner))
    back = {"source": edge.target, "target": edge.source}
    record = {**graph.to_dict(), "edges": [*graph.to_dict()["edges"], back]}
    with pytest.raises(InvalidArgumentError, match="cycle") as raised:
        CausalGraph.from_dict(record)
    assert edge.source in str(raised.value) or edge.target in str(raised.value)


# ---- pruning ----------------------------------------------------------------------------------


def paths(edges, start, ends):
    """Every path of edges from a node to one of the ends, by trying all."""
    if start in ends:
        yield ()
    for edge in edges:
        if edge.source == start:
            for rest in paths(edges, edge.target, ends):
                yield (edge, *rest)


def connected(graph, edges):
    """The edges on the paths from an input to an output, by listing all paths."""
    ends = {node.id for node in graph.outputs}
    return {edge for node in graph.inputs for path in paths(edges, node.id, ends) for edge in path}


def greedily(graph, k):
    """EAP-IG's selection in its plainest form: look at all edges before each choice."""
    taken, reached = [], {node.id for node in graph.outputs}
    while len(taken) < k:
        offered = [e for e in graph.edges if e.target in reached and e not in taken]
        if not offered:
            break
        taken.append(max(offered, key=lambda edge: abs(edge.effect)))  # the first of equal ones
        reached.add(taken[-1].source)
    return [edge for edge in graph.edges if edge in taken]


any_graph = graphs(effects=effects) | decoder_graphs(effects)


@given(any_graph, effects.map(abs))
def test_a_threshold_keeps_the_paths_of_large_edges(graph, threshold):
    pruned = graph.pruned(threshold=threshold)
    large = [edge for edge in graph.edges if abs(edge.effect) >= threshold]
    assert set(pruned.edges) == connected(graph, large)
    assert pruned.pruned(threshold=threshold) == pruned


@given(any_graph, st.integers(1, 16))
def test_top_k_keeps_the_paths_of_the_largest_edges(graph, k):
    ranked = sorted(graph.edges, key=lambda edge: -abs(edge.effect))[:k]
    assert set(graph.pruned(top_k=k).edges) == connected(graph, ranked)


@given(any_graph, st.integers(1, 16))
def test_the_greedy_choice_is_that_of_looking_at_all_edges(graph, k):
    assert set(graph.pruned(greedy=k).edges) == connected(graph, greedily(graph, k))


@given(any_graph, st.integers(1, 8))
def test_nodes_are_pruned_with_their_edges(graph, k):
    ranked = {node.id for node in sorted(graph.nodes, key=lambda node: -abs(node.effect))[:k]}
    pruned = graph.pruned_nodes(top_k=k)
    if not graph.edges:
        assert {node.id for node in pruned.nodes} == ranked
        return
    inside = [edge for edge in graph.edges if {edge.source, edge.target} <= ranked]
    starts = [node for node in graph.inputs if node.id in ranked]
    ends = {node.id for node in graph.outputs if node.id in ranked}
    found = [path for node in starts for path in paths(inside, node.id, ends)]
    assert {edge.key for edge in pruned.edges} == {edge.key for path in found for edge in path}


# ---- scores -----------------------------------------------------------------------------------


@settings(deadline=None)  # the first call imports scipy
@given(graphs(effects=effects), st.data())
def test_the_auroc_is_the_share_of_pairs_in_order(graph, data):
    inside = [edge for edge in graph.edges if data.draw(st.booleans())]
    outside = [edge for edge in graph.edges if edge not in inside]
    truth = CausalGraph(graph.nodes, inside)
    if not inside or not outside:
        with pytest.raises(InvalidArgumentError, match="edges of both kinds"):
            edge_auroc(graph, truth)
        return
    pairs = [
        (abs(a.effect) > abs(b.effect)) + (abs(a.effect) == abs(b.effect)) / 2
        for a, b in itertools.product(inside, outside)
    ]
    assert edge_auroc(graph, truth) == pytest.approx(sum(pairs) / len(pairs))


# ---- drawing ----------------------------------------------------------------------------------


def dense(seed: int, edges: int) -> CausalGraph:
    """A graph of a decoder of 6 layers with 4 heads."""
    chance = random.Random(seed)
    names = [f"a{layer}.h{head}" for layer in range(6) for head in range(4)]
    kinds = [("input", -1), *((name, int(name[1])) for name in names), ("logits", 9)]
    possible = [(a, b) for (a, i), (b, j) in itertools.product(kinds, kinds) if i < j]
    record = [
        {"source": a, "target": b, "input": chance.choice("qkv") if b != "logits" else None}
        for a, b in chance.sample(possible, edges)
    ]
    return CausalGraph.from_dict({"nodes": [{"id": n} for n, _ in kinds], "edges": record})


drawable = graphs() | decoder_graphs() | st.builds(dense, st.integers(0, 99), st.integers(1, 80))


@settings(deadline=None, max_examples=40)
@given(drawable)
def test_edges_lead_upwards_beside_the_other_nodes(graph):
    made = draw(graph)
    boxes = {box.node.id: box for box in made.nodes}
    assert len(boxes) == len(graph.nodes)
    for a, b in itertools.combinations(made.nodes, 2):
        apart_x = abs(a.x - b.x) >= (a.width + b.width) / 2
        assert apart_x or abs(a.y - b.y) >= (a.height + b.height) / 2
    for box in made.nodes:
        assert box.width / 2 - 0.01 <= box.x <= made.width - box.width / 2 + 0.01
    assert [drawn.edge for drawn in made.edges] == list(graph.edges)
    for drawn in made.edges:
        source, target = boxes[drawn.edge.source], boxes[drawn.edge.target]
        first, last = drawn.points[0], drawn.points[-1]
        assert abs(first[0] - source.x) < source.width / 2
        assert abs(last[0] - target.x) < target.width / 2
        heights = [y for _, y in drawn.points]
        assert heights == sorted(heights) and heights[0] < heights[-1]
        for box in made.nodes:  # on its way it passes each row beside the boxes
            for x, y in drawn.points[1:-1]:
                assert abs(x - box.x) > box.width / 2 or abs(y - box.y) > box.height / 2 + 8
