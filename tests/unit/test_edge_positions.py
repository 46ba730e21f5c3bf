"""Edges at positions and spans, on decoders whose circuits are known by position."""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict

import pytest
import torch
from decoders_by_hand import gated, graph_of, induction, linear_decoder, reversing, sever
from llm_instrumentation.analysis.causal_graph import CausalGraph, edge_auroc
from llm_instrumentation.errors import InvalidArgumentError
from llm_instrumentation.interventions.circuits import faithfulness, minimality, run_circuit
from llm_instrumentation.interventions.edges import edge_attribution, edge_patching
from llm_instrumentation.interventions.metrics import Metric
from llm_instrumentation.interventions.prompts import Prompts

B = Metric("logit of token 1", lambda logits, batch: logits[:, -1, 1])
ZERO = Metric("logit of token 0", lambda logits, batch: logits[:, -1, 0])
METHODS = {
    "EAP": lambda *args, **at: edge_attribution(*args, confidence=None, **at),
    "EAP-IG": lambda *args, **at: edge_attribution(*args, steps=4, confidence=None, **at),
    "noising": lambda *args, **at: edge_patching(*args, confidence=None, batch_size=64, **at),
    "denoising": lambda *args, **at: edge_patching(
        *args, direction="denoising", confidence=None, batch_size=64, **at
    ),
}


def effects(graph: CausalGraph) -> dict[str, float]:
    return {edge.id: edge.effect for edge in graph.edges}


def summed(graph: CausalGraph) -> dict[str, float]:
    """The sums of the effects over all positions, by the edge without them."""
    parts = defaultdict(list)
    for edge in graph.edges:
        source, target = (name.partition("@")[0] for name in (edge.source, edge.target))
        parts[dataclasses.replace(edge, source=source, target=target).id].append(edge.effect)
    return {name: math.fsum(values) for name, values in parts.items()}


def repeated() -> Prompts:
    """4 A B C A, where B should follow. In the corrupted text the first A is another token."""
    return Prompts(torch.tensor([[4, 0, 1, 2, 0]]), torch.tensor([[4, 3, 1, 2, 0]]))


INDUCTION = graph_of(
    ("input@1", "a0.h0@2", "v"), ("a0.h0@2", "a1.h0@4", "k"), ("a1.h0@4", "logits@4", None)
)  # fmt: skip


def test_patching_finds_exactly_the_induction_pair_at_its_positions():
    model = induction(sharpness=200.0)
    assert model(repeated().clean["input_ids"])[0, -1].tolist() == [0, 1, 0, 0, 0]
    found = effects(METHODS["noising"](model, repeated(), B, positions="each"))
    circuit = {edge.id for edge in INDUCTION.edges}
    # Without a copy to follow the head shares its attention among five tokens.
    assert {name: one for name, one in found.items() if one} == dict.fromkeys(
        circuit, pytest.approx(1 / 5 - 1)
    )
    severed = METHODS["noising"](sever(model, 0, 0), repeated(), B, positions="each")
    assert set(effects(severed).values()) == {0.0}


@pytest.mark.parametrize("method", ["EAP-IG", "noising"])
def test_the_induction_pair_is_above_all_other_edges(method):
    found = METHODS[method](induction(sharpness=8.0), repeated(), B, positions="each")
    assert edge_auroc(found, INDUCTION) == 1.0


@pytest.mark.parametrize("method", METHODS)
def test_a_gate_is_open_at_one_position_only(method):
    prompts = Prompts(torch.full((1, 6), 3), torch.zeros(1, 6).long())
    circuit = graph_of(
        ("input@2", "m0@2", None), ("m0@2", "a1.h0@5", "v"), ("a1.h0@5", "logits@5", None)
    )  # fmt: skip
    found = METHODS[method](gated(2), prompts, ZERO, positions="each")
    got = {name: one for name, one in effects(found).items() if one}
    assert set(got) <= {edge.id for edge in circuit.edges}
    # The gate is closed in the corrupted run: restoring what leads to it is not enough there, and
    # the last gradient of EAP-IG is 0.
    share = {"EAP": -1 / 6, "EAP-IG": -7 / 8 / 6, "noising": -1 / 6, "denoising": 1 / 6}[method]
    assert got["input@2->m0@2"] == pytest.approx(share)
    assert edge_auroc(found, circuit) == 1.0
    severed = METHODS[method](sever(gated(2), 1, 0), prompts, ZERO, positions="each")
    assert set(effects(severed).values()) == {0.0}


