"""Circuits of features, beside numbers by hand and beside the whole model."""

from __future__ import annotations

from typing import Any

import pytest
import spliced_saes
import torch
from llm_instrumentation.errors import InvalidArgumentError
from llm_instrumentation.interventions import Metric, Prompts, logit_difference
from llm_instrumentation.interventions.features import feature_attribution, feature_faithfulness
from spliced_saes import AUTOENCODERS, TRANSCODERS, language_model
from torch import Tensor, nn

METRIC = logit_difference()


class Sum(nn.Module):
    """The metric is 10 x + 3 y + z of the values of one site."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.site = nn.Embedding(2, 3), nn.Identity()
        self.embed.weight.data.copy_(torch.tensor([[1.0, 2.0, 4.0], [3.0, 1.0, 9.0]]))

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.site(self.embed(input_ids)) @ torch.tensor([10.0, 3.0, 1.0])


class Two:
    """Two values are features, the third one is left to the error."""

    def encode(self, x: Tensor) -> Tensor:
        return x[..., :2].relu()

    def decode(self, features: Tensor) -> Tensor:
        return torch.cat([features, torch.zeros_like(features[..., :1])], -1)


def test_circuits_of_a_sum_are_those_by_hand():
    metric = Metric("last", lambda tensor, batch: tensor[:, -1])
    prompts, saes = Prompts(torch.tensor([[0]]), torch.tensor([[1]])), {"site": Two()}
    given: Any = (Sum(), prompts, metric, saes)
    found = feature_attribution(*given, steps=1)  # x: +20, y: -3, the error: +5
    kept = feature_faithfulness(*given, found, sizes=[1, 2])
    assert (kept.clean, kept.empty) == (20, 30 + 3 + 4)  # the error is kept
    assert kept.values == (10 + 3 + 4, 20)
    assert kept.faithfulness == pytest.approx((20 / 17, 1))
    assert kept.without == pytest.approx((1 - 20 / 17, 0))
    zero = feature_faithfulness(*given, found, sizes=[1], ablation="zero", errors="ablate")
    assert (zero.clean, zero.empty, zero.values) == (20, 0, (10,))
    both = feature_faithfulness(*given, found, sizes=[2, 3], errors="ablate")
    assert (both.empty, both.nodes) == (42, (2, 3))
    assert both.values == (10 + 3 + 4, 20)  # x and the error come before y


@pytest.mark.parametrize("errors", ["keep", "ablate"])
@pytest.mark.parametrize("name", ["standard", "layer norm", "skip_transcoder"])
def test_all_features_are_the_model_and_none_the_ablated_one(name, errors):
    clean = torch.randint(60, (3, 4), generator=torch.Generator().manual_seed(1))
    corrupted = clean.clone()
    corrupted[:, 1] = (clean[:, 1] + 11) % 60
    labels = {"correct": torch.arange(3), "wrong": torch.arange(3) + 10}
    prompts = Prompts(clean, corrupted, labels)
    model = language_model(initializer_range=0.1)
    architecture, fields = (AUTOENCODERS | TRANSCODERS)[name]
    site = "transformer.h.1.mlp" if name in TRANSCODERS else "transformer.h.1"
    saes = {"transformer.h.0": spliced_saes.made("standard", 1),
            site: spliced_saes.made(architecture, **fields)}  # fmt: skip
    given: Any = (model, prompts, METRIC, saes)
    found = feature_attribution(*given, steps=2, positions="each")
    made = feature_faithfulness(*given, found, sizes=[5, 5000], errors=errors, batch_size=2)
    assert made.faithfulness[1] == pytest.approx(1, abs=1e-4)
    assert made.without[1] == pytest.approx(0, abs=1e-4)
    assert abs(made.faithfulness[0] - 1) > 1e-3
    if errors == "ablate":  # the whole stream is the corrupted one
        assert made.empty == pytest.approx(found.corrupted.mean(), abs=1e-5)
    for message, how in (
        ("sizes = \\(3, 2\\)", {"sizes": [3, 2]}),
        ("ablation = 'mean'", {"ablation": "mean"}),
        ("errors = 'zero'", {"errors": "zero"}),
    ):
        with pytest.raises(InvalidArgumentError, match=message):
            feature_faithfulness(*given, found, **how)
    shorter = Prompts(clean[:, :3], corrupted[:, :3], labels)
    with pytest.raises(InvalidArgumentError, match="found has 4 positions"):
        feature_faithfulness(model, shorter, *given[2:], found)
    same = Prompts(clean, clean, labels)
    with pytest.raises(InvalidArgumentError, match="nothing that a circuit could do"):
        feature_faithfulness(model, same, *given[2:], found, errors=errors)
