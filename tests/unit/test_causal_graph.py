"""Causal graphs: their parts and checks, pruning, files, and the figure."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
import shutil
import subprocess
import sys
import warnings

import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch
from causal_graphs import induction
from llm_instrumentation.analysis.causal_graph import (
    CausalGraph,
    Edge,
    Node,
    edge_auroc,
    load_graph,
    overlap,
    save_graph,
    save_neuronpedia,
)
from llm_instrumentation.analysis.causal_graph.layout import draw
from llm_instrumentation.analysis.plots import save_figure
from llm_instrumentation.errors import (
    CorruptError,
    InvalidArgumentError,
    NotFoundError,
    StrapIOError,
    UnsupportedError,
)
from matplotlib.colors import to_hex
from matplotlib.patches import FancyBboxPatch, PathPatch
from neuronpedia import SCHEMA

STRANGE = ['say "hi"', "back\\slash", "ends\\", "a->b", "<b>&amp;", "{x|y}", "é漢🦙", "h.0['k']"]


@pytest.fixture
def graph() -> CausalGraph:
    return induction()


def ids(parts):
    return [part.id for part in parts]


# ---- parts --------------------------------------------------------------------------------------


def test_the_id_of_a_node_says_what_it_is():
    def said(name):
        node = Node(name)
        return node.kind, node.layer, node.head, node.position

    assert said("input") == ("input", None, None, None)
    assert said("a3.h5") == ("head", 3, 5, None)
    assert said("a3.h5@7") == ("head", 3, 5, 7)
    assert said("m11") == ("mlp", 11, None, None)
    assert said("logits@0") == ("logits", None, None, 0)
    assert said("model.layers.3.self_attn.o_proj") == ("module", 3, None, None)
    assert said("h.0[1]@2") == ("module", 0, None, 2)
    assert said("lm_head") == ("module", None, None, None)
    assert said("a3.h") == ("module", None, None, None)


def test_an_edge_is_named_by_its_ends_and_its_input():
    assert Edge("m0", "a1.h0", "v").id == "m0->a1.h0<v>"
    assert Edge("a1.h0", "logits").id == "a1.h0->logits"
    assert Edge("m0", "a1.h0", "v").key == ("m0", "a1.h0", "v")


def test_numbers_of_numpy_and_torch_become_floats():
    node = Node("m0", effect=np.float32(0.5), low=np.int64(0), high=torch.tensor(1.0))
    assert node == Node("m0", effect=0.5, low=0.0, high=1.0)
    assert {type(value) for value in (node.effect, node.low, node.high)} == {float}


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: Node(""), "empty"),
        (lambda: Node("a\nb"), "cannot be printed"),
        (lambda: Node(3), "no text"),  # type: ignore[arg-type]
        (lambda: Node("m0", effect=float("nan")), "node 'm0': effect = nan: give a finite number"),
        (lambda: Edge("m0", "m1", effect=float("inf")), "edge 'm0->m1': effect = inf"),
        (lambda: Node("m0", effect="0.5"), "effect = '0.5' is no number"),  # type: ignore[arg-type]
        (lambda: Node("m0", effect=torch.ones(2)), "no number"),  # type: ignore[arg-type]
        (lambda: Node("m0", low=0.1), "low = 0.1, high = None: give both"),
        (lambda: Node("m0", low=0.2, high=0.1), "low = 0.2 is above high = 0.1"),
        (lambda: Node("m0", p_value=1.5), "p_value = 1.5"),
        (lambda: Edge("m0", "m1", "q"), "'m1' has no input 'q'"),
        (lambda: Edge("m0", "a1.h0", "z"), "input = 'z'"),  # type: ignore[arg-type]
        (lambda: Edge("logits", "m0"), "no edge leads from the logits"),
        (lambda: CausalGraph([Node("m0"), Node("m0")]), "node 'm0' is there twice"),
        (
            lambda: CausalGraph([Node("m0"), Node("m1")], [Edge("m0", "m1"), Edge("m0", "m1")]),
            "edge 'm0->m1' is there twice",
        ),
        (lambda: CausalGraph([Node("m0")], [Edge("m0", "m1")]), "there is no node 'm1'"),
        (
            lambda: CausalGraph(
                [Node("m0"), Node("m1"), Node("m2")],
                [Edge("m0", "m1"), Edge("m1", "m2"), Edge("m2", "m1")],
            ),
            "the edges form a cycle: m1 -> m2 -> m1|the edges form a cycle: m2 -> m1 -> m2",
        ),
        (lambda: CausalGraph([Node("m0")], [Edge("m0", "m0")]), "cycle: m0 -> m0"),
        (lambda: CausalGraph([], clean=float("nan")), "clean = nan"),
        (lambda: CausalGraph([], examples=0), "examples = 0"),
        (lambda: CausalGraph([], model="two\nlines"), "model = 'two"),
        (lambda: CausalGraph([], notes={"model": object()}), "notes cannot be stored"),
    ],
)
def test_what_makes_no_sense_is_refused(wrong, message):
    with pytest.raises(InvalidArgumentError, match=message):
        wrong()


def test_nodes_are_in_the_order_of_execution(graph):
    assert ids(graph.nodes) == ["input", "a0.h1", "a0.h3", "a1.h6", "logits"]
    assert ids(graph.edges)[:3] == ["input->a0.h3<q>", "input->a0.h3<v>", "input->a1.h6<v>"]
    by_edges = CausalGraph([Node("b"), Node("a"), Node("c")], [Edge("c", "b"), Edge("b", "a")])
    assert ids(by_edges.nodes) == ["c", "b", "a"]
    assert ids(by_edges.inputs) == ["c"] and ids(by_edges.outputs) == ["a"]


def test_it_says_what_it_is(graph):
    assert repr(graph) == (
        "<CausalGraph of attn-only-2l: 5 nodes, 7 edges, effects on log probability>"
    )
    page = graph._repr_html_()
    cells = re.findall(r"<td[^>]*>(.*?)</td>", page)
    assert cells[:8] == [
        "a1.h6-&gt;logits", "+2", "–", "–", "input-&gt;a0.h3&lt;v&gt;", "+1.5", "+1.25 to +1.75",
        "0.001",
    ]  # fmt: skip
    many = CausalGraph([Node(f"m{n}", effect=n / 10) for n in range(30)])
    assert "and 10 more nodes with smaller effects" in many._repr_html_()


def test_tables(graph):
    edges, nodes = graph.to_pandas()
    assert edges["id"].tolist() == ids(graph.edges)
    assert edges.set_index("id")["effect"]["a0.h1->a1.h6<q>"] == -0.5
    assert edges["p_value"].dtype == "float64" and edges["p_value"].notna().sum() == 1
    assert nodes["id"].tolist() == ids(graph.nodes)
    assert nodes["head"].tolist()[1:4] == [1, 3, 6] and nodes["head"].isna().sum() == 2
    empty_edges, empty_nodes = CausalGraph([]).to_pandas()
    assert list(empty_edges) == list(edges) and list(empty_nodes) == list(nodes)


# ---- pruning and comparing ----------------------------------------------------------------------


def test_pruning_keeps_what_is_on_a_path(graph):
    circuit = graph.pruned(threshold=0.5)
    # a0.h1 has a large effect, but nothing leads to it.
    assert ids(circuit.edges) == [
        "input->a0.h3<v>", "input->a1.h6<v>", "a0.h3->a1.h6<k>", "a1.h6->logits",
    ]  # fmt: skip
    assert ids(circuit.nodes) == ["input", "a0.h3", "a1.h6", "logits"]
    assert (circuit.model, circuit.notes) == (graph.model, graph.notes)
    assert circuit.pruned(top_k=3) == graph.pruned(top_k=3)
    assert graph.pruned(threshold=9) == CausalGraph.from_dict(
        {**graph.to_dict(), "nodes": [], "edges": []}
    )


def test_the_greedy_choice_begins_at_the_output(graph):
    # input->a0.h3<v> is the second largest of all edges, but a0.h3 is reached after a1.h6 only.
    assert ids(graph.pruned(greedy=1).edges) == []
    assert ids(graph.pruned(greedy=2).edges) == []
    assert ids(graph.pruned(greedy=3).edges) == [
        "input->a0.h3<v>", "a0.h3->a1.h6<k>", "a1.h6->logits",
    ]  # fmt: skip


def test_of_equal_effects_the_first_edges_stay():
    nodes = [Node("input"), Node("m0"), Node("m1"), Node("m2"), Node("logits")]
    edges = [Edge(a, b, effect=1.0) for m in ("m2", "m0", "m1")
             for a, b in (("input", m), (m, "logits"))]  # fmt: skip
    for order in (edges, edges[::-1]):
        kept = CausalGraph(nodes, order).pruned(top_k=4).edges
        assert ids(kept) == ["input->m0", "m0->logits"]  # and two that are on no path


def test_nodes_without_edges_are_ranked():
    graph = CausalGraph([Node("a0.h0", 0.1), Node("a0.h1", -0.3), Node("m0", 0.2)])
    assert ids(graph.pruned_nodes(top_k=2).nodes) == ["a0.h1", "m0"]
    assert ids(graph.pruned_nodes(threshold=0.3).nodes) == ["a0.h1"]


def test_inputs_and_outputs_without_effects_stay_when_nodes_are_pruned():
    nodes = [Node("input"), Node("m0", 0.1), Node("m1", 0.5), Node("logits")]
    edges = [Edge(a, b) for m in ("m0", "m1") for a, b in (("input", m), (m, "logits"))]
    pruned = CausalGraph(nodes, edges).pruned_nodes(top_k=1)
    assert ids(pruned.nodes) == ["input", "m1", "logits"]
    assert ids(pruned.edges) == ["input->m1", "m1->logits"]


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({}, "nothing is given: give one of threshold, top_k, greedy"),
        ({"threshold": 1, "top_k": 2}, "threshold = 1, top_k = 2 is given: give one of"),
        ({"threshold": -1.0}, "threshold = -1.0"),
        ({"threshold": float("nan")}, "threshold = nan"),
        ({"top_k": 0}, "top_k = 0: give 1 or more"),
        ({"greedy": 0}, "greedy = 0: give 1 or more"),
    ],
)
def test_a_choice_that_makes_no_sense_is_refused(graph, how, message):
    with pytest.raises(InvalidArgumentError, match=re.escape(message)):
        graph.pruned(**how)


def test_effects_that_were_not_measured_are_not_taken_for_0(graph):
    with pytest.raises(InvalidArgumentError, match="node 'a0.h3' has no effect"):
        graph.pruned_nodes(top_k=1)
    bare = CausalGraph(graph.nodes, [Edge("input", "logits")])
    for act in (lambda: bare.pruned(top_k=1), lambda: edge_auroc(bare, bare)):
        with pytest.raises(InvalidArgumentError, match="edge 'input->logits' has no effect"):
            act()


def test_the_overlap_of_two_circuits(graph):
    a, b = graph.pruned(top_k=3), graph.pruned(threshold=0.7)
    found = overlap(a, b)
    assert found.both == tuple(ids(a.edges)) and found.only_a == ()
    assert found.only_b == ("input->a1.h6<v>",)
    assert (found.jaccard, found.nodes_jaccard) == (3 / 4, 1.0)
    assert overlap(CausalGraph([]), CausalGraph([])).jaccard == 1.0


def test_the_auroc_of_scores_against_a_circuit(graph):
    truth = graph.pruned(threshold=0.5)
    assert edge_auroc(graph, truth) == 1.0
    # |-0.5| of a0.h1->a1.h6<q> is above 0.2 and 0.125, but below the four of the circuit.
    wrong = CausalGraph(graph.nodes, [edge for edge in graph.edges if edge.source == "a0.h1"])
    assert edge_auroc(graph, wrong) == pytest.approx(2 / 6)
    with pytest.raises(InvalidArgumentError, match="'input->a1.h6<v>' of the circuit has no score"):
        edge_auroc(graph.pruned(top_k=3), truth)
    with pytest.raises(InvalidArgumentError, match="has 7 of 7 edges"):
        edge_auroc(graph, graph)


# ---- networkx and files -------------------------------------------------------------------------


def test_a_graph_of_networkx(graph):
    networkx = pytest.importorskip("networkx")
    made = graph.to_networkx()
    assert made.edges["input", "a0.h3", "v"]["effect"] == 1.5
    assert made.nodes["a1.h6"] == {"kind": "head", "layer": 1, "head": 6}
    assert made.graph["clean"] == -1.5
    merged = graph.to_networkx(merge=True)
    assert merged.edges["input", "a0.h3"] == {"effect": 1.7}
    assert merged.edges["a0.h3", "a1.h6"] == {"effect": 1.25, "input": "k"}
    assert networkx.dag_longest_path_length(merged) == 3
    assert len(CausalGraph.from_networkx(merged).edges) == 6

    plain = networkx.DiGraph([("m0", "logits", {"effect": 1, "color": "red"})], name="mine")
    assert CausalGraph.from_networkx(plain).edges == (Edge("m0", "logits", effect=1.0),)
    with pytest.raises(InvalidArgumentError, match="no direction"):
        CausalGraph.from_networkx(networkx.Graph())
    with pytest.raises(InvalidArgumentError, match="node: 3 is no text"):
        CausalGraph.from_networkx(networkx.DiGraph([(3, 4)]))
    half = CausalGraph([Node("m0"), Node("a1.h0")],
                       [Edge("m0", "a1.h0", "q", 1.0), Edge("m0", "a1.h0", "k")])  # fmt: skip
    with pytest.raises(InvalidArgumentError, match="from 'm0' to 'a1.h0' have an effect"):
        half.to_networkx(merge=True)


def test_the_json_has_the_documented_fields(graph, tmp_path):
    path = save_graph(graph, tmp_path / "graph.json")
    record = json.loads(path.read_text())
    assert (record["format"], record["version"]) == ("llm_instrumentation.causal_graph", 1)
    assert record["nodes"][1] == {"id": "a0.h1", "effect": 0.1}
    assert record["edges"][1] == {
        "source": "input", "target": "a0.h3", "input": "v", "effect": 1.5, "low": 1.25,
        "high": 1.75, "p_value": 0.001,
    }  # fmt: skip
    assert record["notes"] == graph.notes
    later = {**record, "new": 1, "nodes": [{**node, "new": 2} for node in record["nodes"]]}
    path.write_text(json.dumps(later))
    assert load_graph(path) == graph  # fields that this version does not know are ignored


def test_files_that_hold_no_graph(graph, tmp_path):
    path = tmp_path / "graph.json"
    with pytest.raises(NotFoundError, match="there is no file .*graph.json"):
        load_graph(path)
    path.write_text("{")
    with pytest.raises(CorruptError, match="is no JSON"):
        load_graph(path)
    path.write_text('{"nodes": []}')
    with pytest.raises(CorruptError, match='it has no "format"'):
        load_graph(path)
    save_graph(graph, path)
    text = path.read_text()
    for wrong, message in [
        (('"version": 1', '"version": 2'), "has version 2, this version reads 1: install a later"),
        (('"id": "a0.h1"', '"id": "a0.h3"'), "node 'a0.h3' is there twice"),
        (('"nodes": [', '"nodes": 3, "old": ['), "holds no causal graph"),
        (('"nodes": [', '"nodes": [7, '), "holds no causal graph"),
        (('"source": "input",', ""), "missing 1 required"),
    ]:
        path.write_text(text.replace(*wrong))
        kind = UnsupportedError if "version" in wrong[0] else CorruptError
        with pytest.raises(kind, match=message):
            load_graph(path)
    record = json.loads(text)
    limit = sys.getrecursionlimit()  # other packages raise it
    for deep in ('{"a":' * limit + "1" + "}" * limit, "[" * 100_000):
        path.write_text(json.dumps({**record, "notes": "deep"}).replace('"deep"', deep))
        with pytest.raises(CorruptError, match="graph.json "):
            load_graph(path)
    with pytest.raises(InvalidArgumentError, match=r"graph.png: graphs are written as \.json"):
        save_graph(graph, tmp_path / "graph.png")
    with pytest.raises(InvalidArgumentError, match=r"graph.dot: graphs are read from \.json"):
        load_graph(save_graph(graph, tmp_path / "graph.dot"))
    with pytest.raises(StrapIOError, match="cannot write to"):
        save_graph(graph, tmp_path / "missing" / "graph.json")


def test_graphml_of_another_program(graph, tmp_path):
    pytest.importorskip("networkx")
    path = tmp_path / "graph.graphml"
    path.write_text(
        '<graphml xmlns="http://graphml.graphdrawing.org/xmlns">'
        '<key id="w" for="edge" attr.name="effect" attr.type="float"/>'
        '<graph edgedefault="directed"><node id="m0"/><node id="logits"/>'
        '<edge source="m0" target="logits"><data key="w">0.5</data></edge></graph></graphml>'
    )
    assert load_graph(path).edges == (Edge("m0", "logits", effect=0.5),)
    notes = '<data key="n">' + "[" * 100_000 + "</data>"
    key = '<key id="n" for="graph" attr.name="notes" attr.type="string"/><graph'
    whole = path.read_text()
    for text in (
        "<graphml",
        "<html/>",
        '<?xml version="1.0" encoding="nope"?><graphml/>',
        whole.replace("directed", "undirected"),
        whole.replace("<graph ", f"{key} ").replace("<node", f"{notes}<node", 1),
    ):
        path.write_text(text)
        with pytest.raises(CorruptError, match="holds no causal graph"):
            load_graph(path)


def test_a_failed_write_leaves_the_old_file(graph, tmp_path):
    path = save_graph(graph, tmp_path / "graph.html")
    before = path.read_bytes()
    names = [f"m{n}" for n in range(30)]
    edges = [Edge(a, b) for a, b in itertools.combinations(names, 2)]
    full = CausalGraph([Node(name) for name in names], edges)
    with pytest.raises(InvalidArgumentError, match="435 edges cannot be told apart"):
        save_graph(full, path)
    assert path.read_bytes() == before and [path] == list(tmp_path.iterdir())


# ---- DOT ----------------------------------------------------------------------------------------

# The statements that we write, by the grammar on graphviz.org/doc/info/lang.html. In a quoted
# string of that grammar a backslash escapes a quote; an even number of backslashes may stand before
# the closing quote, because the lexer reads them in pairs.
STRING = r'"(?:[^"\\]|\\.)*"'
VALUE = rf"(?:{STRING}|[a-zA-Z]\w*|[0-9.]+)"
ATTRIBUTES = rf"\[\w+={VALUE}(?:, \w+={VALUE})*\]"
STATEMENT = re.compile(
    rf"  (?:rankdir=BT|(?:node|edge) {ATTRIBUTES}|({STRING}) {ATTRIBUTES}"
    rf"|({STRING}) -> ({STRING}) ({ATTRIBUTES}));"
)


def strange() -> CausalGraph:
    """Nodes whose names the languages of files could take for their own."""
    pairs = enumerate(itertools.pairwise(STRANGE))
    edges = [Edge(a, b, effect=k - 3.0) for k, (a, b) in pairs]
    return CausalGraph([Node(name) for name in STRANGE], edges, model='"A\\')


def test_dot_has_the_statements_of_its_grammar(graph):
    for made in (graph, strange()):
        first, *statements, last = made.to_dot().splitlines()
        assert re.fullmatch(rf"digraph {STRING} {{", first) and last == "}"
        assert [line for line in statements if not STATEMENT.fullmatch(line)] == []
        found = [STATEMENT.fullmatch(line) for line in statements]
        nodes = [match[1] for match in found if match[1]]
        plain = [text[1:-1].replace('\\"', '"').replace("\\\\", "\\") for text in nodes]
        assert plain == ids(made.nodes)
        assert [match[2] for match in found if match[2]] == [
            nodes[ids(made.nodes).index(edge.source)] for edge in made.edges
        ]
    assert re.search(r'"a0.h1" -> "a1.h6" \[color="#d55e00", .*style=dashed', graph.to_dot())


@pytest.mark.skipif(shutil.which("dot") is None, reason="needs Graphviz's dot on PATH")
def test_graphviz_draws_every_name(graph):
    from xml.etree import ElementTree

    for made in (graph, strange()):
        done = subprocess.run(
            ["dot", "-Tsvg"], input=made.to_dot().encode(), capture_output=True, timeout=100
        )
        assert done.returncode == 0, done.stderr
        root = ElementTree.fromstring(done.stdout)
        texts = {text.text or "" for text in root.iter("{http://www.w3.org/2000/svg}text")}
        assert {text.replace("\xa0", " ") for text in texts} >= set(ids(made.nodes))


# ---- Neuronpedia --------------------------------------------------------------------------------


def test_a_file_for_neuronpedia(graph, tmp_path):
    jsonschema = pytest.importorskip("jsonschema")
    path = save_neuronpedia(graph, tmp_path / "np.json", slug="induction", scan="attn-only-2l")
    record = json.loads(path.read_text())
    jsonschema.validate(record, SCHEMA)
    assert record["metadata"]["prompt_tokens"] == ["(all positions)"]
    assert "not features of transcoders" in record["metadata"]["info"]["description"]
    assert record["metadata"]["generation_settings"]["metric"] == "log probability"
    nodes = {node["node_id"]: node for node in record["nodes"]}
    assert [(n["layer"], n["feature_type"]) for n in nodes.values()] == [
        ("E", "embedding"), ("0", "attention head"), ("0", "attention head"),
        ("1", "attention head"), ("2", "logit"),
    ]  # fmt: skip
    assert len({node["feature"] for node in nodes.values()}) == len(nodes)
    assert {"influence", "activation", "token_prob"}.isdisjoint(nodes["a1.h6"])
    links = {(link["source"], link["target"]): link["weight"] for link in record["links"]}
    assert links["input", "a0.h3"] == 1.7  # q and v
    assert len(record["links"]) == len(links) == 6
    settings = record["metadata"]["generation_settings"]
    assert (settings["edges"], settings["links"]) == (7, 6)


def test_nodes_at_positions_stand_at_their_tokens_in_neuronpedia(tmp_path):
    jsonschema = pytest.importorskip("jsonschema")
    nodes = [Node("input@0"), Node("a0.h1@1"), Node("logits")]
    graph = CausalGraph(nodes, [Edge("input@0", "a0.h1@1", "v", 0.5),
                                Edge("a0.h1@1", "logits", effect=1)])  # fmt: skip
    path = tmp_path / "np.json"
    save_neuronpedia(graph, path, slug="x", scan="gpt2-small", tokens=["Mary", " gave"])
    record = json.loads(path.read_text())
    jsonschema.validate(record, SCHEMA)
    assert record["metadata"]["prompt"] == "Mary gave"
    assert record["metadata"]["prompt_tokens"] == ["Mary", " gave", "(all positions)"]
    assert [node["ctx_idx"] for node in record["nodes"]] == [0, 1, 2]

    def refused(message, made=graph, slug="x", scan="gpt2-small", tokens=("a", "b")):
        with pytest.raises(InvalidArgumentError, match=message):
            save_neuronpedia(made, path, slug=slug, scan=scan, tokens=tokens)

    refused("'a0.h1@1' is at position 1, and there are 1 tokens", tokens=["Mary"])
    refused("slug = 'a b'", slug="a b")
    refused("scan is empty", scan="")
    refused("'lm_head' has no layer", CausalGraph([Node("lm_head")]))
    refused("'m0->logits' has no effect",
            CausalGraph([Node("m0"), Node("logits")], [Edge("m0", "logits")]))  # fmt: skip
    assert json.loads(path.read_text()) == record


# ---- figure -------------------------------------------------------------------------------------


@pytest.fixture
def no_display(monkeypatch):
    monkeypatch.setenv("MPLBACKEND", "Agg")
    plt.switch_backend("Agg")
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # as for a missing glyph
        # Of pyparsing 3.3, about matplotlib's calls of it: it is a UserWarning too.
        warnings.simplefilter("ignore", DeprecationWarning)
        yield
    plt.close("all")


def test_the_figure_has_every_node_and_edge(graph, no_display, tmp_path):
    ax = graph.plot()
    assert ax.get_title(loc="left") == "Effects on log probability in attn-only-2l"
    texts = [text.get_text() for text in ax.texts]
    assert set(texts) == {*ids(graph.nodes), "q", "k", "v", "layer 0", "layer 1"}
    lines = [patch for patch in ax.patches if type(patch) is PathPatch]
    widths = sorted(line.get_linewidth() for line in lines)
    effects = sorted(abs(edge.effect) for edge in graph.edges)
    np.testing.assert_allclose(widths, [0.6 + 3.9 * effect / 2 for effect in effects])
    negative = [line for line in lines if to_hex(line.get_edgecolor()) == "#d55e00"]
    assert len(negative) == 2 and all(line.get_linestyle() != "-" for line in negative)
    assert [text.get_text() for text in ax.get_legend().get_texts()] == [
        "effect above 0", "effect below 0", "absolute effect 2",
    ]  # fmt: skip
    for ending in ("png", "pdf", "svg"):
        save_figure(ax, tmp_path / f"graph.{ending}")
        assert (tmp_path / f"graph.{ending}").stat().st_size > 1000


def test_a_narrow_graph_fills_its_frame(graph, no_display):
    ax = graph.plot()
    across = np.concatenate([patch.get_path().vertices[:, 0] for patch in edges_of(ax)])
    boxes = [box.get_x() + end for box in boxes_of(ax) for end in (0, box.get_width())]
    low, high = min(*boxes, across.min()), max(*boxes, across.max())
    left, right = ax.get_xlim()
    assert (high - low) / (right - left) > 0.75  # the rest has the names of layers
    assert low > 0 - 1e-9 and high < right
    plain, wide = draw(graph), draw(graph, 240)
    assert plain.width < 120 and 200 < wide.width <= 240
    assert [one.width for one in wide.nodes] == [one.width for one in plain.nodes]
    assert draw(CausalGraph([Node("a0.h1")]), 240).width < 40  # there is nothing to move apart


def edges_of(ax):
    return [patch for patch in ax.patches if type(patch) is PathPatch]


def boxes_of(ax):
    return [patch for patch in ax.patches if type(patch) is FancyBboxPatch]


def test_the_figure_draws_to_given_axes_and_strange_names(no_display):
    _, ax = plt.subplots()
    assert strange().plot(ax) is ax
    assert CausalGraph([Node("m0", 0.5)]).plot().get_legend() is None
    with pytest.raises(InvalidArgumentError, match="no nodes"):
        CausalGraph([]).plot()


# ---- positions and spans ------------------------------------------------------------------------


def by_span() -> CausalGraph:
    """What the subject writes is read at the end."""
    return CausalGraph(
        [Node(name) for name in ("input@subject", "a0.h1@subject", "a0.h1@end", "logits@end")],
        [
            Edge("input@subject", "a0.h1@subject", "v", effect=1.0),
            Edge("input@subject", "a0.h1@end", "v", effect=0.5),
            Edge("a0.h1@end", "logits@end", effect=0.75),
        ],
        notes={"spans": ["subject", "end"], "tokens": {"subject": " Mary"}},
    )


def test_a_span_stands_behind_a_part_of_a_decoder():
    node = Node("a3.h5@subject")
    assert (node.kind, node.layer, node.head, node.position, node.span) == (
        "head", 3, 5, None, "subject",
    )  # fmt: skip
    assert Node("a3.h5@7").span is None and Node("a3.h5@7").position == 7
    assert Node("logits@end").kind == "logits" and Node("input@end").kind == "input"
    # Other modules may have such a name themselves.
    assert Node("model.norm@end").kind == "module" and Node("model.norm@end").span is None
    assert [node.id for node in by_span().inputs] == ["input@subject"]


def test_spans_are_columns_of_a_drawing_in_the_order_of_the_notes():
    made = draw(by_span())
    assert [name for *_, name in made.columns] == ["subject: Mary", "end"]
    for node in made.nodes:
        first, last, _ = made.columns[node.node.span == "end"]
        assert first < node.x - node.width / 2 and node.x + node.width / 2 < last
        assert "@" not in node.text
    somewhere = dataclasses.replace(by_span(), nodes=(*by_span().nodes, Node("m0")))
    assert not draw(somewhere).columns  # a node without a position has no column
    ordered = CausalGraph([Node(f"m0@{at}") for at in (10, 2, 1)])
    assert [name for *_, name in draw(ordered).columns] == ["1", "2", "10"]


def test_neuronpedia_has_no_spans(tmp_path):
    with pytest.raises(InvalidArgumentError, match="'input@subject' is at a span of tokens"):
        save_neuronpedia(by_span(), tmp_path / "graph.json", slug="a", scan="b")


def test_tables_and_files_have_the_spans(tmp_path):
    nodes = by_span().to_pandas()[1]
    assert set(nodes["span"]) == {"subject", "end"} and nodes["position"].isna().all()
    for name in ("graph.json", "graph.graphml"):
        save_graph(by_span(), tmp_path / name)
        assert load_graph(tmp_path / name) == by_span()
