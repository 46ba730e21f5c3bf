"""What blocks add to the residual stream: edited beside additions that are taken away by hand."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from blocks_by_hand import contribution_ablated, tensors_of
from llm_instrumentation import ActivationReader, InstrumentationConfig, capture_activations
from llm_instrumentation.errors import InvalidArgumentError, UnsupportedError
from llm_instrumentation.interventions import (
    DecoderLayout,
    HeadLayout,
    Metric,
    Prompts,
    Site,
    ablation,
    activation_patching,
    attribution_patching,
    decoders,
    edge_attribution,
    heads,
    intervene,
    mean,
    register_decoder,
    register_heads,
    resample,
    sites_of,
    zero,
)
from tiny_models import make
from torch import Tensor, nn

# Blocks that return what they add, the sum, or a norm of the sum; norms and factors behind blocks;
# blocks side by side; an encoder beside a decoder; layers without attention.
FEW = (
    "albert", "bart", "bert", "bloom", "cpmant", "esm", "falcon", "funnel", "gemma2",
    "gpt2", "gpt_neox_japanese", "gptj", "granite", "jamba", "longt5", "mixtral", "mpnet", "mpt",
    "olmo2", "reformer", "t5", "vit", "vit_mae", "xlnet", "zaya",
)  # fmt: skip
logit = Metric("logit", lambda logits, prompts: logits[:, -1, 7].float())


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Small models take longer in several threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@torch.no_grad()
def run(model: nn.Module, inputs: Any) -> list[Tensor]:
    torch.manual_seed(0)  # some models draw numbers
    return tensors_of(model(**inputs))


@pytest.mark.parametrize("model_type", FEW)
def test_ablated_blocks_leave_the_residual_stream(model_type):
    """The first and the last block of each kind: refused, or ablated as by hand."""
    tiny = make(model_type)
    inputs = tiny.inputs()
    clean = run(tiny.model, inputs)
    for kind in ("attention", "mlp"):
        try:
            sites = sites_of(tiny.model, kind)
        except (InvalidArgumentError, UnsupportedError):
            continue
        for site in {sites[0], sites[-1]}:
            try:
                with intervene(tiny.model, zero(site), unused="ignore") as applied:
                    found = run(tiny.model, inputs)
            except UnsupportedError:
                continue
            if not any(applied.counts):  # an image tower without an image
                continue
            expected = tensors_of(contribution_ablated(tiny.model, inputs, site))
            changed = any(not torch.equal(a, b) for a, b in zip(clean, expected, strict=True))
            assert changed, site
            for one, other in zip(found, expected, strict=True):
                torch.testing.assert_close(one, other, equal_nan=True, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("model_type", ["bloom", "gemma2", "olmo2", "mpt", "gptj", "albert"])
def test_the_common_types_are_not_refused(model_type):
    tiny = make(model_type)
    for kind in ("attention", "mlp"):
        for site in sites_of(tiny.model, kind):
            with intervene(tiny.model, zero(site)):
                run(tiny.model, tiny.inputs())


# What is added there: the module that returns it as it is.
RETURNED = {
    "bloom": ("transformer.h.1.self_attention", "transformer.h.1.self_attention.dense"),
    "mpt": ("transformer.blocks.1.ffn", "transformer.blocks.1.ffn.down_proj"),
    "gemma2": ("model.layers.1.mlp", "model.layers.1.post_feedforward_layernorm"),
    "gpt2": ("transformer.h.1.mlp", "transformer.h.1.mlp"),
}


def prompts_of(model_type: str) -> Prompts:
    ids = make(model_type).inputs(rows=4)["input_ids"]
    return Prompts(ids, ids.roll(1, 0).flip(1))


@pytest.mark.parametrize("model_type", RETURNED)
def test_other_edits_see_what_is_added(model_type):
    model, prompts = make(model_type).model, prompts_of(model_type)
    block, returned = RETURNED[model_type]
    added = Site(block, side="added")
    assert added in [*sites_of(model, "attention"), *sites_of(model, "mlp")]
    for measure in (
        functools.partial(ablation, edit=mean),
        functools.partial(ablation, edit=functools.partial(mean, over="sequences")),
        functools.partial(ablation, edit=resample),
        activation_patching,
        attribution_patching,
        functools.partial(attribution_patching, steps=3),
    ):
        for where in ({}, {"positions": -1}):
            sites = [Site.of(added, **where), Site(returned, **where)]
            one, other = measure(model, prompts, logit, sites).values
            assert abs(one).max() > 1e-3
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("model_type", RETURNED)
def test_captures_have_what_is_added(model_type, tmp_path):
    model, prompts = make(model_type).model, prompts_of(model_type)
    site = Site(RETURNED[model_type][0], side="added")
    config = InstrumentationConfig.balanced().with_float32()
    with capture_activations(model, tmp_path / "a.stream", config=config):
        model(**prompts.clean)
    with ActivationReader(tmp_path / "a.stream") as reader:
        found = activation_patching(model, prompts, logit, [site], values=reader)
        means = ablation(model, prompts, logit, [site], edit=functools.partial(mean, of=reader))
    expected = activation_patching(model, prompts, logit, [site])
    torch.testing.assert_close(found.values, expected.values)
    expected = ablation(model, prompts, logit, [site], edit=mean)
    torch.testing.assert_close(means.values, expected.values, rtol=1e-4, atol=1e-5)


def test_no_capture_has_what_a_factor_is_applied_to(tmp_path):
    model, prompts = make("granite").model, prompts_of("granite")
    config = InstrumentationConfig.balanced().with_float32()
    with capture_activations(model, tmp_path / "a.stream", config=config):
        model(**prompts.clean)
    with (
        ActivationReader(tmp_path / "a.stream") as reader,
        pytest.raises(UnsupportedError, match="captures do not have it"),
    ):
        activation_patching(model, prompts, logit, sites_of(model, "mlp"), values=reader)


def test_edges_of_blocks_that_return_the_sum_are_refused(monkeypatch):
    monkeypatch.setattr(decoders, "_LAYOUTS", dict(decoders._LAYOUTS))
    monkeypatch.setattr(heads, "_LAYOUTS", dict(heads._LAYOUTS))
    fused = "query_key_value"
    register_heads(
        "BloomAttention",
        HeadLayout("dense", fused, fused, fused, heads="num_heads", fused="heads"),
    )
    layout = DecoderLayout(
        "transformer.h", "self_attention", "input_layernorm", "transformer.ln_f", "mlp",
        "post_attention_layernorm", mlp_out="mlp.dense_4h_to_h",
    )  # fmt: skip
    model, prompts = make("bloom").model, prompts_of("bloom")
    register_decoder("BloomForCausalLM", layout)
    estimated = edge_attribution(model, prompts, logit, confidence=None)
    assert estimated.edges
    register_decoder("BloomForCausalLM", dataclasses.replace(layout, mlp_out=None))
    with pytest.raises(UnsupportedError, match="something else than the sum"):
        edge_attribution(model, prompts, logit, confidence=None)


# ---- models of other people -------------------------------------------------------------------


class Model(nn.Module):
    """Two layers of a class that a test gives."""

    def __init__(self, layer: type[nn.Module]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(layer() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Block(nn.Module):
    """A block, and the layer around it."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = self.block()

    def block(self) -> nn.Module:
        return nn.Linear(8, 8)