@pytest.mark.parametrize("method", ["EAP", "noising"])
def test_a_query_may_read_later_keys(method):
    # The model has no causal mask: at position 0 it reads the token at position 3.
    first = Metric("logit of token 3 at 0", lambda logits, batch: logits[:, 0, 3])
    prompts = Prompts(torch.tensor([[0, 1, 2, 3]]), torch.tensor([[1, 2, 3, 0]]))
    circuit = graph_of(("input@3", "a0.h0@0", "v"), ("a0.h0@0", "logits@0", None))
    found = METHODS[method](reversing(), prompts, first, positions="each")
    assert edge_auroc(found, circuit) == 1.0
    assert set(effects(found)) >= {f"input@{s}->a0.h0@{t}<k>" for s in range(4) for t in range(4)}


def random_pairs(examples: int = 4) -> Prompts:
    torch.manual_seed(1)
    clean = torch.randint(6, (examples, 6))
    corrupted = clean.clone()
    corrupted[:, 1:4] = torch.randint(6, (examples, 3))
    return Prompts(clean, corrupted)


SPANS = {"subject": slice(1, 3), "verb": [3], "end": -1}


@pytest.mark.parametrize("positions", ["each", SPANS])
def test_on_a_linear_model_attribution_is_exact_and_adds_up(positions):
    model, prompts = linear_decoder(), random_pairs()
    exact = effects(METHODS["noising"](model, prompts, ZERO, positions=positions))
    found = edge_attribution(model, prompts, ZERO, positions=positions, batch_size=3)
    assert effects(found) == pytest.approx(exact, abs=1e-6)
    assert len(found.edges) == len(exact)
    whole = effects(edge_attribution(model, prompts, ZERO))
    assert summed(found) == pytest.approx(whole, abs=1e-6)
    assert max(map(abs, whole.values())) > 0.01


def test_spans_of_some_tokens_leave_a_rest():
    found = edge_attribution(linear_decoder(), random_pairs(), ZERO, positions=SPANS)
    spans = {node.span for node in found.nodes}
    assert spans == {"subject", "verb", "end", "rest"}
    assert all(node.position is None for node in found.nodes)
    # Keys and values lead onwards. The rest is tokens 0 and 4, so it both precedes and follows.
    between = {
        (edge.source.partition("@")[2], edge.target.partition("@")[2])
        for edge in found.edges if edge.input == "k"
    }  # fmt: skip
    assert ("subject", "end") in between and ("rest", "subject") in between
    assert ("subject", "rest") in between and ("end", "subject") not in between
    for edge in found.edges:
        if edge.input not in ("k", "v"):
            assert edge.source.partition("@")[2] == edge.target.partition("@")[2]


def test_an_edge_to_a_node_without_a_position_acts_on_all_that_the_node_returns():
    model, prompts = induction(3.0), repeated()
    everywhere = "a0.h0@2->a1.h0<k>"
    each = [f"a0.h0@2->a1.h0@{query}<k>" for query in (2, 3, 4)]
    found = effects(edge_patching(model, prompts, B, [everywhere, *each], positions="each"))
    assert found[everywhere] == pytest.approx(found[each[-1].replace("<k>@4", "@4<k>")], abs=1e-6)
    assert found["a0.h0@2->a1.h0@2<k>"] == found["a0.h0@2->a1.h0@3<k>"] == 0
    whole = effects(edge_patching(model, prompts, B, ["a0.h0->a1.h0<k>"]))
    both = effects(edge_patching(model, prompts, B, ["a0.h0->a1.h0<k>"], positions="each"))
    assert whole == both


def test_the_position_of_a_head_may_stand_behind_its_input():
    one, other = (
        effects(edge_patching(induction(3.0), repeated(), B, [text], positions="each"))
        for text in ("a0.h0@2->a1.h0@4<k>", "a0.h0@2 -> a1.h0<k>@4")
    )
    assert one == other == {"a0.h0@2->a1.h0@4<k>": pytest.approx(-0.6, abs=0.2)}


