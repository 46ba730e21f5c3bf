"""Edges between features, beside the chain rule and beside differences."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest
import spliced_saes
import torch
from llm_instrumentation.errors import InvalidArgumentError
from llm_instrumentation.interventions import Metric, Prompts, logit_difference
from llm_instrumentation.interventions.features import feature_attribution, feature_edges
from spliced_saes import AUTOENCODERS, TRANSCODERS, language_model
from torch import Tensor, nn

METRIC = logit_difference()


@pytest.fixture(scope="module")
def prompts() -> Prompts:
    clean = torch.randint(60, (3, 4), generator=torch.Generator().manual_seed(1))
    corrupted = clean.clone()
    corrupted[:, 1] = (clean[:, 1] + 11) % 60
    return Prompts(clean, corrupted, {"correct": torch.arange(3), "wrong": torch.arange(3) + 10})


class Chain(nn.Module):
    """Site a has (x, y), site b has (2 x, x + y); the metric is b0 * 3 + b1 * 5 + a1 * 7."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.a, self.b = nn.Embedding(2, 2), nn.Identity(), nn.Identity()
        self.embed.weight.data.copy_(torch.tensor([[1.0, 2.0], [2.0, 6.0]]))

    def forward(self, input_ids: Tensor) -> Tensor:
        a = self.a(self.embed(input_ids))
        b = self.b(torch.stack([2 * a[..., 0], a[..., 0] + a[..., 1]], -1))
        return b[..., 0] * 3 + b[..., 1] * 5 + a[..., 1] * 7


class Values:
    """The first value is a feature, the second one the error."""

    def encode(self, x: Tensor) -> Tensor:
        return x[..., :1].relu()

    def decode(self, features: Tensor) -> Tensor:
        return torch.cat([features, torch.zeros_like(features)], -1)


def test_edges_of_a_chain_are_those_by_hand():
    metric = Metric("last", lambda tensor, batch: tensor[:, -1])
    prompts = Prompts(torch.tensor([[0]]), torch.tensor([[1]]))
    saes = {"a": Values(), "b": Values()}
    found = feature_attribution(Chain(), prompts, metric, saes, steps=2)
    graph = feature_edges(Chain(), prompts, metric, saes, found)
    assert {edge.id: edge.effect for edge in graph.edges} == {
        "a#0->b#0": 1 * 2 * 3, "a#0->b#error": 1 * 5, "a#error->b#error": 4 * 5,
        "a#error->logits": 4 * 7, "b#0->logits": 2 * 3, "b#error->logits": 5 * 5,
    }  # fmt: skip
    assert {node.id: node.effect for node in graph.nodes} == {
        "a#0": 11, "a#error": 48, "b#0": 6, "b#error": 25, "logits": None,
    }  # fmt: skip
    assert len(graph.pruned(top_k=3).edges) == 3


@pytest.mark.parametrize("name", ["standard", "jumprelu", "layer norm", "skip_transcoder"])
@pytest.mark.parametrize("positions", ["each", None])
def test_edges_of_a_node_add_up_to_its_effect(prompts, name, positions):
    model = language_model(initializer_range=0.1).double()
    architecture, fields = (AUTOENCODERS | TRANSCODERS)[name]
    how: dict[str, Any] = {"dtype": "float64", "d_sae": 6, **fields}
    saes = {"transformer.h.1.mlp": spliced_saes.made(architecture, 2, **how)}
    if name not in TRANSCODERS:
        saes = {"transformer.h.0": spliced_saes.made(architecture, 1, **how), **saes}
    saes = {"transformer.h.0.mlp": spliced_saes.made(architecture, 0, **how), **saes}
    found = feature_attribution(model, prompts, METRIC, saes, steps=None, positions=positions)
    graph = feature_edges(model, prompts, METRIC, saes, found, top_k=1000, batch_size=2)
    sums: dict[str, float] = defaultdict(float)
    for edge in graph.edges:
        sums[edge.source] += edge.effect
    nodes = {node.id: node.effect for node in graph.nodes if node.id != "logits"}
    assert len(nodes) > 6
    kinds = {(e.source.split("#")[0], e.target.split("#")[0]) for e in graph.edges}
    assert len(kinds) >= 3
    if name == "standard":
        assert ("m0", "m1") not in kinds  # the residual stream between is a site
    for node, effect in nodes.items():
        assert sums[node] == pytest.approx(effect, rel=1e-6, abs=1e-12), node
    again = feature_edges(model, prompts, METRIC, saes, found, top_k=4)
    effects = {edge.id: edge.effect for edge in graph.edges}
    for edge in again.edges:
        assert edge.effect == pytest.approx(effects[edge.id], rel=1e-9)


def test_features_have_the_layer_of_their_site_and_are_drawn(prompts):
    pytest.importorskip("matplotlib")
    model = language_model(initializer_range=0.1)
    saes = {"transformer.h.0": spliced_saes.made("standard"),
            "transformer.h.1.mlp": spliced_saes.made("standard", 1)}  # fmt: skip
    found = feature_attribution(model, prompts, METRIC, saes, positions="each")
    graph = feature_edges(model, prompts, METRIC, saes, found, top_k=8)
    layers = {"transformer.h.0": 0, "m1": 1, "logits": None}
    assert all(node.layer == layers[node.id.partition("#")[0]] for node in graph.nodes)
    assert all(node.position is not None for node in graph.nodes if node.id != "logits")
    texts = {text.get_text() for text in graph.plot().texts}
    assert graph.nodes[0].id.partition("@")[0] in {text.partition("@")[0] for text in texts}


def test_effects_of_other_autoencoders_are_refused(prompts):
    model = language_model()
    saes = {"transformer.h.0": spliced_saes.made("standard")}
    found = feature_attribution(model, prompts, METRIC, saes, steps=1)
    with pytest.raises(InvalidArgumentError, match="found has the sites transformer.h.0"):
        feature_edges(model, prompts, METRIC, {"transformer.h.1": saes["transformer.h.0"]}, found)
    same = Prompts(prompts.clean, prompts.clean, prompts.labels)
    nothing = feature_attribution(model, same, METRIC, saes, steps=1)
    with pytest.raises(InvalidArgumentError, match="no feature and no error has an effect"):
        feature_edges(model, same, METRIC, saes, nothing)
