"""Edits at tokens, inputs, calls and steps, and of single heads of attention."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from intervened import LAYER, MODELS, inputs_of, output_of, result, seen_by
from llm_instrumentation import ActivationReader, InstrumentationConfig, capture_activations
from llm_instrumentation.errors import InvalidArgumentError
from llm_instrumentation.interventions import (
    Edit,
    HeadLayout,
    Site,
    add,
    apply,
    attention_heads,
    freeze,
    intervene,
    register_heads,
    replace,
    zero,
)
from torch import Tensor, nn

# ---- where ----------------------------------------------------------------------------------


def test_positions_of_tokens_that_stand_one_after_the_other(build, ids):
    """Experts get [batch * tokens, width]."""
    model = build("mixtral")
    layer = "model.layers.0.mlp.experts"
    before = output_of(model, layer, ids)
    assert before.shape == (18, 32)
    after = output_of(model, layer, ids, zero(layer, sequences=1, positions=[0, -1]))
    assert not after.view(2, 9, 32)[1, [0, 8]].any()
    assert torch.equal(after.view(2, 9, 32)[0], before.view(2, 9, 32)[0])
    assert torch.equal(after.view(2, 9, 32)[1, 1:8], before.view(2, 9, 32)[1, 1:8])


def test_what_a_module_is_called_with(llama, ids):
    by_keyword = f"{LAYER}.self_attn"
    for site in (
        Site(by_keyword, side="input"),
        Site(f"{by_keyword}['hidden_states']!input"),
        Site(f"{LAYER}.input_layernorm"),
    ):
        assert not output_of(llama, f"{by_keyword}.q_proj", ids, zero(site)).any()
    with intervene(llama, zero(f"{by_keyword}[3]!input"), unused="ignore"):
        with pytest.raises(InvalidArgumentError, match="is called with no tensor at this place"):
            result(llama, ids)


def test_one_of_several_outputs_keeps_its_container(build, ids):
    model = build("t5")
    given = inputs_of("t5", ids)
    with torch.no_grad(), intervene(model, zero("['encoder_last_hidden_state']")):
        output = model(**given)
    assert not output.encoder_last_hidden_state.any() and output.logits.any()
    assert type(output) is type(model(**given))
    assert list(output) == list(model(**given))


def test_the_calls_of_a_module_that_runs_twice(ids):
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block, self.alias = nn.Linear(4, 4), None
            self.alias = self.block

        def forward(self, x: Tensor) -> Tensor:
            return self.alias(self.block(x))

    model, x = Twice(), torch.randn(3, 4)
    once = model.block(x)
    bias = model.block.bias
    with torch.no_grad():
        with intervene(model, zero("block", calls=0)):
            assert torch.equal(model(x), model.block.forward(torch.zeros(3, 4)))
        with intervene(model, zero("alias", calls=1), add("block", bias, calls=0)) as applied:
            assert not model(x).any()
        assert applied.counts == [1, 1]
        with intervene(model, zero("block!input", calls=1)):
            assert torch.equal(model(x), bias.expand(3, 4))
        with intervene(model, replace("block", once.detach(), calls=1)):
            assert torch.equal(model(x), once)


def test_the_steps_of_a_generation(llama, ids):
    vector = 5 * torch.randn(32, generator=torch.Generator().manual_seed(5))

    def generated(*edits: Edit) -> Tensor:
        with torch.no_grad(), intervene(llama, *edits) as applied:
            found: Tensor = llama.generate(
                ids, max_new_tokens=6, do_sample=False, attention_mask=torch.ones_like(ids)
            )
        assert applied.steps == 6
        return found[:, 9:]

    steered = generated(add(LAYER, vector, steps=slice(3, None)))
    plain, always = generated(), generated(add(LAYER, vector))
    assert torch.equal(steered[:, :3], plain[:, :3]) and not torch.equal(steered, plain)
    assert not torch.equal(always[:, :1], plain[:, :1])
    # Step 3 is what the model is given after three new tokens.
    tokens = torch.cat([ids, plain[:, :3]], 1)
    with intervene(llama, add(LAYER, vector, positions=-1)):
        assert torch.equal(result(llama, tokens)[:, -1].argmax(-1), steered[:, 3])
    with pytest.raises(
        InvalidArgumentError, match=r"positions = 4, and this call has 1: use steps"
    ):
        generated(zero(LAYER, positions=4))
    generated(zero(LAYER, positions=4, steps=0))
    assert torch.equal(generated(freeze(LAYER, positions=-1, steps=slice(9)))[:, :1], plain[:, :1])


def test_the_steps_of_an_encoder_decoder_are_those_of_captures(build, ids, tmp_path):
    model = build("t5")

    def generated() -> Tensor:
        found: Tensor = model.generate(ids, max_new_tokens=4, do_sample=False)
        return found

    config = InstrumentationConfig.balanced().with_float32()
    with torch.no_grad():
        clean = generated()
        with capture_activations(model, tmp_path / "a.stream", config=config):
            generated()
        with ActivationReader(tmp_path / "a.stream") as reader:
            layers = ("encoder.block.1", "decoder.block.0", "lm_head")
            assert [reader[layer][0].step for layer in layers] == [0, 1, 1]
            with intervene(model, *(replace(layer, reader) for layer in layers)) as applied:
                assert torch.equal(generated(), clean)
    assert applied.counts == [1, 4, 4] and applied.steps == 5


# ---- heads ----------------------------------------------------------------------------------


def test_the_table_and_these_models_are_the_same():
    from llm_instrumentation.interventions.heads import _LAYOUTS

    table = {name for name in _LAYOUTS if not name.startswith("HandMade")}  # of other tests
    assert {f"{kind.removesuffix('Text')}Attention" for kind in MODELS} == table


def weight_of(module: nn.Module) -> Tensor:
    """The weight as [outputs, inputs], which GPT-2's Conv1D has transposed."""
    weight: Any = module.weight
    return weight.data.T if type(module).__name__ == "Conv1D" else weight.data