def test_the_largest_edges_alone_have_the_same_effects_and_intervals():
    model, prompts = linear_decoder(), random_pairs(12)
    full = edge_attribution(model, prompts, ZERO, positions="each", batch_size=5)
    kept = edge_attribution(model, prompts, ZERO, positions="each", batch_size=5, top_k=30)
    largest = sorted(full.edges, key=lambda edge: -abs(edge.effect))[:30]
    assert {edge.id for edge in kept.edges} == {edge.id for edge in largest}
    by_id = {edge.id: edge for edge in full.edges}
    for edge in kept.edges:
        assert edge.effect == pytest.approx(by_id[edge.id].effect, abs=1e-7)
        assert (edge.low, edge.high) == pytest.approx(
            (by_id[edge.id].low, by_id[edge.id].high), abs=1e-6
        )
    fast = edge_attribution(model, prompts, ZERO, positions="each", top_k=30, confidence=None)
    assert effects(fast) == pytest.approx(effects(kept), abs=1e-7)
    assert fast.examples == kept.examples == 12


# ---- padding ------------------------------------------------------------------------------------


def test_each_example_has_its_own_columns_of_a_span():
    # Both texts are the same, but the second one begins a column later.
    model = linear_decoder()
    clean, corrupted = [1, 2, 3, 4], [1, 5, 3, 4]
    prompts = Prompts(
        torch.tensor([[*clean, 0], [0, *clean]]), torch.tensor([[*corrupted, 0], [0, *corrupted]])
    )
    subject = torch.tensor([[0, 1, 1, 0, 0], [0, 0, 1, 1, 0]]).bool()
    found = edge_patching(
        model, prompts, ZERO, ["input@subject->m0@subject"], positions={"subject": subject}
    )
    alone = [
        edge_patching(model, one, ZERO, [f"input@{at}->m0@{at}"], positions="each").edges[0].effect
        for one, at in zip(prompts.batches(1), (1, 2), strict=True)
    ]  # the other token of the span is the same in both texts
    assert found.edges[0].effect == pytest.approx(sum(alone) / 2, abs=1e-6)


# ---- circuits -----------------------------------------------------------------------------------


@pytest.mark.parametrize("positions", ["each", SPANS])
def test_the_whole_graph_is_the_model_and_the_empty_one_the_corrupted_run(positions):
    model, prompts = linear_decoder(), random_pairs()
    graph = edge_attribution(model, prompts, ZERO, positions=positions)
    with torch.no_grad():
        clean, corrupted = (ZERO(model(**x), prompts) for x in (prompts.clean, prompts.corrupted))
    whole = run_circuit(model, prompts, ZERO, graph, positions=positions)
    assert torch.allclose(whole, clean, atol=1e-5)
    nothing = dataclasses.replace(graph, edges=())
    empty = run_circuit(model, prompts, ZERO, nothing, positions=positions)
    assert torch.allclose(empty, corrupted, atol=1e-5)


def test_three_edges_at_their_positions_do_all_that_the_model_does():
    model, prompts = induction(200.0), repeated()
    assert run_circuit(model, prompts, B, INDUCTION, positions="each").item() == pytest.approx(1)
    for edge in INDUCTION.edges:
        rest = dataclasses.replace(INDUCTION, edges=[e for e in INDUCTION.edges if e != edge])
        without = run_circuit(model, prompts, B, rest, positions="each")
        assert without.item() == pytest.approx(1 / 5)
    elsewhere = graph_of(
        ("input@1", "a0.h0@2", "v"), ("a0.h0@2", "a1.h0@3", "k"), ("a1.h0@4", "logits@4", None)
    )  # the key is read by another query
    assert run_circuit(model, prompts, B, elsewhere, positions="each").item() == pytest.approx(
        1 / 5
    )


def test_exact_patching_is_the_whole_graph_without_one_edge():
    model = reversing(sharpness=2.0)
    prompts = Prompts(*(random_pairs(1).clean["input_ids"][:, at : at + 4] % 4 for at in (0, 2)))
    spans = {"subject": slice(1, 3), "end": -1}
    graph = edge_attribution(model, prompts, ZERO, positions=spans)
    active = [edge for edge in graph.edges if "0.h0" in edge.target and edge.input][::4]
    some = dataclasses.replace(graph, edges=active)
    patched = effects(METHODS["noising"](model, prompts, ZERO, some, positions=spans))
    whole = run_circuit(model, prompts, ZERO, graph, positions=spans)
    for edge in active:
        rest = dataclasses.replace(graph, edges=[one for one in graph.edges if one != edge])
        without = run_circuit(model, prompts, ZERO, rest, positions=spans)
        assert patched[edge.id] == pytest.approx(float((without - whole).mean()), abs=1e-6)
    assert max(map(abs, patched.values())) > 0.01


