"""Experts of mixtures as nodes: what they write, what they read, and what is refused."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from decoders_by_hand import HandMadeDecoder
from edges_by_hooks import EXPERTS, METRIC, Plain, hooked, made, pairs
from llm_instrumentation import ActivationReader, capture_activations, interventions
from llm_instrumentation.analysis.causal_graph import CausalGraph, load_graph, save_graph
from llm_instrumentation.analysis.reader import UnknownActivationError
from llm_instrumentation.errors import InvalidArgumentError, UnsupportedError
from llm_instrumentation.interventions import (
    Edit,
    Site,
    activation_patching,
    add,
    apply,
    attribution_patching,
    intervene,
    replace,
    sites_of,
    zero,
)
from llm_instrumentation.interventions.circuits import faithfulness, minimality, run_circuit
from llm_instrumentation.interventions.decoders import decoder
from llm_instrumentation.interventions.edges import edge_attribution, edge_patching
from llm_instrumentation.interventions.experts import ExpertLayout, register_experts
from llm_instrumentation.interventions.metrics import Metric
from llm_instrumentation.interventions.paths.residuals import written
from llm_instrumentation.interventions.prompts import Prompts
from torch import Tensor, nn

MIXTURES = ("mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "flex_olmo")


def effects(graph: CausalGraph) -> dict[str, float]:
    return {edge.id: edge.effect for edge in graph.edges}


# ---- a router whose choices are known ----------------------------------------------------------


class Router(nn.Module):
    """Sends token 1 to expert 0 with the weight 0.5, and token 2 to expert 1 with 0.25."""

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        scores = torch.stack([0.5 * tokens[:, 1], 0.25 * tokens[:, 2]], -1)
        weights, chosen = scores.topk(1)
        return scores, weights, chosen


class Constants(nn.Module):
    """Expert 0 writes 8 to column 8, and expert 1 writes 12 to column 9."""

    num_experts = 2

    def forward(self, tokens: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        found = torch.zeros_like(tokens)
        for row in range(len(tokens)):
            for number, weight in zip(chosen[row].tolist(), weights[row], strict=True):
                found[row, 8 + number] += (8, 12)[number] * weight
        return found


class HandMadeMixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router, self.all = Router(), Constants()

    def forward(self, received: Tensor) -> Tensor:
        tokens = received.flatten(0, 1)
        _, weights, chosen = self.router(tokens)
        return self.all(tokens, chosen, weights).view(received.shape)


register_experts(HandMadeMixture, ExpertLayout("router", "all"))


@torch.no_grad()
def two_experts() -> HandMadeDecoder:
    model = HandMadeDecoder(4, 4, 10, layers=1)
    model.layers[0].mlp = HandMadeMixture()
    model.unembed.weight[0, 8:] = 1
    return model.eval()


LOGIT = Metric("logit 0", lambda logits, batch: logits[:, -1, 0])


def ones_and_twos() -> Prompts:
    """Texts of token 1, and of token 2."""
    return Prompts(torch.full((2, 3), 1), torch.full((2, 3), 2))


def test_a_change_of_the_choice_whose_numbers_are_known():
    model, prompts = two_experts(), ones_and_twos()
    found = edge_attribution(model, prompts, LOGIT, experts=True)
    assert found.clean == 0.5 * 8 and found.corrupted == 0.25 * 12
    assert found.notes["routing changes"] == {"m0": 1.0}
    # What experts write counts in full. Of what they read, the gradient does not know the choice.
    got = effects(found)
    assert got["m0.e0->logits"] == -4 and got["m0.e1->logits"] == 3
    assert got["input->m0.e0"] == -4  # the weight of expert 0 is 0.5 * column 1, which becomes 0
    assert got["input->m0.e1"] == 0
    exact = effects(edge_patching(model, prompts, LOGIT, experts=True))
    assert exact["m0.e0->logits"] == exact["input->m0.e0"] == -4
    assert exact["m0.e1->logits"] == exact["input->m0.e1"] == 3
    back = edge_patching(
        model, prompts, LOGIT, ["input->m0.e1"], direction="denoising", experts=True
    )
    assert effects(back) == {"input->m0.e1": -3}


def test_a_circuit_chooses_experts_by_what_each_of_them_reads():
    model, prompts = two_experts(), ones_and_twos()
    graph = edge_attribution(model, prompts, LOGIT, experts=True)
    into_experts = {"input->m0.e0": -4, "input->m0.e1": 3}
    for kept, expected in (
        ((), 3), (("input->m0.e0",), 7), (("input->m0.e1",), 0), (tuple(into_experts), 4),
    ):  # fmt: skip
        edges = [e for e in graph.edges if e.id in kept or e.source.startswith("m0.")]
        circuit = dataclasses.replace(graph, edges=edges)
        alone = run_circuit(model, prompts, LOGIT, circuit, experts=True)
        assert alone.tolist() == [expected] * 2
    small = minimality(model, prompts, LOGIT, graph, experts=True)
    assert {k: v for k, v in effects(small).items() if k in into_experts} == into_experts


# ---- architectures, beside plain hooks ---------------------------------------------------------


class PlainExperts(Plain):
    """Effects of edges of experts, with the experts written down once more."""

    def __init__(self, name: str) -> None:
        super().__init__(name, made(name), pairs())

    def block(self, layer: int) -> Any:
        return self.model.get_submodule(self.of_layer(layer, "mlp"))

    def parts(self, layer: int, received: Tensor) -> dict[str, Tensor]:
        """The part of each expert in what a block returns, from its weights."""
        block = self.block(layer)
        experts, config = block.experts, self.model.config
        scores = (received @ block.gate.weight.T).float().softmax(-1)
        top = scores.topk(config.num_experts_per_tok)
        weights = torch.zeros_like(scores).scatter(-1, top.indices, top.values)
        if getattr(config, "norm_topk_prob", True):  # Mixtral has no such field, and does it
            weights = weights / top.values.sum(-1, keepdim=True)
        found = {}
        for number in range(experts.num_experts):
            gate, up = (received @ experts.gate_up_proj[number].T).chunk(2, -1)
            output = (nn.functional.silu(gate) * up) @ experts.down_proj[number].T
            found[f"e{number}"] = output * weights[..., number, None].to(received.dtype)
        if hasattr(block, "shared_expert"):
            one = block.shared_expert
            output = one.down_proj(
                nn.functional.silu(one.gate_proj(received)) * one.up_proj(received)
            )
            found["shared"] = output * (received @ block.shared_expert_gate.weight.T).sigmoid()
        return found

    def change(self, source: str) -> Tensor:
        node, _, expert = source.partition(".")
        if node[0] != "m" or not expert:
            return super().change(source)
        layer = int(node[1:])
        clean, other = (
            self.parts(layer, self.seen(inputs, self.of_layer(layer, "mlp"), "in"))
            for inputs in (self.prompts.clean, self.prompts.corrupted)
        )
        change = (other[expert] - clean[expert]).detach()
        if not self.names.post_mlp:
            return change
        norm = self.model.get_submodule(self.of_layer(layer, self.names.post_mlp))
        with torch.no_grad():
            together = sum(clean.values())
            return norm(together + change) - norm(together)

    def effect(self, source: str, s: int, target: str, kind: str, t: int) -> Tensor:
        node, _, expert = target.partition(".")
        if node[0] != "m" or not expert:
            return super().effect(source, s, target, kind, t)
        layer, base, change = int(node[1:]), self.prompts.clean, self.change(source)
        mlp = self.of_layer(layer, "mlp")

        def add(residual: Tensor) -> Tensor:
            residual = residual.clone()
            residual[:, s] += change[:, s]
            return residual

        received = self.seen(base, mlp, "in")
        changed = self.seen(base, mlp, "in", (self.reads(layer, "m"), "in", add))
        before, after = (self.parts(layer, one)[expert] for one in (received, changed))
        new = self.seen(base, mlp, "out") + (after - before)
        return self.run(base, (mlp, "out", self.put(new, t, slice(None)))) - self.run(base)

    def gradient(self, source: str, target: str) -> float:
        """The effect by the gradient of the metric at what an expert or the logits read."""
        node, _, expert = target.partition(".")
        last = self.names.last
        layer = int(node[1:]) if expert else 0
        mlp = self.of_layer(layer, "mlp")
        kept: list[Tensor] = []

        def leaf(value: Tensor) -> Tensor:
            kept.append(value.detach().requires_grad_())
            return kept[0]

        handle = self.model.get_submodule(mlp if expert else last)
        hook = (
            handle.register_forward_hook(lambda _, args, output: leaf(output))
            if expert
            else handle.register_forward_pre_hook(lambda _, args: (leaf(args[0]),))
        )
        METRIC(self.model(**self.prompts.clean), self.prompts).sum().backward()
        hook.remove()
        gradient = kept[0].grad
        assert gradient is not None
        if expert:
            place = self.reads(layer, "m")
            residual = self.seen(self.prompts.clean, place, "in").requires_grad_()
            norm = self.model.get_submodule(place) if self.names.second else nn.Identity()
            part = self.parts(layer, norm(residual))[expert]
            (gradient,) = torch.autograd.grad(part, residual, gradient)
        return float((gradient * self.change(source)).sum((-1, -2)).mean())


@pytest.fixture(scope="module", params=MIXTURES)
def plain(request: pytest.FixtureRequest) -> PlainExperts:
    return PlainExperts(request.param)


def nodes_of(plain: PlainExperts, layer: int) -> list[str]:
    shared = hasattr(plain.block(layer), "shared_expert")
    return [*(f"m{layer}.e{number}" for number in range(4)), *[f"m{layer}.shared"] * shared]


def test_the_parts_of_a_block_add_up_to_what_it_returns(plain):
    graph = decoder(plain.model, experts=True)
    run, _ = written(graph, plain.prompts.clean, check=True)
    for writers, value in zip(graph.writers, run.values, strict=True):
        if writers.kind != "experts":
            continue
        block = plain.of_layer(writers.layer, "mlp")
        returned = plain.seen(plain.prompts.clean, block, "out")
        parts = value.unflatten(-1, (len(writers.nodes), -1))
        torch.testing.assert_close(parts.sum(-2), returned, rtol=1e-6, atol=1e-9)
        by_hand = plain.parts(writers.layer, plain.seen(plain.prompts.clean, block, "in"))
        assert list(writers.nodes) == nodes_of(plain, writers.layer)
        torch.testing.assert_close(
            parts, torch.stack(list(by_hand.values()), -2).detach(), rtol=1e-5, atol=1e-9
        )
    assert [one.kind for one in decoder(plain.model).writers].count("mlp") == 2  # the default


def test_exact_effects_are_those_of_plain_hooks(plain):
    first, second = nodes_of(plain, 0), nodes_of(plain, 1)
    edges = [
        *(("input", 2, node, "", 2) for node in first),
        *(("a0.h1", 2, node, "", 2) for node in first),
        *((node, 2, "logits", "", 2) for node in first),
        *((node, 2, "a1.h1", "v", 5) for node in first),
        *((first[1], 2, node, "", 2) for node in second),
        *((node, 3, "logits", "", 3) for node in second),
    ]  # fmt: skip
    texts = [f"{a}@{s}->{b}@{t}" + (f"<{kind}>" if kind else "") for a, s, b, kind, t in edges]
    found = edge_patching(
        plain.model, plain.prompts, METRIC, texts, positions="each", experts=True, confidence=None
    )
    got = effects(found)
    expected = {
        text: float(plain.effect(*edge).mean()) for text, edge in zip(texts, edges, strict=True)
    }
    for text in texts:
        assert got[text] == pytest.approx(expected[text], rel=1e-5, abs=1e-12), text
    assert sum(abs(value) > 1e-6 for value in expected.values()) > len(edges) / 3


def test_attribution_is_the_gradient_by_hand(plain):
    found = edge_attribution(plain.model, plain.prompts, METRIC, experts=True, confidence=None)
    got, expected = effects(found), {}
    for source in ("input", "a0.h1", *nodes_of(plain, 0)):
        for target in ("logits", *nodes_of(plain, 1)):
            expected[f"{source}->{target}"] = plain.gradient(source, target)
    for text, value in expected.items():
        assert got[text] == pytest.approx(value, rel=1e-5, abs=1e-12), text
    assert sum(abs(value) > 1e-5 for value in expected.values()) > len(expected) / 2


@pytest.mark.parametrize("name", ["qwen2_moe", "flex_olmo"])
def test_circuits_are_the_model_without_their_edges(name):
    plain = PlainExperts(name)
    model, prompts, spans = plain.model, plain.prompts, {"changed": slice(1, 3), "end": -1}
    for positions, at in ((None, ("", "")), (spans, ("@changed", "@end"))):
        graph = edge_attribution(
            model, prompts, METRIC, positions=positions, experts=True, confidence=None
        )
        texts = [
            f"input{at[0]}->m0.e1{at[0]}", f"m0.e2{at[0]}->m1.e0{at[0]}",
            f"m0.e3{at[0]}->a1.h2{at[1]}<v>", f"m1.e1{at[1]}->logits{at[1]}",
        ]  # fmt: skip
        exact = edge_patching(
            model, prompts, METRIC, texts, positions=positions, experts=True, confidence=None
        )
        both = {"positions": positions, "experts": True}
        whole = run_circuit(model, prompts, METRIC, graph, **both)
        empty = run_circuit(model, prompts, METRIC, dataclasses.replace(graph, edges=()), **both)
        torch.testing.assert_close(whole, plain.run(prompts.clean))
        torch.testing.assert_close(empty, plain.run(prompts.corrupted))
        for edge in exact.edges:
            rest = dataclasses.replace(graph, edges=[e for e in graph.edges if e.key != edge.key])
            without = run_circuit(model, prompts, METRIC, rest, **both)
            difference = float((without - whole).mean())
            assert difference == pytest.approx(edge.effect, rel=1e-5, abs=1e-9)
        assert max(abs(edge.effect) for edge in exact.edges) > 1e-4


def test_an_expert_that_is_taken_away(plain):
    model, prompts = plain.model, plain.prompts
    graph = decoder(model, experts=True).graph()
    rest = dataclasses.replace(graph, edges=[e for e in graph.edges if e.source != "m1.e2"])
    without = run_circuit(model, prompts, METRIC, rest, ablation="zero", experts=True)
    mlp = plain.of_layer(1, "mlp")
    part = plain.parts(1, plain.seen(prompts.clean, mlp, "in"))["e2"]
    torch.testing.assert_close(without, plain.run(prompts.clean, (mlp, "out", lambda x: x - part)))


@pytest.mark.parametrize("name", ["qwen2_moe", "flex_olmo"])
def test_positional_scores_add_up_to_those_of_edges(name):
    model, prompts = made(name), pairs()
    common: dict[str, Any] = {"experts": True, "confidence": None, "steps": 2}
    whole = effects(edge_attribution(model, prompts, METRIC, **common))
    found = edge_attribution(model, prompts, METRIC, positions="each", **common)
    sums = dict.fromkeys(whole, 0.0)
    for edge in found.edges:
        source, target = (one.partition("@")[0] for one in (edge.source, edge.target))
        sums[f"{source}->{target}" + (f"<{edge.input}>" if edge.input else "")] += edge.effect
    assert sums == pytest.approx(whole, abs=1e-6)


@pytest.mark.parametrize("name", MIXTURES)
def test_attribution_is_exact_for_changes_that_change_no_choice(name):
    model = made(name)
    torch.manual_seed(2)
    clean = torch.randn(2, 5, 32, dtype=torch.float64)
    prompts = Prompts(
        {"inputs_embeds": clean}, {"inputs_embeds": clean + 1e-4 * torch.randn_like(clean)}
    )
    common: dict[str, Any] = {"experts": True, "confidence": None}
    found = edge_attribution(model, prompts, METRIC, **common)
    assert set(found.notes["routing changes"].values()) == {0.0}
    some = [edge for edge in found.edges if ".e" in edge.id or ".shared" in edge.id]
    exact = edge_patching(model, prompts, METRIC, some, batch_size=64, **common)
    got, wanted = (torch.tensor(list(effects(one).values())) for one in (
        dataclasses.replace(found, edges=some), exact
    ))  # fmt: skip
    assert (got - wanted).abs().max() < 0.02 * wanted.abs().max()


def test_an_expert_without_weights_has_no_edges_to_others():
    model = made("qwen3_moe")
    model.model.layers[0].mlp.experts.down_proj.data[1] = 0
    found = edge_attribution(model, pairs(), METRIC, experts=True, confidence=None)
    for node, alone in (("m0.e1", True), ("m0.e2", False)):
        values = [e.effect for e in found.edges if node in (e.source, e.target)]
        assert len(values) > 15 and (set(values) == {0.0}) == alone
    some = ["m0.e1->logits", "m0.e1->a1.h0<k>", "m0.e1->m1.e0", "input->m0.e1"]
    exact = edge_patching(model, pairs(), METRIC, some, experts=True)
    assert set(effects(exact).values()) == {0.0}


def test_a_layer_without_experts_stays_one_node():
    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(**{**EXPERTS, "mlp_only_layers": [0]})
    model = transformers.Qwen3MoeForCausalLM(config).eval()
    found = edge_attribution(model, pairs(), METRIC, experts=True)
    assert {node.id for node in found.nodes if node.kind in ("mlp", "expert")} == {
        "m0", "m1.e0", "m1.e1", "m1.e2", "m1.e3",
    }  # fmt: skip
    assert found.notes["routing changes"].keys() == {"m1"}
    faithful = faithfulness(model, pairs(), METRIC, found, shares=(0.1, 1), random=1, experts=True)
    assert faithful.faithfulness[-1] == pytest.approx(1, abs=1e-4)


def test_padding_on_the_left_changes_no_effect_and_no_share_of_tokens():
    model, common = made("mixtral"), {"experts": True, "confidence": None}
    short, long = (
        edge_attribution(model, prompts, METRIC, **common)
        for prompts in (pairs(), pairs(left=True))
    )
    assert effects(long) == pytest.approx(effects(short), abs=1e-6)
    assert long.notes["routing changes"] == short.notes["routing changes"]


def test_half_precision_and_other_kernels():
    graph = decoder(made("qwen2_moe"), experts=True).graph()
    some = [edge for edge in graph.edges if ".e" in edge.source or "m1." in edge.target]
    common: dict[str, Any] = {"experts": True, "confidence": None, "batch_size": 128}
    exact = edge_patching(made("qwen2_moe"), pairs(), METRIC, some, **common)
    for implementation in ("eager", "batched_mm", "grouped_mm"):
        model = made("qwen2_moe").float()
        model.config._experts_implementation = implementation
        single = edge_patching(model, pairs(), METRIC, some, **common)
        assert effects(single) == pytest.approx(effects(exact), abs=1e-4)
    half = edge_patching(made("qwen2_moe").bfloat16(), pairs(), METRIC, some, **common)
    values = [torch.tensor(list(effects(one).values())) for one in (exact, half)]
    assert torch.corrcoef(torch.stack(values))[0, 1] > 0.9


def test_graphs_with_experts_are_kept_and_drawn(tmp_path):
    found = edge_attribution(
        made("qwen2_moe"), pairs(), METRIC, positions={"changed": slice(1, 3)}, experts=True
    ).pruned(top_k=100)
    node = next(node for node in found.nodes if node.kind == "expert" and node.expert)
    assert (node.layer, node.head) == (int(node.id[1]), None) and node.span
    for name in ("graph.json", "graph.graphml"):
        save_graph(found, tmp_path / name)
        assert load_graph(tmp_path / name) == found
    save_graph(found, tmp_path / "graph.html")
    assert node.id in (tmp_path / "graph.html").read_text()


# ---- refusals ----------------------------------------------------------------------------------


def with_block(change: Any) -> nn.Module:
    """A Qwen2-MoE whose blocks with experts are of another class, with another part."""
    model = made("qwen2_moe")
    for layer in model.model.layers:
        change(layer.mlp)
    return model


def renamed(name: str, layout: ExpertLayout | None) -> Any:
    kind = type(name, (nn.Module,), {
        "forward": transformers.models.qwen2_moe.modeling_qwen2_moe.Qwen2MoeSparseMoeBlock.forward
    })  # fmt: skip
    if layout is not None:
        register_experts(kind, layout)

    def change(block: nn.Module) -> None:
        block.__class__ = kind

    return change


class OneByOne(nn.ModuleList):
    def forward(self, tokens: Tensor, *_: Tensor) -> Tensor:
        return tokens


class Scores(nn.Module):
    def forward(self, tokens: Tensor) -> Tensor:
        return tokens


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (renamed("UnknownMoe", None), "it is not known where UnknownMoe has its experts"),
        (
            renamed("SharedForgotten", ExpertLayout()),
            r"returns something else than the sum .* so SharedForgotten is not as its layout says",
        ),
        (renamed("OtherNames", ExpertLayout("router")), r"OtherNames\) is not as its layout"),
        (
            lambda block: setattr(block, "experts", OneByOne()),
            r"Qwen2MoeSparseMoeBlock\) has a module for each expert.*install transformers>=5",
        ),
        (lambda block: setattr(block, "experts", nn.Identity()), "Identity does not say the num"),
    ],
)
def test_blocks_that_cannot_be_told_apart_are_refused_by_name(change, message):
    model = with_block(change)
    with pytest.raises(UnsupportedError, match=message):
        edge_patching(model, pairs(), METRIC, "input->logits", experts=True)


def test_a_router_of_another_kind_is_refused():
    model = two_experts()
    block = model.layers[0].mlp
    block.scores = Scores()
    register_experts("OtherRouter", ExpertLayout("scores", "all"))
    block.__class__ = type("OtherRouter", (HandMadeMixture,), {})
    with pytest.raises(
        UnsupportedError, match=r"OtherRouter\): Scores does not return scores, and"
    ):
        edge_patching(model, ones_and_twos(), LOGIT, experts=True)


def test_names_of_the_other_kind_of_graph_say_the_way_out():
    model = made("mixtral")
    with pytest.raises(InvalidArgumentError, match="for 'm0.e1' give experts=True"):
        edge_patching(model, pairs(), METRIC, "m0.e1->logits")
    with pytest.raises(InvalidArgumentError, match="'m0' is several nodes, 'm0.e0' and so on"):
        edge_patching(model, pairs(), METRIC, "m0->logits", experts=True)
    with pytest.raises(InvalidArgumentError, match="LlamaForCausalLM has no experts"):
        edge_attribution(made("llama"), pairs(), METRIC, experts=True)
    with pytest.raises(InvalidArgumentError, match="shared_gate = 'gate' needs a shared expert"):
        ExpertLayout(shared_gate="gate")


# ---- sites of experts --------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["qwen2_moe", "flex_olmo"])
def test_patching_nodes_is_what_plain_hooks_measure(name):
    plain = PlainExperts(name)
    model, prompts = plain.model, plain.prompts
    sites = sites_of(model, "experts")
    found = activation_patching(model, prompts, METRIC, sites, direction="noising")
    assert list(found.nodes) == nodes_of(plain, 0) + nodes_of(plain, 1)
    for node, effect in zip(found.nodes, found.mean, strict=True):
        layer, expert = int(node[1]), node[3:]
        mlp = plain.of_layer(layer, "mlp")
        clean, other = (
            plain.parts(layer, plain.seen(inputs, mlp, "in"))[expert].detach()
            for inputs in (prompts.clean, prompts.corrupted)
        )
        patched = plain.run(prompts.clean, (mlp, "out", lambda x, d=other - clean: x + d))
        expected = float((patched - plain.run(prompts.clean)).mean())
        assert effect == pytest.approx(expected, rel=1e-5, abs=1e-12), node
    assert np.count_nonzero(np.abs(found.mean) > 1e-6) > len(sites) / 2


@pytest.mark.parametrize("name", ["qwen2_moe", "flex_olmo"])
def test_attribution_of_nodes_is_the_gradient_by_hand(name):
    plain = PlainExperts(name)
    model, prompts = plain.model, plain.prompts
    found = attribution_patching(
        model, prompts, METRIC, [*sites_of(model, "experts"), *sites_of(model, "layers")],
        direction="noising",
    )  # fmt: skip
    alone = attribution_patching(
        model, prompts, METRIC, sites_of(model, "layers"), direction="noising"
    )
    # Beside sites of experts, the gradients of other sites stay what they were.
    assert found.mean[-2:] == pytest.approx(alone.mean, rel=1e-5)
    for node, effect in zip(found.nodes[:-2], found.mean[:-2], strict=True):
        layer, expert = int(node[1]), node[3:]
        mlp, kept = plain.of_layer(layer, "mlp"), []
        clean, other = (
            plain.parts(layer, plain.seen(inputs, mlp, "in"))[expert].detach()
            for inputs in (prompts.clean, prompts.corrupted)
        )

        def leaf(value: Tensor, kept: list[Tensor] = kept) -> Tensor:
            kept.append(value.detach().requires_grad_())
            return kept[0]

        with torch.enable_grad(), hooked(model, (mlp, "out", leaf)):
            METRIC(model(**prompts.clean), prompts).sum().backward()
        expected = float((kept[0].grad * (other - clean)).sum((-1, -2)).mean())
        assert effect == pytest.approx(expected, rel=1e-5, abs=1e-9), node


def test_edits_of_experts_change_what_the_block_returns():
    plain = PlainExperts("qwen2_moe")
    model, ids = plain.model, plain.prompts.clean
    mlp = plain.of_layer(0, "mlp")
    returned, parts = plain.seen(ids, mlp, "out"), plain.parts(0, plain.seen(ids, mlp, "in"))

    def with_edits(*edits: Edit) -> Tensor:
        kept: list[Tensor] = []
        with (
            torch.no_grad(),
            intervene(model, *edits),
            intervene(model, apply(mlp, lambda value: kept.append(value) or value)),
        ):
            model(**ids)
        return kept[0]

    last = returned.clone()
    last[:, -1] -= parts["e1"][:, -1]
    torch.testing.assert_close(with_edits(zero(mlp, expert=1, positions=-1)), last)
    both = returned - parts["e1"] - parts["shared"]
    edits = zero(mlp, expert=1), zero(mlp, expert="shared")
    torch.testing.assert_close(with_edits(*edits), both)
    assert with_edits(zero(mlp, side="experts")).abs().max() < 1e-6
    mean = parts["e2"].mean((0, 1)) - parts["e2"]
    torch.testing.assert_close(with_edits(interventions.mean(mlp, expert=2)), returned + mean)
    seen: list[Tensor] = []
    read = apply(mlp, lambda value: seen.append(value) or value, expert=3)
    assert torch.equal(with_edits(read), returned)
    torch.testing.assert_close(seen[0], parts["e3"].detach(), rtol=1e-5, atol=1e-9)
    steered = with_edits(add(mlp, torch.ones(32).double(), expert=0))
    torch.testing.assert_close(steered, returned + 1)


def test_sites_of_experts_that_are_not_there(tmp_path):
    model = made("mixtral")
    ids, mlp = pairs().clean, "model.layers.0.mlp"
    assert Site(mlp, expert=1) == Site(mlp, side="experts", expert=1) != Site(mlp, expert=2)
    assert str(Site(mlp, expert=1)) == "'model.layers.0.mlp' expert=1"
    for edit, message in (
        (zero(mlp, expert=4), "expert = 4: 'model.layers.0.mlp' has e0 to e3"),
        (zero(mlp, expert="shared"), "expert = 'shared': 'model.layers.0.mlp' has e0 to e3"),
        (zero("model.layers.0", expert=0), "no block whose experts are known: choose 'model.lay"),
    ):
        with pytest.raises(InvalidArgumentError, match=message), intervene(model, edit):
            model(**ids)
    for wrong in ({"expert": -1}, {"expert": "e1"}, {"expert": 1, "side": "input"}):
        with pytest.raises(InvalidArgumentError, match="expert = "):
            Site(mlp, **wrong)
    with pytest.raises(InvalidArgumentError, match="none that are known"):
        sites_of(made("llama"), "experts")
    with capture_activations(model, tmp_path / "run.stream"):
        model(**ids)
    with ActivationReader(tmp_path / "run.stream") as reader:
        edit = replace(mlp, reader, expert=1)
        with pytest.raises(UnknownActivationError, match="experts"), intervene(model, edit):
            model(**ids)
    shared = with_block(renamed("AlsoForgotten", ExpertLayout()))
    with (
        pytest.raises(UnsupportedError, match="so AlsoForgotten is not as its layout says"),
        intervene(shared, zero(mlp, expert=0)),
    ):
        shared(**ids)