@pytest.mark.parametrize("kind", MODELS)
def test_a_head_without_result_is_an_output_projection_without_its_columns(of_kind, ids, kind):
    model = of_kind(kind)
    given = inputs_of(kind.lower(), ids)
    clean = result(model, given)
    heads = attention_heads(model)
    assert len(heads) == (6 if kind == "T5" else 2)
    for layer, found in heads.items():
        head, width = 2, found.head_dim
        edited = copy.deepcopy(model)
        out = edited.get_submodule(f"{layer}.{found.layout.out}")
        weight_of(out)[:, head * width : (head + 1) * width] = 0
        with intervene(model, zero(layer, head=head)):
            ablated = result(model, given)
        assert torch.equal(ablated, result(edited, given)) and not torch.equal(ablated, clean)


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("head_input", ["q", "k", "v"])
def test_a_head_without_query_key_or_value(of_kind, ids, kind, head_input):
    """Zeros there are zeros in the rows of the projection, and of its bias."""
    model = of_kind(kind)
    given = inputs_of(kind.lower(), ids)
    clean = result(model, given)
    heads = attention_heads(model)
    layer, found = list(heads.items())[1]
    shared = "num_key_value_heads" in MODELS[kind]
    assert (found.heads, found.key_value_heads) == (4, 2 if shared else 4)
    head, dim = 3, found.head_dim
    place = head if head_input == "q" or not shared else 1  # the second of two has heads 2 and 3
    if kind == "GPT2":
        place += 4 * "qkv".index(head_input)
    elif kind == "GPTNeoX":
        place = 3 * place + "qkv".index(head_input)
    edited = copy.deepcopy(model)
    projection: Any = edited.get_submodule(f"{layer}.{getattr(found.layout, head_input)}")
    weight_of(projection)[place * dim : (place + 1) * dim] = 0
    if projection.bias is not None:
        projection.bias.data[place * dim : (place + 1) * dim] = 0
    with intervene(model, zero(layer, head=head, head_input=head_input)):
        ablated = result(model, given)
    assert torch.equal(ablated, result(edited, given))
    if kind not in ("Bert", "Roberta", "XLMRoberta", "Electra", "OPT") or head_input != "k":
        assert not torch.equal(ablated, clean)


def test_all_heads_together_are_the_attention(of_kind, ids):
    model = of_kind("Llama")
    with intervene(model, *(zero("layers.0.self_attn", head=head) for head in range(4))):
        all_heads = result(model, ids)
    with intervene(model, zero("layers.0.self_attn")):
        assert torch.equal(all_heads, result(model, ids))


def test_values_for_a_head_have_its_width_or_that_of_all(of_kind, ids):
    model = of_kind("Llama")
    site = Site("layers.1.self_attn", head=1)
    whole = torch.randn(2, 9, 32, generator=torch.Generator().manual_seed(6))
    seen: list[Tensor] = []
    for values in (whole, whole[..., 8:16], whole[0, 0], whole[0, 0, 8:16]):
        with intervene(model, replace(site, values), apply(site, seen_by(seen))):
            result(model, ids)
        expected = values[..., 8:16] if values.shape[-1] == 32 else values
        assert torch.equal(seen[-1], expected.expand(2, 9, 8))
    with intervene(model, replace(site, whole[..., :7]), unused="ignore"):
        with pytest.raises(
            InvalidArgumentError, match=r"\[2, 9, 7\]; give \[2, 9, 32\], \[2, 9, 8\]"
        ):
            result(model, ids)


def test_users_say_where_their_heads_are(monkeypatch):
    from llm_instrumentation.interventions import heads

    monkeypatch.setattr(heads, "_LAYOUTS", dict(heads._LAYOUTS))

    class OwnAttention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.count, self.width = 2, 3
            self.query, self.key, self.value, self.mix = (nn.Linear(6, 6) for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = (f(x).unflatten(-1, (2, 3)) for f in (self.query, self.key, self.value))
            return self.mix((q * k + v).flatten(-2))

    model = nn.Sequential(OwnAttention())
    with pytest.raises(InvalidArgumentError, match="'0' is no attention module whose heads"):
        intervene(model, zero("0", head=0)).__enter__()
    register_heads(
        OwnAttention, HeadLayout("mix", "query", "key", "value", heads="count", head_dim="width")
    )
    seen: list[Tensor] = []
    x = torch.randn(2, 5, 6)
    with intervene(model, zero("0", head=1), apply("0.mix!input", seen_by(seen))):
        model(x)
    assert not seen[0][..., 3:].any() and seen[0][..., :3].all()
    with pytest.raises(InvalidArgumentError, match="head = 2: '0' has the heads 0 to 1"):
        intervene(model, zero("0", head=2)).__enter__()
