"""Attribution gives each example its own effect, in any batch and however tensors lie."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch
from llm_instrumentation.errors import InvalidArgumentError, UnsupportedError
from llm_instrumentation.interventions import (
    HeadLayout,
    Metric,
    Prompts,
    Site,
    activation_patching,
    attribution_patching,
    register_heads,
    sites_of,
)
from llm_instrumentation.interventions.features import feature_attribution
from tiny_models import make
from torch import Tensor, nn

# XLNet and FSMT have tensors with sequences first, Longformer has chunks. GPT-2's positions are the
# same for all examples. Mixtral has experts.
TYPES = ("bert", "fsmt", "gpt2", "longformer", "mixtral", "prophetnet", "t5", "vit", "xlnet")


def first_of(output: Any) -> Tensor:
    return next(v for v in output.values() if isinstance(v, Tensor) and v.is_floating_point())


METRIC = Metric(
    "sum",
    lambda values, batch: values.reshape(len(batch), -1).double().tanh().sum(1),
    reads=first_of,
)


def pairs(tiny: Any, examples: int, length: int) -> Prompts:
    """Inputs, and the same with other tokens or values."""
    torch.manual_seed(0)
    given = tiny.inputs(rows=examples, length=length)
    clean = {name: value for name, value in given.items() if isinstance(value, Tensor)}
    corrupted = {name: value.clone() for name, value in clean.items()}
    for name, value in corrupted.items():
        if name.endswith("input_ids"):
            value[:, 2] = value[:, 3].roll(1)
        elif value.is_floating_point() and "mask" not in name:
            value += 0.3 * torch.randn(value.shape)
    return Prompts(clean, corrupted)


@pytest.mark.parametrize("kind", ["layers", "modules"])
@pytest.mark.parametrize("model_type", TYPES)
def test_effects_do_not_depend_on_the_batch(model_type, kind):
    """Nine tokens are three times a batch of 3. The last batch is smaller than the others."""
    tiny = make(model_type)
    prompts = pairs(tiny, 5, 9)

    def effects(size: int, sites: list[Site]) -> Any:
        return attribution_patching(
            tiny.model, prompts, METRIC, sites, batch_size=size, progress=False
        ).values

    measured = 0
    sites = sites_of(tiny.model, kind)
    for site in sites[:: len(sites) // 12 or 1]:
        try:
            alone = effects(1, [site])
        except (InvalidArgumentError, UnsupportedError):
            continue  # it does not run, or has no floats
        scale = np.abs(alone).max() + 1e-4
        for size in (3, 2):
            try:
                found = effects(size, [site])
            except UnsupportedError as error:
                if re.search("use batch_size=1|in an order of their own", str(error)):
                    continue
                raise
            np.testing.assert_allclose(found / scale, alone / scale, atol=2e-3, err_msg=str(site))
            measured += 1
    assert measured


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(8, 8) for _ in range(4))
        self.num_heads, self.head_dim = 2, 4

    def forward(self, x: Tensor) -> Tensor:
        projected: Tensor = self.o(torch.tanh(self.q(x)))
        return projected


class OneByOne(nn.Module):
    """Calls its attention with the vector of each token alone, [width]."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.attention, self.out = nn.Embedding(9, 8), Attention(), nn.Linear(8, 3)

    def forward(self, input_ids: Tensor) -> Tensor:
        rows = [[self.attention(token) for token in text] for text in self.embed(input_ids)]
        logits: Tensor = self.out(torch.stack([torch.stack(row) for row in rows]))
        return logits


def test_heads_of_a_vector_have_effects_of_their_own():
    register_heads(Attention, HeadLayout("o", "q", "k", "v", heads="num_heads"))
    torch.manual_seed(0)
    model = OneByOne().eval()
    prompts = Prompts(torch.randint(9, (3, 4)), torch.randint(9, (3, 4)))
    linear = Metric("logit", lambda logits, batch: logits[:, -1, 0] - logits[:, -1, 1])
    sites = [Site("attention", head=0), Site("attention", head=1), "attention.o"]
    exact, found = (
        method(model, prompts, linear, sites, batch_size=1, progress=False).values
        for method in (activation_patching, attribution_patching)
    )
    np.testing.assert_allclose(found, exact, atol=1e-6)
    assert np.abs(exact[0] - exact[1]).max() > 0.01
    with pytest.raises(UnsupportedError, match="of which example is not known: use batch_size=1"):
        attribution_patching(model, prompts, linear, sites[:1], batch_size=3)


