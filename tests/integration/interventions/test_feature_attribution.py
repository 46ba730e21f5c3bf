"""Effects of features, beside each feature patched by plain hooks, and beside numbers by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import spliced_saes
import torch
from llm_instrumentation.errors import InvalidArgumentError, UnsupportedError
from llm_instrumentation.interventions import (
    Metric,
    Prompts,
    Site,
    accuracy,
    activation_patching,
    logit_difference,
)
from llm_instrumentation.interventions.features import feature_attribution, feature_patching
from spliced_saes import AUTOENCODERS, FEATURES, TRANSCODERS, language_model
from torch import Tensor, nn

LAYER, MLP = "transformer.h.0", "transformer.h.1.mlp"
METRIC = logit_difference()
EXAMPLES, TOKENS = 3, 5


@pytest.fixture(scope="module")
def gpt2() -> nn.Module:
    return language_model(initializer_range=0.1)


@pytest.fixture(scope="module")
def prompts() -> Prompts:
    clean = torch.randint(60, (EXAMPLES, TOKENS), generator=torch.Generator().manual_seed(1))
    corrupted = clean.clone()
    corrupted[:, 2] = (clean[:, 2] + 11) % 60
    labels = {"correct": torch.arange(EXAMPLES), "wrong": torch.arange(EXAMPLES) + 10}
    return Prompts(clean, corrupted, labels)


def effects_by_hooks(
    model: nn.Module, prompts: Prompts, name: str, sae: Any, zero: bool = False
) -> np.ndarray:
    """The effect of each feature of a site: [positions, features]. The last column: the error."""
    module, kept = model.get_submodule(name), {}

    def metric(ids: Tensor, value: Tensor | None = None) -> Tensor:
        def hook(_: Any, args: Any, output: Any) -> Any:
            tensor = output[0] if isinstance(output, tuple) else output
            kept.update(given=args[0], value=tensor)
            if value is None:
                return None
            return (value, *output[1:]) if isinstance(output, tuple) else value

        handle = module.register_forward_hook(hook)
        found = model(ids).logits[:, -1]
        handle.remove()
        rows = torch.arange(len(ids))
        return found[rows, prompts.labels["correct"]] - found[rows, prompts.labels["wrong"]]

    with torch.no_grad():
        clean = prompts.clean["input_ids"]
        splits = []
        for ids in (prompts.corrupted["input_ids"], clean):
            base = metric(ids)
            reads = kept["given"] if hasattr(sae.cfg, "d_out") else kept["value"]
            features = sae.encode(reads)
            splits.append((features, kept["value"] - sae.decode(features)))
        (other, other_error), (features, error) = splits
        if zero:
            other, other_error = torch.zeros_like(other), torch.zeros_like(error)
        effects = np.zeros((TOKENS, FEATURES + 1))
        for at in range(TOKENS):
            for number in range(FEATURES + 1):
                changed, left = features.clone(), error.clone()
                if number < FEATURES:
                    changed[:, at, number] = other[:, at, number]
                else:
                    left[:, at] = other_error[:, at]
                found = metric(clean, sae.decode(changed) + left) - base
                effects[at, number] = found.mean()
    return effects


def test_two_heads_write_a_feature_and_a_gate_reads_two():
    """The metric is the product of features 0 and 1; two heads write feature 0."""

    class Gate(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.written = nn.Embedding(4, 3), nn.Identity()
            self.embed.weight.data.copy_(
                torch.tensor([[1.0, 2.0, 0.5], [0.5, 3.0, 0.0], [0.0, 0.0, 0.0], [2.0, 1.0, 4.0]])
            )

        def forward(self, input_ids: Tensor) -> Tensor:
            x = self.embed(input_ids)
            heads = x * torch.tensor([1.0, 1.0, 0.0]), x * torch.tensor([2.0, 0.0, 1.0])
            return self.written(heads[0] + heads[1])

    class Positive:
        def encode(self, x: Tensor) -> Tensor:
            return x.relu()[..., :2]  # the third value is left to the error

        def decode(self, features: Tensor) -> Tensor:
            return torch.cat([features, torch.zeros_like(features[..., :1])], -1)

    def product(x: Tensor, _: Prompts) -> Tensor:
        return x[:, -1, 0] * x[:, -1, 1] + x[:, -1, 2]

    prompts = Prompts(torch.tensor([[3, 0], [3, 1]]), torch.tensor([[3, 1], [3, 3]]))
    metric = Metric("product", product)
    # Of two texts of two tokens the shape does not tell which axis is the batch.
    found = feature_attribution(
        Gate(), prompts, metric, {"written": Positive()}, steps=1, positions="each", batch_size=1
    )
    # Example 0 goes from (3, 2, .5) to (1.5, 3, 0), example 1 from (1.5, 3, 0) to (6, 1, 4). On a
    # straight way each factor counts with the mean of the other one.
    expected = [[-1.5 * 2.5, 1 * 2.25, -0.5], [4.5 * 2, -2 * 3.75, 4]]
    assert not found.features[0][0].any() and not found.errors[0][0]
    np.testing.assert_allclose(found.features[0][1], np.mean(expected, 0)[:2], rtol=1e-6)
    np.testing.assert_allclose(found.errors[0][1], np.mean(expected, 0)[2], rtol=1e-6)
    np.testing.assert_allclose(found.features_std_error[0][1], [6.375, 4.875], rtol=1e-6)
    np.testing.assert_allclose(found.totals, (found.corrupted - found.clean).mean(), rtol=1e-6)
    ids = {node.id for node in found.top(3)}
    assert ids == {"written#0@1", "written#1@1", "written#error@1"}
    # Patched alone, each factor counts with the clean value of the other one.
    alone = feature_patching(
        Gate(), prompts, metric, {"written": Positive()}, found.top(3), batch_size=1
    )
    assert {node.feature: node.effect for node in alone} == {
        0: (-1.5 * 2 + 4.5 * 3) / 2, 1: (1 * 3 - 2 * 1.5) / 2, None: (-0.5 + 4) / 2,
    }  # fmt: skip


@pytest.mark.parametrize("name", [*AUTOENCODERS, *TRANSCODERS])
def test_effects_of_a_site_add_up_to_the_effect_of_the_site(gpt2, prompts, name):
    architecture, fields = (AUTOENCODERS | TRANSCODERS)[name]
    saes = {MLP: spliced_saes.made(architecture, **fields)}
    if name not in TRANSCODERS:
        saes = {LAYER: spliced_saes.made(architecture, 1, **fields), **saes}
    patched = activation_patching(gpt2, prompts, METRIC, list(saes), direction="noising")
    found = feature_attribution(gpt2, prompts, METRIC, saes, steps=10, batch_size=2)
    np.testing.assert_allclose(found.totals, patched.mean, rtol=2e-2)
    np.testing.assert_allclose(found.clean, patched.clean, atol=1e-6)
    np.testing.assert_allclose(found.corrupted, patched.corrupted, atol=1e-6)
    back = feature_attribution(gpt2, prompts, METRIC, saes, direction="denoising")
    brought = activation_patching(gpt2, prompts, METRIC, list(saes))
    np.testing.assert_allclose(back.totals, brought.mean, rtol=2e-2)


@pytest.mark.parametrize(
    ("name", "site", "near"),
    [("standard", LAYER, 0.1), ("jumprelu", MLP, 1), ("gated", MLP, 1), ("transcoder", MLP, 1)],
)
def test_effects_rank_features_as_each_patched_alone(prompts, name, site, near):
    """Features of a residual stream act together, in a norm: there the inputs differ by little."""
    stats = pytest.importorskip("scipy.stats")
    model = language_model().double()
    tokens = model.transformer.wte.weight.data
    clean, corrupted = (side["input_ids"][:, 2] for side in (prompts.clean, prompts.corrupted))
    tokens[corrupted] = torch.lerp(tokens[clean], tokens[corrupted], near)
    architecture, fields = (AUTOENCODERS | TRANSCODERS)[name]
    saes = {site: spliced_saes.made(architecture, dtype="float64", **fields)}
    found = feature_attribution(model, prompts, METRIC, saes, positions="each")
    expected = effects_by_hooks(model, prompts, site, saes[site])
    estimated = np.concatenate([found.features[0], found.errors[0][:, None]], 1)
    both = (np.round(one.ravel(), 12) for one in (estimated, expected))
    assert stats.spearmanr(*both).statistic > 0.99
    assert np.count_nonzero(expected) > 20


@pytest.mark.parametrize("ablation", ["corrupted", "zero"])
@pytest.mark.parametrize("name", ["standard", "topk", "skip_transcoder"])
def test_patching_is_what_hooks_do(gpt2, prompts, name, ablation):
    architecture, fields = (AUTOENCODERS | TRANSCODERS)[name]
    sae = spliced_saes.made(architecture, **fields)
    if name == "skip_transcoder":  # what it passes on counts to the error, see by hooks
        sae.W_skip.data.zero_()
    expected = effects_by_hooks(gpt2, prompts, MLP, sae, zero=ablation == "zero")
    how: Any = {"ablation": ablation, "batch_size": 2}
    found = feature_attribution(gpt2, prompts, METRIC, {MLP: sae}, positions="each", **how)
    nodes = found.top(30)
    exact = feature_patching(gpt2, prompts, METRIC, {MLP: sae}, nodes, **how)
    for node in exact:
        column = FEATURES if node.feature is None else node.feature
        assert node.effect == pytest.approx(expected[node.position, column], abs=1e-6), node
    assert max(abs(node.effect) for node in exact) > 1e-3
    assert {node.feature is None for node in exact} == {True, False}


def test_positions_add_up_and_batches_do_not_count(gpt2, prompts):
    saes = {LAYER: spliced_saes.made("standard"), MLP: spliced_saes.made("standard", 1)}
    whole = feature_attribution(gpt2, prompts, METRIC, saes, steps=3)
    each = feature_attribution(gpt2, prompts, METRIC, saes, steps=3, positions="each", batch_size=2)
    for one, other in zip(whole.features, each.features, strict=True):
        assert one.shape == (1, FEATURES) and other.shape == (TOKENS, FEATURES)
        np.testing.assert_allclose(one[0], other.sum(0), atol=1e-6)
    np.testing.assert_allclose(whole.totals, each.totals, atol=1e-6)
    # Before the token that differs nothing does.
    assert not each.features[0][:2].any() and each.features[0][2:].any(1).all()
    several = feature_attribution(gpt2, prompts, METRIC, saes, steps=None)
    for at, (key, sae) in enumerate(saes.items()):  # sites together, and one by one
        alone = feature_attribution(gpt2, prompts, METRIC, {key: sae}, steps=None)
        np.testing.assert_allclose(several.features[at], alone.features[0], atol=1e-6)


def test_padding_has_no_effect(gpt2, prompts):
    saes = {LAYER: spliced_saes.made("standard")}
    plain = feature_attribution(gpt2, prompts, METRIC, saes, positions="each", steps=3)
    sides = []
    for inputs, filler in ((prompts.clean, 1), (prompts.corrupted, 2)):
        ids = torch.cat([inputs["input_ids"], torch.full((EXAMPLES, 2), filler)], 1)
        mask = torch.cat([torch.ones(EXAMPLES, TOKENS), torch.zeros(EXAMPLES, 2)], 1).long()
        sides.append({"input_ids": ids, "attention_mask": mask})
    padded = feature_attribution(
        gpt2, Prompts(*sides, prompts.labels), METRIC, saes, positions="each", steps=3
    )
    np.testing.assert_allclose(padded.features[0][:TOKENS], plain.features[0], atol=1e-6)
    assert not padded.features[0][TOKENS:].any() and not padded.errors[0][TOKENS:].any()


def test_a_model_in_bfloat16(prompts):
    model = language_model(initializer_range=0.1)
    saes = {MLP: spliced_saes.made("standard")}
    exact = feature_attribution(model, prompts, METRIC, saes)
    found = feature_attribution(model.bfloat16(), prompts, METRIC, saes)
    assert np.corrcoef(exact.features[0].ravel(), found.features[0].ravel())[0, 1] > 0.95


def test_the_table_and_the_graph_have_the_largest(gpt2, prompts):
    saes = {LAYER: spliced_saes.made("standard"), MLP: spliced_saes.made("standard", 1)}
    found = feature_attribution(gpt2, prompts, METRIC, saes, positions="each", steps=3)
    table = found.to_pandas(12)
    assert list(table.columns) == ["node", "layer", "position", "feature", "effect", "std_error"]
    assert (table.effect.abs().diff()[1:] <= 0).all() and len(table) == 12
    everything = np.concatenate([
        *(np.abs(one).ravel() for one in found.features), *(np.abs(one) for one in found.errors)
    ])  # fmt: skip
    np.testing.assert_allclose(table.effect.abs(), np.sort(everything)[::-1][:12])
    assert table.std_error.notna().all()
    graph = found.to_graph(12)
    assert {node.id: node.effect for node in graph.nodes} == dict(
        zip(table.node, table.effect, strict=True)
    )
    assert graph.examples == EXAMPLES and graph.corrupted == pytest.approx(found.corrupted.mean())
    assert "#" in found._repr_html_() and "5 positions" in repr(found)
    assert all(node.feature is not None for node in found.top(500, errors=False))
    one = Prompts(*({"input_ids": side["input_ids"][:1]} for side in
                    (prompts.clean, prompts.corrupted)),
                  {name: label[:1] for name, label in prompts.labels.items()})  # fmt: skip
    assert np.isnan(feature_attribution(gpt2, one, METRIC, saes).top(1)[0].std_error)


def test_the_mode_of_the_caller_does_not_count(gpt2, prompts):
    saes = {LAYER: spliced_saes.made("standard")}
    expected = feature_attribution(gpt2, prompts, METRIC, saes, steps=2)
    with torch.no_grad():
        found = feature_attribution(gpt2, prompts, METRIC, saes, steps=2)
    np.testing.assert_array_equal(found.features[0], expected.features[0])


def test_the_model_is_left_as_it_was(gpt2, prompts):
    sae = spliced_saes.made("standard")
    feature_attribution(gpt2, prompts, METRIC, {LAYER: sae}, steps=1)
    for part in (gpt2, sae):
        assert all(one.requires_grad and one.grad is None for one in part.parameters())
        assert not any(module._forward_hooks for module in part.modules())


def test_what_is_refused(gpt2, prompts):
    sae = spliced_saes.made("standard")

    def refused(message: str, kind: Any = InvalidArgumentError, **how: Any) -> None:
        given: dict[str, Any] = {
            "model": gpt2, "prompts": prompts, "metric": METRIC, "saes": {LAYER: sae}, **how,
        }  # fmt: skip
        with pytest.raises(kind, match=message):
            feature_attribution(**given)

    refused("steps = 0", steps=0)
    refused('ablation = "zero" has no values', ablation="zero", direction="denoising")
    refused("ablation = 'mean'", ablation="mean")
    refused("positions = 3", positions=3)
    refused("direction", direction="up")
    refused("at all positions", saes={Site(LAYER, positions=2): sae})
    refused("no gradient", UnsupportedError, metric=accuracy())
    refused("did not run", saes={"lm_head": sae}, model=_WithoutHead(gpt2))
    refused("runs 2 times", UnsupportedError, saes={"linear": sae}, model=_Twice())
    refused("shape \\[15, 16\\] for 3", UnsupportedError, saes={"linear": sae}, model=_Flat())
    refused("another place", saes={LAYER: spliced_saes.made(
        "standard", metadata={"hook_name": "blocks.1.hook_resid_post"})})  # fmt: skip
    with pytest.raises(InvalidArgumentError, match="k = 0"):
        feature_attribution(gpt2, prompts, METRIC, {LAYER: sae}, steps=1).top(0)
    nodes = feature_attribution(gpt2, prompts, METRIC, {LAYER: sae}, steps=1).top(1)
    with pytest.raises(InvalidArgumentError, match="is no node of these autoencoders"):
        feature_patching(gpt2, prompts, METRIC, {MLP: sae}, nodes)
    with pytest.raises(InvalidArgumentError, match="is no node of these autoencoders"):
        feature_patching(gpt2, prompts, METRIC, {LAYER: sae}, [nodes[0]._replace(site=-1)])
    lost = [nodes[0]._replace(feature=99)]
    with pytest.raises(InvalidArgumentError, match="there is no such node"):
        feature_patching(gpt2, prompts, METRIC, {LAYER: sae}, lost)


def test_between_two_features_the_model_is_as_before(gpt2, prompts):
    sae = spliced_saes.made("standard")
    nodes = feature_attribution(gpt2, prompts, METRIC, {LAYER: sae}, steps=1).top(3)
    with torch.no_grad():
        expected = gpt2(**prompts.clean).logits

    def unchanged(done: int, total: int) -> None:
        with torch.no_grad():
            assert torch.equal(gpt2(**prompts.clean).logits, expected)
        if done == 2:
            raise KeyError("enough")

    with pytest.raises(KeyError) as caught:
        feature_patching(gpt2, prompts, METRIC, {LAYER: sae}, nodes, progress=unchanged)
    unchanged(0, 0)
    assert caught.value is not None


class _WithoutHead(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.transformer, self.lm_head = model.transformer, model.lm_head

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.transformer(input_ids).last_hidden_state @ self.lm_head.weight.T


class _Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.linear = nn.Embedding(60, 16), nn.Linear(16, 16)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.linear(self.linear(self.embed(input_ids)))


class _Flat(_Twice):
    def forward(self, input_ids: Tensor) -> Tensor:
        return self.linear(self.embed(input_ids).flatten(0, 1)).unflatten(0, input_ids.shape)
