"""Effects of edges and circuits, on decoders whose circuits are known."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from decoders_by_hand import (
    AttentionOnlyDecoder,
    graph_of,
    linear_decoder,
    reversing,
    sever,
    x_proportion,
)
from llm_instrumentation.analysis.causal_graph import CausalGraph, edge_auroc
from llm_instrumentation.errors import InvalidArgumentError, UnsupportedError
from llm_instrumentation.interventions import intervene, replace
from llm_instrumentation.interventions.circuits import faithfulness, minimality, run_circuit
from llm_instrumentation.interventions.decoders import decoder
from llm_instrumentation.interventions.edges import edge_attribution, edge_patching
from llm_instrumentation.interventions.metrics import Metric, accuracy, kl_divergence
from llm_instrumentation.interventions.prompts import Prompts

SHARE = Metric("mean share of x", lambda logits, batch: logits[:, :, 0].mean(1))
REVERSED = Metric(
    "mean logit of the reversed token",
    lambda logits, batch: logits.gather(2, batch.label("reversed")[..., None])[..., 0].mean(1),
)
METHODS = {
    "EAP": lambda *args: edge_attribution(*args, confidence=None),
    "EAP-IG": lambda *args: edge_attribution(*args, steps=4, confidence=None),
    "noising": lambda *args: edge_patching(*args, confidence=None),
    "denoising": lambda *args: edge_patching(*args, direction="denoising", confidence=None),
}


def with_x() -> Prompts:
    """Texts of the tokens 0 to 3, and others. Token 3 is x."""
    return Prompts(
        torch.tensor([[3, 1, 3, 0, 3], [0, 3, 3, 1, 2], [3, 0, 0, 3, 3]]),
        torch.tensor([[1, 1, 0, 0, 3], [0, 2, 3, 1, 1], [3, 0, 0, 0, 3]]),
    )


def to_reverse(*, positions: bool = False) -> Prompts:
    """Texts whose tokens, or whose positions, are others in the corrupted run."""
    ids = torch.tensor([[0, 1, 2, 3], [2, 3, 0, 1], [3, 1, 0, 2], [1, 0, 3, 2]])
    in_order = torch.arange(4).expand(4, 4)
    clean = {"input_ids": ids, "position_ids": in_order}
    other = {**clean, "input_ids": (ids + 1) % 4}
    if positions:
        other = {**clean, "position_ids": in_order.roll(1, 1)}
    return Prompts(clean, other, labels={"reversed": ids.flip(1)})


def effects(graph: CausalGraph) -> dict[str, float]:
    return {edge.id: edge.effect for edge in graph.edges}


@pytest.mark.parametrize("method", METHODS)
def test_the_circuit_of_x_proportion_is_found(method):
    model, circuit = x_proportion()
    assert torch.equal(
        model(torch.tensor([[3, 1, 3, 0]]))[0, :, 0], torch.tensor([1, 1 / 2, 2 / 3, 1 / 2])
    )
    found = METHODS[method](model, with_x(), SHARE)
    assert len(found.edges) == decoder(model).size == 46
    assert edge_auroc(found, circuit) == 1.0
    assert {edge.id for edge in found.edges if edge.effect} == {edge.id for edge in circuit.edges}


@pytest.mark.parametrize("method", METHODS)
def test_a_severed_path_has_no_effect_at_all(method):
    model, _ = x_proportion(heads=(0, 1))
    _, circuit = x_proportion(heads=(1,))
    found = METHODS[method](sever(model, 1, 0), with_x(), SHARE)
    assert edge_auroc(found, circuit) == 1.0
    assert effects(found)["m0->a1.h0<v>"] == effects(found)["a1.h0->logits"] == 0.0


@pytest.mark.parametrize("method", METHODS)
def test_the_circuit_of_reversing_is_found(method):
    model = reversing()
    assert torch.equal(model(torch.tensor([[0, 1, 2, 3]])).argmax(-1), torch.tensor([[3, 2, 1, 0]]))
    found = METHODS[method](model, to_reverse(), REVERSED)
    circuit = graph_of(("input", "a0.h0", "v"), ("a0.h0", "logits", None))
    assert edge_auroc(found, circuit) == 1.0
    severed = METHODS[method](sever(reversing(), 0, 0), to_reverse(), REVERSED)
    assert set(effects(severed).values()) == {0.0}


@pytest.mark.parametrize("method", METHODS)
def test_layers_may_have_attention_alone(method):
    model = reversing(kind=AttentionOnlyDecoder)
    assert decoder(model).sources == ["input", "a0.h0", "a0.h1", "a1.h0", "a1.h1"]
    found = METHODS[method](model, to_reverse(), REVERSED)
    with_mlps = METHODS[method](reversing(), to_reverse(), REVERSED)
    shared = {edge.id: edge.effect for edge in with_mlps.edges if "m" not in edge.id}
    assert effects(found) == pytest.approx(shared, abs=1e-6)
    whole = run_circuit(model, to_reverse(), REVERSED, found)
    assert torch.allclose(whole, REVERSED(model(**to_reverse().clean), to_reverse()))


@pytest.mark.parametrize("method", ["EAP", "EAP-IG", "noising"])
def test_positions_act_through_queries_and_keys(method):
    # Keys say where they are, queries where they look. Corrupted positions change both.
    circuit = graph_of(("input", "a0.h0", "q"), ("input", "a0.h0", "k"), ("a0.h0", "logits", None))
    found = METHODS[method](reversing(sharpness=3.0), to_reverse(positions=True), REVERSED)
    assert edge_auroc(found, circuit) == 1.0


def test_restoring_one_of_two_edges_that_are_needed_does_nothing():
    model, prompts = reversing(sharpness=3.0), to_reverse(positions=True)
    edges = ["input->a0.h0<q>", "input->a0.h0<k>", "input->a0.h0"]
    found = effects(edge_patching(model, prompts, REVERSED, edges, direction="denoising"))
    assert found["input->a0.h0<q>"] == found["input->a0.h0<k>"] == 0
    assert found["input->a0.h0"] > 0.8


def test_gradients_on_the_way_see_through_a_saturated_softmax():
    prompts, edge = to_reverse(positions=True), "input->a0.h0<q>"
    model = reversing(sharpness=40.0)
    exact = effects(edge_patching(model, prompts, REVERSED, [edge]))[edge]
    assert exact == pytest.approx(-1, abs=1e-4)
    eap = effects(edge_attribution(model, prompts, REVERSED))[edge]
    integrated = effects(edge_attribution(model, prompts, REVERSED, steps=20))[edge]
    assert abs(eap) < 1e-6
    assert integrated < -0.2


def random_pairs(examples: int = 5) -> Prompts:
    torch.manual_seed(1)
    clean = torch.randint(6, (examples, 7))
    corrupted = clean.clone()
    corrupted[:, 2:5] = torch.randint(6, (examples, 3))
    return Prompts(clean, corrupted)


LAST = Metric("logit of token 0", lambda logits, batch: logits[:, -1, 0])


def test_on_a_linear_model_attribution_is_exact():
    model, prompts = linear_decoder(), random_pairs()
    exact = effects(edge_patching(model, prompts, LAST, batch_size=64))
    for steps in (None, 3):
        found = effects(edge_attribution(model, prompts, LAST, steps=steps, batch_size=2))
        assert found == pytest.approx(exact, abs=1e-5)
    assert max(map(abs, exact.values())) > 0.01
    restored = effects(edge_patching(model, prompts, LAST, direction="denoising"))
    assert restored == pytest.approx({name: -one for name, one in exact.items()}, abs=1e-5)


def test_on_a_linear_model_the_edges_of_a_node_add_up_to_its_effect():
    model, prompts = linear_decoder(), random_pairs()
    found = edge_attribution(model, prompts, LAST)
    kept = {}

    def effect_of(layer: str, values: torch.Tensor) -> float:
        with torch.no_grad():
            with intervene(model, replace(layer, values)):
                patched = model(prompts.clean["input_ids"])
            return float((LAST(patched, prompts) - LAST(model(**prompts.clean), prompts)).mean())

    handle = model.layers[0].mlp.register_forward_hook(
        lambda module, args, output: kept.update({"m0": output.detach()})
    )
    model(**prompts.corrupted)
    handle.remove()
    node = effect_of("layers.0.mlp", kept["m0"])
    assert node == pytest.approx(sum(e.effect for e in found.edges if e.target == "m0"), abs=1e-5)
    assert node == pytest.approx(sum(e.effect for e in found.edges if e.source == "m0"), abs=1e-5)
    assert found.corrupted - found.clean == pytest.approx(
        sum(e.effect for e in found.edges if e.target == "logits"), abs=1e-5
    )


def test_an_edge_into_a_head_enters_all_of_its_inputs():
    model, prompts = linear_decoder(), random_pairs()
    found = effects(edge_patching(model, prompts, LAST, ["m0->a1.h0", "m0->a1.h0<v>"]))
    assert found["m0->a1.h0"] == pytest.approx(found["m0->a1.h0<v>"], abs=1e-6)


def test_effects_are_means_with_intervals_of_the_examples():
    model, prompts = linear_decoder(), random_pairs(12)
    edges = ["input->m0", "a0.h1->logits"]
    found = edge_patching(model, prompts, LAST, edges, batch_size=5)
    alone = [
        effects(edge_patching(model, one, LAST, edges))["input->m0"] for one in prompts.batches(1)
    ]
    assert found.examples == 12
    assert found.edges[0].effect == pytest.approx(sum(alone) / 12, abs=1e-6)
    assert found.edges[0].low < found.edges[0].effect < found.edges[0].high
    assert edge_patching(model, next(prompts.batches(1)), LAST, edges).edges[0].low is None


def test_effects_are_tested_and_adjusted_for_their_number():
    pytest.importorskip("scipy")
    model, circuit = x_proportion()
    prompts = Prompts(torch.full((12, 5), 3), torch.zeros(12, 5).long())
    edges = ["m0->a1.h0<v>", "input->logits"]
    assert edge_patching(model, prompts, SHARE, edges).edges[0].p_value is None
    found = edge_patching(model, prompts, SHARE, edges, p_values="holm")
    # Twice the share of the one flip of twelve signs that is as extreme, on each side.
    assert {e.id: e.p_value for e in found.edges} == {edges[0]: 2 * 2 / 2**12, edges[1]: 1}
    needed = minimality(model, prompts, SHARE, circuit, p_values="fdr_bh")
    assert [edge.p_value for edge in needed.edges] == [2 / 2**12] * 3


# ---- circuits -----------------------------------------------------------------------------------


def test_the_whole_graph_is_the_model_and_the_empty_one_the_corrupted_run():
    model, prompts = linear_decoder(), random_pairs()
    graph = decoder(model)
    with torch.no_grad():
        clean, corrupted = (LAST(model(**x), prompts) for x in (prompts.clean, prompts.corrupted))
    for ablation in ("corrupted", "mean", "zero"):
        whole = run_circuit(model, prompts, LAST, graph.graph(), ablation=ablation, batch_size=2)
        assert torch.allclose(whole, clean, atol=1e-5)
    assert torch.allclose(run_circuit(model, prompts, LAST, graph.graph(())), corrupted, atol=1e-6)
    zero = run_circuit(model, prompts, LAST, graph.graph(()), ablation="zero")
    assert torch.equal(zero, torch.zeros(5))
    mean = run_circuit(model, prompts, LAST, graph.graph(()), ablation="mean")
    assert torch.allclose(mean, mean[:1].expand(5)) and mean.abs().min() > 1e-3


def test_the_true_circuit_does_all_that_the_model_does():
    model, circuit = x_proportion()
    whole = run_circuit(model, with_x(), SHARE, circuit)
    assert torch.allclose(whole, SHARE(model(**with_x().clean), with_x()))
    for edge in circuit.edges:
        rest = dataclasses.replace(circuit, edges=tuple(e for e in circuit.edges if e != edge))
        corrupted = SHARE(model(**with_x().corrupted), with_x())
        assert torch.allclose(run_circuit(model, with_x(), SHARE, rest), corrupted)


def test_faithfulness_of_the_true_circuit():
    model, _ = x_proportion()
    graph = edge_attribution(model, with_x(), SHARE)
    three = 3 / len(graph.edges) + 1e-9
    found = faithfulness(model, with_x(), SHARE, graph, shares=(0, three, 1), random=4)
    assert found.edges == (0, 3, 46)
    assert found.faithfulness == pytest.approx((0, 1, 1))
    assert found.without == pytest.approx((1, 0, 0))  # without no edge the model is whole
    assert found.random.shape == (4, 3)
    assert found.random[:, 0] == pytest.approx(0) and found.random[:, 2] == pytest.approx(1)
    assert found.random[:, 1].max() < 0.9
    assert found.cpr == pytest.approx(three / 2 + 1 - three)
    assert found.cmd == pytest.approx(three / 2)
    assert list(found.to_pandas().columns) == [
        "share", "edges", "value", "faithfulness", "without", "random",
    ]  # fmt: skip
    assert "CPR" in repr(found)


def test_minimality_tells_the_edges_that_a_circuit_does_not_need():
    model, circuit = x_proportion()
    more = graph_of(*(edge.key for edge in circuit.edges), ("input", "logits", None))
    found = minimality(model, with_x(), SHARE, more)
    assert effects(found)["input->logits"] == 0
    with torch.no_grad():
        corrupted = SHARE(model(**with_x().corrupted), with_x()).mean()
        clean = SHARE(model(**with_x().clean), with_x()).mean()
    for edge in circuit.edges:
        assert effects(found)[edge.id] == pytest.approx(float(corrupted - clean), abs=1e-6)


def test_exact_patching_is_the_whole_graph_without_one_edge():
    model = reversing(sharpness=2.0)
    prompts = to_reverse(positions=True)
    patched = edge_patching(model, prompts, REVERSED, confidence=None)
    removed = minimality(model, prompts, REVERSED, decoder(model).graph(), confidence=None)
    assert effects(patched) == pytest.approx(effects(removed), abs=1e-6)


def test_a_distance_is_flat_at_the_clean_run():
    model, prompts = linear_decoder(), random_pairs()
    divergence = kl_divergence(model, prompts)
    with pytest.warns(RuntimeWarning, match="no gradient where the model runs on the clean inputs"):
        found = edge_attribution(model, prompts, divergence)
    assert max(map(abs, effects(found).values())) < 1e-6
    assert max(effects(edge_attribution(model, prompts, divergence, steps=5)).values()) > 1e-3


# ---- errors -------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["EAP", "EAP-IG"])
def test_gradients_of_edges_do_not_depend_on_the_callers_mode(method):
    model, prompts = linear_decoder(), with_x()
    expected = METHODS[method](model, prompts, SHARE)
    with torch.no_grad():
        found = METHODS[method](model, prompts, SHARE)
    assert effects(found) == effects(expected)


def test_what_cannot_be_measured_is_refused():
    model, prompts = linear_decoder(), random_pairs()
    with pytest.raises(UnsupportedError, match="has no gradient"):
        labelled = dataclasses.replace(prompts, labels={"correct": torch.zeros(5).long()})
        edge_attribution(model, labelled, accuracy())
    with (
        torch.inference_mode(),
        pytest.raises(InvalidArgumentError, match=r"outside of torch.inference_mode\(\)"),
    ):
        edge_attribution(model, prompts, LAST)
    with pytest.raises(InvalidArgumentError, match="steps = 0"):
        edge_attribution(model, prompts, LAST, steps=0)
    for edge in ("m1->a0.h0<v>", "m0->a1.h7<v>", "m0->m0", "a0.h0@3->logits"):
        with pytest.raises(InvalidArgumentError, match="the model has no edge"):
            edge_patching(model, prompts, LAST, [edge])
    with pytest.raises(InvalidArgumentError, match="is no edge"):
        edge_patching(model, prompts, LAST, ["m0 to logits"])
    with pytest.raises(InvalidArgumentError, match="edges is empty"):
        edge_patching(model, prompts, LAST, [])
    with pytest.raises(InvalidArgumentError, match="direction = 'both'"):
        edge_patching(model, prompts, LAST, direction="both")
    with pytest.raises(InvalidArgumentError, match="ablation = 'noise'"):
        run_circuit(model, prompts, LAST, decoder(model).graph(), ablation="noise")
    with pytest.raises(InvalidArgumentError, match="nothing that a circuit could do"):
        same = Prompts(prompts.clean, prompts.clean)
        faithfulness(model, same, LAST, edge_attribution(model, same, LAST))
    with pytest.raises(InvalidArgumentError, match="has 3 edges, the model 46"):
        faithfulness(x_proportion()[0], with_x(), SHARE, x_proportion()[1])
    with pytest.raises(InvalidArgumentError, match="rising numbers"):
        faithfulness(model, prompts, LAST, decoder(model).graph(), shares=(0.5, 0.1))
