"""Circuits of features, beside numbers by hand and beside the whole model."""

from __future__ import annotations

from typing import Any

import pytest
import spliced_saes
import torch
from edges_by_hooks import hooked
from llm_instrumentation.errors import InvalidArgumentError, UnsupportedError
from llm_instrumentation.interventions import Metric, Prompts, logit_difference
from llm_instrumentation.interventions.features import (
    feature_attribution,
    feature_edges,
    feature_faithfulness,
    feature_patching,
)
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
        ("ablation = 'noise'", {"ablation": "noise"}),
        ("over = 'layers'", {"ablation": "mean", "over": "layers"}),
        ('over = "sequences" is of ablation = "mean"', {"over": "sequences"}),
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


# ---- mean ablation ------------------------------------------------------------------------------


def test_means_of_a_sum_are_those_by_hand():
    metric = Metric("square", lambda tensor, batch: tensor[:, -1].square())
    prompts, saes = Prompts(torch.tensor([[0], [1]]), torch.tensor([[1], [0]])), {"site": Two()}
    given: Any = (Sum(), prompts, metric, saes)
    found = feature_attribution(*given, steps=1, ablation="zero")
    assert found.top(1)[0].feature == 0  # x
    # The values are (1, 2, 4) and (3, 1, 9), and their mean is (2, 1.5, 6.5).
    for over in ("tokens", "sequences"):
        how: Any = {"sizes": [1], "ablation": "mean", "over": over}
        made = feature_faithfulness(*given, found, **how)
        assert (made.ablation, made.over) == ("mean", over)
        assert made.empty == ((20 + 4.5 + 4) ** 2 + (20 + 4.5 + 9) ** 2) / 2  # the errors are kept
        assert made.values == (((10 + 4.5 + 4) ** 2 + (30 + 4.5 + 9) ** 2) / 2,)
        made = feature_faithfulness(*given, found, errors="ablate", **how)
        assert made.empty == (20 + 4.5 + 6.5) ** 2
        assert made.values == (((10 + 4.5 + 6.5) ** 2 + (30 + 4.5 + 6.5) ** 2) / 2,)