class TokensFirst(nn.Module):
    """An encoder of PyTorch with [tokens, batch, width], in a module that says nothing of it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 8)
        self.mixer, self.out = nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, input_ids: Tensor) -> Tensor:
        mixed = torch.tanh(self.mixer(self.embed(input_ids).transpose(0, 1)))
        logits: Tensor = self.out((mixed + mixed.mean(0)).transpose(0, 1))
        return logits


@pytest.mark.parametrize("length", [2, 4, 6])
def test_a_batch_that_may_be_on_either_axis_is_refused(length):
    torch.manual_seed(0)
    prompts = Prompts(torch.randint(9, (2, length)), torch.randint(9, (2, length)))
    linear = Metric("logit", lambda logits, batch: logits[:, -1, 0])
    model = TokensFirst().eval()
    with pytest.raises(UnsupportedError, match=r"use batch_size=1|may be \[batch, tokens"):
        attribution_patching(model, prompts, linear, ["mixer"], batch_size=2)
    found = attribution_patching(model, prompts, linear, ["mixer"], batch_size=1)
    assert np.abs(found.values).min() > 0


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        projected: Tensor = torch.tanh(self.up(x))
        return projected


class Experts(nn.Module):
    """Each expert gets the tokens that are sent to it, and nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(8, 2)
        self.experts = nn.ModuleList(Expert() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, 8)
        chosen = self.gate(flat).argmax(-1)
        out = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero()[:, 0]
            out = out.index_add(0, rows, expert(flat[rows]))
        return out.reshape(x.shape)


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.moe, self.out = nn.Embedding(9, 8), Experts(), nn.Linear(8, 3)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        logits: Tensor = self.out(x + self.moe(x))
        return logits


@pytest.mark.parametrize("method", [activation_patching, attribution_patching])
def test_values_of_other_tokens_are_no_counterparts(method):
    """The two runs send other tokens to an expert, as many as before."""
    torch.manual_seed(0)
    model = Mixture().eval()
    with torch.no_grad():
        chosen = model.moe.gate(model.embed.weight).argmax(-1).tolist()
    one, other = chosen.index(0), chosen.index(1)
    prompts = Prompts(torch.tensor([[one, other]]), torch.tensor([[other, one]]))
    linear = Metric("logit", lambda logits, batch: logits.sum((1, 2)))
    with pytest.raises(UnsupportedError, match="in an order of their own"):
        method(model, prompts, linear, ["moe.experts.0"])
    assert method(model, prompts, linear, ["moe"]).values.shape == (1, 1)


class Signs:
    """An autoencoder with two features for each number: its positive and its negative part."""

    def encode(self, values: Tensor) -> Tensor:
        return torch.cat([values, -values], -1).relu()

    def decode(self, features: Tensor) -> Tensor:
        above, below = features.chunk(2, -1)
        return above - below


@pytest.mark.parametrize("tokens", [4, 6])
def test_features_need_tensors_with_the_batch_first(tokens):
    """Also four texts of four tokens, where the shape does not tell."""
    tiny = make("xlnet")
    prompts = pairs(tiny, 4, tokens)
    layer = sites_of(tiny.model, "layers")[0].layer
    with pytest.raises(UnsupportedError, match=r"effects need \[batch, tokens, width\]"):
        feature_attribution(tiny.model, prompts, METRIC, {layer: Signs()}, steps=1)


def test_embeddings_are_mixed_before_what_they_add_is_seen():
    tiny = make("bert")
    prompts = pairs(tiny, 3, 6)
    name = next(n for n, _ in tiny.model.named_modules() if n.endswith("word_embeddings"))
    for sites in ([Site(name, side="added"), Site(name)], [Site(name), Site(name, side="added")]):
        found = attribution_patching(tiny.model, prompts, METRIC, sites, steps=3)
        np.testing.assert_allclose(found.values[0], found.values[1], rtol=1e-4, atol=1e-6)
    alone = attribution_patching(
        tiny.model, prompts, METRIC, [Site(name, side="added")], steps=3
    ).values
    np.testing.assert_allclose(alone[0], found.values[0], rtol=1e-4, atol=1e-6)


def test_layers_that_are_recomputed_have_the_same_effects():
    import transformers

    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            n_embd=24, n_layer=2, n_head=2, vocab_size=20, n_positions=16, bos_token_id=None,
            eos_token_id=None, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False,
        )
    ).train()  # fmt: skip
    prompts = Prompts(torch.randint(20, (3, 5)), torch.randint(20, (3, 5)))
    sites = [Site("transformer.h.0.mlp", side="added"), Site("transformer.wte")]
    linear = Metric("logit", lambda logits, batch: logits[:, -1, 0])
    kept = attribution_patching(model, prompts, linear, sites).values
    model.gradient_checkpointing_enable({"use_reentrant": False})
    np.testing.assert_allclose(
        attribution_patching(model, prompts, linear, sites).values, kept, atol=1e-6
    )