class InPlace(Block):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.mlp(x)
        y += x
        return y


class OntoTheStream(Block):
    def forward(self, x: Tensor) -> Tensor:
        x = x.clone()
        x += 0.5 * self.mlp(x)
        return x


class Gated(Block):
    def forward(self, x: Tensor) -> Tensor:
        y = self.mlp(x)
        gate = y.sigmoid()
        return gate * y + (1 - gate) * x


class Twice(Block):
    class Inner(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return x + super().forward(x)

    def block(self) -> nn.Module:
        return self.Inner(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(x)


@pytest.mark.parametrize("layer", [InPlace, OntoTheStream])
def test_streams_may_be_changed_in_place(layer):
    model, x = Model(layer), torch.randn(2, 3, 8)
    with torch.no_grad(), intervene(model, zero("layers.1.mlp", side="added")):
        found = model(x)
    torch.testing.assert_close(found, model.layers[0](x))


@pytest.mark.parametrize("layer", [Gated, Twice])
def test_what_is_not_one_of_two_summands_is_refused(layer):
    model, x = Model(layer), torch.randn(2, 3, 8)
    with (
        pytest.raises(UnsupportedError, match=r"'layers.1.mlp'.*not known"),
        intervene(model, zero("layers.1.mlp", side="added")),
    ):
        model(x)
    with intervene(model, zero("layers.1.mlp")):  # what it returns can be edited
        model(x)


class Parallel(nn.Module):
    """A layer of two blocks side by side, and two matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.attention, self.mlp = nn.Linear(8, 8), nn.Linear(8, 8)
        self.both, self.square = nn.Linear(16, 8), nn.Linear(8, 8)


# How a layer brings the stream x, attention a and feed-forward m together. The blocks that are
# summands of their own are named first.
MERGES: dict[str, tuple[str, Any]] = {
    "x + a + m": ("am", lambda self, x, a, m: x + a + m),
    "a + m + x": ("am", lambda self, x, a, m: a + m + x),
    "x + (a + m)": ("am", lambda self, x, a, m: x + (a + m)),
    "sum of a list": ("am", lambda self, x, a, m: sum([x, a, m])),
    "in place": ("am", lambda self, x, a, m: x.clone().add_(a).add_(m)),
    "factors": ("am", lambda self, x, a, m: x * 0.5 + 0.5 * a + 2 * m),
    "two streams": ("am", lambda self, x, a, m: (x + a) + (x + m)),
    "gate of the stream": ("am", lambda self, x, a, m: x + a * self.norm(x).sigmoid() + m),
    "alpha": ("m", lambda self, x, a, m: torch.add(x, a, alpha=0.5) + m),
    "alpha behind": ("m", lambda self, x, a, m: torch.add(x + m, a, alpha=0.5)),
    "difference": ("m", lambda self, x, a, m: x - a + m),
    "lerp": ("m", lambda self, x, a, m: torch.lerp(x, a, 0.3) + m),
    "lerp of a part": ("m", lambda self, x, a, m: torch.lerp(x * 0.5, a, 0.3) + m),
    "addcmul": ("m", lambda self, x, a, m: torch.addcmul(x, a, x.sigmoid()) + m),
    "baddbmm": ("m", lambda self, x, a, m: torch.baddbmm(x, a, a.mT @ a) + m),
    "stack": ("m", lambda self, x, a, m: torch.stack([x, a]).sum(0) + m),
    "einsum": ("m", lambda self, x, a, m: torch.einsum("nbtw->btw", torch.stack([x, a])) + m),
    "where": ("m", lambda self, x, a, m: torch.where(x > 0, x, a) + m),
    "gates": ("m", lambda self, x, a, m: a.sigmoid() * a + (1 - a.sigmoid()) * x + m),
    "twice": ("m", lambda self, x, a, m: x + a + m + a),
    "twice, shifted": ("m", lambda self, x, a, m: (x + a) + a.roll(1, -1) + m),
    "twice, from x": ("m", lambda self, x, a, m: (x + a) + m + self.square(x + a)),
    "halves": ("", lambda self, x, a, m: x + torch.cat([a[..., :4], m[..., 4:]], -1)),
    "one matrix": ("", lambda self, x, a, m: x + self.both(torch.cat([a, m], -1))),
    "gates of blocks": ("", lambda self, x, a, m: x + (a.sigmoid() * a + (1 - a.sigmoid()) * m)),
}


@pytest.mark.parametrize("block", ["attention", "mlp"])
@pytest.mark.parametrize("merge", MERGES)
@torch.no_grad()
def test_blocks_side_by_side_are_ablated_alone_or_refused(merge, block):
    own, merged = MERGES[merge]

    class Layer(Parallel):
        def forward(self, x: Tensor) -> Tensor:
            normed = self.norm(x)
            return merged(self, x, self.attention(normed), self.mlp(normed))

    model, x = Model(Layer), torch.randn(2, 3, 8)
    handle = (
        model.layers[1]
        .get_submodule(block)
        .register_forward_hook(lambda module, args, output: torch.zeros_like(output))
    )
    expected = model(x)
    handle.remove()
    try:
        with intervene(model, zero(f"layers.1.{block}", side="added")):
            found = model(x)
    except UnsupportedError:
        assert block[0] not in own
    else:
        torch.testing.assert_close(found, expected)


class Inside(Parallel):
    """A block that adds to the stream itself."""

    def __init__(self, forward: Any) -> None:
        super().__init__()
        self.weight, self.bias = (nn.Parameter(torch.randn(8)) for _ in range(2))
        self._own = forward

    def forward(self, x: Tensor) -> Any:
        return self._own(self, x)

    def normed(self, x: Tensor) -> Tensor:
        x = x - x.mean(-1, keepdim=True)
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.weight + self.bias


def sequential(self: Inside, x: Tensor) -> Tensor:
    x = x + self.attention(self.norm(x))
    return x + self.mlp(self.norm(x))


ONCE: dict[str, Any] = {
    "a sum": lambda self, x: x + self.attention(self.norm(x)),
    "a sum of two": lambda self, x: x + (self.attention(self.norm(x)) + self.mlp(self.norm(x))),
    "a norm in Python": lambda self, x: x + self.attention(self.normed(x)),
    "a norm behind it": lambda self, x: self.normed(x + self.attention(x)),
}
SEVERAL: dict[str, Any] = {
    "one behind the other": sequential,
    "side by side": lambda self, x: x + self.attention(self.norm(x)) + self.mlp(self.norm(x)),
    "bias": lambda self, x: (x + self.attention(self.norm(x))) + self.bias,
    "expanded bias": lambda self, x: (x + self.attention(self.norm(x))) + self.bias.expand_as(x),
    "bias taken away": lambda self, x: (x + self.attention(self.norm(x))) - self.bias,
    "bias with alpha": lambda self, x: torch.add(x + self.attention(x), self.bias, alpha=2.0),
    "number": lambda self, x: (x + self.attention(self.norm(x))) + 1.0,
    "lerp behind": lambda self, x: torch.lerp(x + self.attention(x), self.mlp(self.norm(x)), 0.5),
    "lerp": lambda self, x: torch.lerp(x, self.attention(self.norm(x)), 0.5),
    "difference": lambda self, x: x - self.attention(self.norm(x)),
    "factor": lambda self, x: x * 0.5 + self.attention(self.norm(x)),
    "in place": lambda self, x: x.clone().add_(self.attention(x)).add_(self.mlp(x)),
}


@pytest.mark.parametrize("around", ["behind", "beside"])
@pytest.mark.parametrize("inside", [*ONCE, *SEVERAL])
@torch.no_grad()
def test_blocks_that_add_more_than_once_themselves_are_refused(inside, around):
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Inside((ONCE | SEVERAL)[inside])
            self.last = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.block(x)
            return y + self.last(y if around == "behind" else x)

    model, x = Model(Layer), torch.randn(2, 3, 8)
    if inside in SEVERAL or around == "beside":
        with (
            pytest.raises(UnsupportedError, match=r"'layers.1.block'.*known"),
            intervene(model, zero("layers.1.block", side="added")),
        ):
            model(x)
        return
    with intervene(model, zero("layers.1.block", side="added")):
        found = model(x)
    y = model.layers[0](x)
    if inside == "a norm behind it":
        y = model.layers[1].block.normed(y)
    torch.testing.assert_close(found, y + model.layers[1].last(y))


@pytest.mark.parametrize("both", [False, True])
@torch.no_grad()
def test_blocks_with_two_outputs_are_refused_if_both_are_added(both):
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Inside(lambda self, x: (self.attention(x), self.mlp(x)))

        def forward(self, x: Tensor) -> Tensor:
            one, other = self.block(x)
            x = x + one
            return x + other if both else x

    model, x = Model(Layer), torch.randn(2, 3, 8)
    if both:
        with (
            pytest.raises(UnsupportedError, match="more than once"),
            intervene(model, zero("layers.1.block", side="added")),
        ):
            model(x)
        return
    with intervene(model, zero("layers.1.block", side="added")):
        torch.testing.assert_close(model(x), model.layers[0](x))


# What a layer also computes of the stream x and of what its block returned, y.
ALSO: dict[str, Any] = {
    "another sum": lambda self, x, y: x + y,
    "bias": lambda self, x, y: y + self.bias.expand_as(y),
    "double": lambda self, x, y: y + y,
}


@pytest.mark.parametrize("also", ALSO)
@torch.no_grad()
def test_blocks_are_refused_only_if_two_streams_get_what_they_return(also):
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block, self.bias = nn.Linear(8, 8), nn.Parameter(torch.randn(8))

        def forward(self, x: Tensor) -> Tensor:
            y = self.block(x)
            result = x + y
            self.also = ALSO[also](self, x, y)
            return result

    model, x = Model(Layer), torch.randn(2, 3, 8)
    edit = intervene(model, zero("layers.1.block", side="added"))
    if also == "another sum":
        with pytest.raises(UnsupportedError, match="more than once"), edit:
            model(x)
        return
    with edit:
        torch.testing.assert_close(model(x), model.layers[0](x))


def test_new_tensors_in_the_places_of_old_ones_are_not_taken_for_them():
    reused = 0

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            nonlocal reused
            y = self.block(x)
            place = id(y)
            x = x + y
            del y
            for _ in range(20):
                other = torch.full((2, 3, 8), 0.5)
                reused += id(other) == place
                x = x + other
            return x

    model, x = Model(Layer), torch.randn(2, 3, 8)
    with torch.no_grad(), intervene(model, zero("layers.1.block", side="added")):
        torch.testing.assert_close(model(x), model.layers[0](x) + 10)
    assert reused


def test_layers_whose_forward_is_called_directly_are_refused():
    tiny = make("squeezebert")
    with (
        pytest.raises(UnsupportedError, match="runs outside of"),
        intervene(tiny.model, zero(sites_of(tiny.model, "mlp")[0])),
    ):
        run(tiny.model, tiny.inputs())


def test_a_site_of_what_is_added():
    assert str(Site("h.0.mlp", side="added")) == "'h.0.mlp' added"
    with pytest.raises(InvalidArgumentError, match='head = 1 with side="added"'):
        Site("h.0.attn", side="added", head=1)
    with (
        pytest.raises(InvalidArgumentError, match="give the name of a module, 'transformer.h.0.a"),
        intervene(make("gpt2").model, zero("transformer.h.0.attn[1]", side="added")),
    ):
        pass