class Coder(nn.Module):
    """An autoencoder with random weights, in float64."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        shapes = {"read": (16, 24), "write": (24, 16), "threshold": (24,), "bias": (16,)}
        for name, shape in shapes.items():
            values = torch.randn(shape, generator=generator, dtype=torch.float64) * 0.4
            self.register_parameter(name, nn.Parameter(values))

    def encode(self, x: Tensor) -> Tensor:
        return (x @ self.read - self.threshold).relu()

    def decode(self, features: Tensor) -> Tensor:
        return features @ self.write + self.bias


def texts_of_unequal_lengths() -> Prompts:
    generator = torch.Generator().manual_seed(1)
    clean = torch.randint(60, (3, 5), generator=generator)
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0], [1, 1, 1, 1, 0]])
    sides = [{"input_ids": ids, "attention_mask": mask} for ids in (clean, (clean + 11) % 60)]
    return Prompts(*sides, {"correct": torch.arange(3), "wrong": torch.arange(3) + 10})


class ByHand:
    """Circuits by plain hooks, one text at a time and without padding."""

    def __init__(self, model: nn.Module, saes: dict[str, Any], prompts: Prompts) -> None:
        self.model, self.saes = model, saes
        self.texts = [
            ids[mask.bool()][None] for ids, mask in zip(*prompts.clean.values(), strict=True)
        ]
        self.answers = list(zip(*prompts.labels.values(), strict=True))

    @torch.no_grad()
    def split(self, text: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
        """Features [tokens, features] and errors [tokens, width] by site."""
        found = {}
        for name, sae in self.saes.items():

            def keep(x: Tensor, name: str = name, sae: Any = sae) -> Tensor:
                features = sae.encode(x[0])
                found[name] = features, x[0] - sae.decode(features)
                return x

            with hooked(self.model, (name, "out", keep)):
                self.model(text)
        return found

    def means(self, over: str) -> dict[str, list[Tensor]]:
        """Of each site the means of features and errors, [tokens, ...]."""
        splits = [self.split(text) for text in self.texts]
        found: dict[str, list[Tensor]] = {}
        for name in self.saes:
            parts = [[split[name][at] for split in splits] for at in (0, 1)]
            if over == "tokens":
                found[name] = [torch.cat(part).mean(0).expand(5, -1) for part in parts]
            else:
                found[name] = [
                    torch.stack(
                        [torch.stack([one[at] for one in part if len(one) > at]).mean(0)
                         for at in range(5)]
                    )
                    for part in parts
                ]  # fmt: skip
        return found

    @torch.no_grad()
    def value(self, circuit: list[Any], over: str, errors: str) -> float:
        """The mean metric with the nodes of a circuit alone."""
        means, total = self.means(over), 0.0
        for text, (correct, wrong) in zip(self.texts, self.answers, strict=True):
            hooks = []
            for number, (name, sae) in enumerate(self.saes.items()):

                def change(
                    x: Tensor, number: int = number, name: str = name, sae: Any = sae
                ) -> Tensor:
                    own, length = sae.encode(x[0]), x.shape[1]
                    features, error = (mean[:length].clone() for mean in means[name])
                    if errors == "keep":
                        error = x[0] - sae.decode(own)
                    for node in circuit:
                        if node.site == number:
                            rows = slice(None) if node.position is None else [node.position]
                            if node.position is not None and node.position >= length:
                                continue  # padding
                            if node.feature is None:
                                error[rows] = (x[0] - sae.decode(own))[rows]
                            else:
                                features[rows, node.feature] = own[rows, node.feature]
                    return (sae.decode(features) + error)[None]

                hooks.append((name, "out", change))
            with hooked(self.model, *hooks):
                logits = self.model(text).logits[0, -1]
            total += float(logits[correct] - logits[wrong])
        return total / len(self.texts)


@pytest.mark.parametrize("errors", ["keep", "ablate"])
@pytest.mark.parametrize(
    ("over", "positions"), [("tokens", None), ("tokens", "each"), ("sequences", "each")]
)
def test_mean_ablation_is_that_of_plain_hooks(over, positions, errors):
    model, prompts = language_model(initializer_range=0.3).double(), texts_of_unequal_lengths()
    saes: Any = {"transformer.h.0": Coder(0), "transformer.h.1.mlp": Coder(1)}
    given: Any = (model, prompts, METRIC, saes)
    found = feature_attribution(*given, steps=2, positions=positions)
    sizes = [4, 12]
    made = feature_faithfulness(
        *given, found, sizes=sizes, ablation="mean", over=over, errors=errors, batch_size=2
    )
    plain = ByHand(model, saes, prompts)
    nodes = [found.top(size, errors=errors == "ablate") for size in sizes]
    if errors == "ablate":
        assert any(node.feature is None for node in nodes[1])
    expected = [plain.value(one, over, errors) for one in nodes]
    assert made.values == pytest.approx(expected, rel=1e-5)
    empty = plain.value([], over, errors)
    assert made.empty == pytest.approx(empty, rel=1e-5)
    assert made.faithfulness == pytest.approx(
        [(one - empty) / (made.clean - empty) for one in expected], rel=1e-5
    )
    # Neither the corrupted texts nor zero: those are other circuits.
    for other in ("corrupted", "zero"):
        there = feature_faithfulness(*given, found, sizes=sizes, ablation=other, errors=errors)
        assert abs(there.values[0] - made.values[0]) > 1e-3


def test_means_of_one_text_at_each_position_are_refused():
    model, prompts = language_model(), texts_of_unequal_lengths()
    given: Any = (model, prompts, METRIC, {"transformer.h.0": Coder(0).float()})
    found = feature_attribution(*given, steps=1)
    with pytest.raises(InvalidArgumentError, match="needs two texts: there are .* and 1"):
        feature_faithfulness(
            model, next(prompts.batches(1)), *given[2:], found, ablation="mean", over="sequences"
        )


def test_pairs_of_unequal_lengths_have_no_corrupted_features():
    """Column by column the values of other tokens would be exchanged, without a word."""
    model, equal = language_model(), texts_of_unequal_lengths()
    first = torch.arange(5).expand(3, 5) == 0
    corrupted = {**equal.corrupted, "attention_mask": equal.clean["attention_mask"].roll(1, 0)}
    prompts = Prompts(
        equal.clean, corrupted, equal.labels, spans={"a": first}, corrupted_spans={"a": first}
    )
    given: Any = (model, prompts, METRIC, {"transformer.h.0": Coder(0).float()})
    found = feature_attribution(model, equal, *given[2:], steps=1)
    for effects_of in (
        lambda: feature_attribution(*given, steps=1),
        lambda: feature_patching(*given, found.top(1)),
        lambda: feature_edges(*given, found),
        lambda: feature_faithfulness(*given, found),
    ):
        with pytest.raises(UnsupportedError, match="the texts of a pair have unequal lengths"):
            effects_of()
    # Other ablations do not run the corrupted texts.
    zero = feature_attribution(*given, steps=1, ablation="zero")
    for ablation in ("zero", "mean"):
        one, other = (
            feature_faithfulness(model, pairs, *given[2:], zero, ablation=ablation)
            for pairs in (prompts, equal)
        )
        assert one == other