def test_minimality_goes_by_positions():
    model, prompts = induction(200.0), repeated()
    more = graph_of(*(edge.key for edge in INDUCTION.edges), ("input@4", "a1.h0@4", "q"))
    found = effects(minimality(model, prompts, B, more, positions="each"))
    needed = dict.fromkeys((edge.id for edge in INDUCTION.edges), pytest.approx(1 / 5 - 1))
    assert found == {**needed, "input@4->a1.h0@4<q>": 0}


def test_faithfulness_and_pruning_go_by_positions():
    model, prompts = induction(200.0), repeated()
    graph = METHODS["noising"](model, prompts, B, positions="each")
    circuit = graph.pruned(top_k=3)
    assert {edge.id for edge in circuit.edges} == {edge.id for edge in INDUCTION.edges}
    three = 3 / len(graph.edges) + 1e-9
    found = faithfulness(model, prompts, B, graph, shares=(0, three, 1), random=2, positions="each")
    assert found.edges == (0, 3, len(graph.edges))
    assert found.faithfulness == pytest.approx((0, 1, 1))
    assert found.without == pytest.approx((1, 0, 0))


# ---- errors -------------------------------------------------------------------------------------


def padded(mask: list[list[int]]) -> Prompts:
    ids = torch.ones(2, 5).long()
    inputs = {"input_ids": ids, "attention_mask": torch.tensor(mask)}
    return Prompts(inputs, inputs)


@pytest.mark.parametrize(
    ("positions", "said"),
    [
        ("every", "positions = 'every'"),
        ({}, "positions = {}"),
        ({"3": 1}, "'3' is no name of a span"),
        ({"a b": 1}, "'a b' is no name of a span"),
        ({"end": 9}, "'end' = 9: the texts have 6 columns"),
        ({"end": True}, "'end' = True: give positions"),
        ({"end": slice(6, 9)}, "'end' has no token of example 0"),
        ({"end": torch.ones(4, 5).bool()}, r"the mask of 'end' is torch.bool \[4, 5\]"),
        ({"a": [1, 2], "b": slice(2, 4)}, "has column 2 in 'a' and in 'b'"),
        ({"rest": [1, 2]}, "'rest' is the name of the tokens that are in no span"),
    ],
)
def test_positions_that_do_not_fit_are_refused(positions, said):
    with pytest.raises(InvalidArgumentError, match=said):
        edge_attribution(linear_decoder(), random_pairs(), ZERO, positions=positions)


def test_texts_of_unequal_lengths_have_no_positions_in_common():
    unequal = padded([[0, 1, 1, 1, 1], [0, 0, 1, 1, 1]])
    with pytest.raises(InvalidArgumentError, match="example 0 has 4 tokens and example 1 has 3"):
        edge_attribution(linear_decoder(), unequal, ZERO, positions="each")
    with pytest.raises(InvalidArgumentError, match="'end' has padding of example 1"):
        edge_patching(linear_decoder(), unequal, ZERO, positions={"end": [1]})


def test_edges_that_carry_nothing_are_refused():
    model, prompts = linear_decoder(), random_pairs()
    for edge in (
        "input@3->a0.h0@2<k>", "input@3->a0.h0@4<q>", "input@3->m0@4", "m0@1->logits@2"
    ):  # fmt: skip
        with pytest.raises(InvalidArgumentError, match="position of a node is where it writes"):
            edge_patching(model, prompts, ZERO, [edge], positions="each")
    with pytest.raises(InvalidArgumentError, match="no position or span '7': known are 0, 1, 2"):
        edge_patching(model, prompts, ZERO, ["input@7->m0@7"], positions="each")
    with pytest.raises(InvalidArgumentError, match="no position or span '3': give positions"):
        run_circuit(model, prompts, ZERO, graph_of(("input@3", "m0@3", None)))
    with pytest.raises(InvalidArgumentError, match="top_k = 0"):
        edge_attribution(model, prompts, ZERO, top_k=0)


def test_more_edges_than_a_graph_holds_are_refused(monkeypatch):
    from llm_instrumentation.interventions.paths import edge_space

    monkeypatch.setattr(edge_space, "MOST_EDGES", 500)
    model, prompts = linear_decoder(), random_pairs()
    for measure in (edge_attribution, edge_patching):
        with pytest.raises(InvalidArgumentError, match="a graph holds at most 500: give fewer"):
            measure(model, prompts, ZERO, positions="each")
    kept = edge_attribution(model, prompts, ZERO, positions="each", top_k=7)
    assert len(kept.edges) == 7
