"""Direct logit attribution from captures, against the model's own forward pass."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_models
import torch
from llm_instrumentation import ActivationReader, InstrumentationConfig, capture_activations
from llm_instrumentation.analysis.reader import UnknownActivationError
from llm_instrumentation.errors import InvalidArgumentError, UnsupportedError
from llm_instrumentation.interventions import logit_attribution
from llm_instrumentation.interventions.logit_attribution import (
    LogitAttribution,
    attribution_layers,
    direct_logit_attribution,
    direct_logit_attributions,
)
from torch import nn

IDS = torch.tensor([[5, 17, 3, 42, 8, 11], [9, 2, 30, 7, 7, 21]])


def make(model_type: str, **fields: Any) -> nn.Module:
    """A model whose biases and weights of norms are not those of the beginning."""
    model = tiny_models.make(model_type, **fields).model.float().eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("bias") or weight.dim() == 1:
                weight.add_(torch.randn(weight.shape, generator=generator) / 4)
    return model


def captured(model: nn.Module, path: Path, *, ids: torch.Tensor = IDS, exact: bool = True) -> Path:
    config = InstrumentationConfig.balanced().with_layers(attribution_layers(model)).with_inputs()
    config.with_float32(exact)
    with torch.no_grad(), capture_activations(model, path, config=config):
        model(ids)
    return path


def logits_of(model: nn.Module) -> np.ndarray:
    with torch.no_grad():
        return model(IDS).logits.double().numpy()


MODELS = ["gpt2", "llama", "gpt_neox", "opt", "mixtral", "gemma", "qwen2"]
POST_NORMS = ["olmo2", "gemma3_text", "glm4"]


@pytest.mark.parametrize("model_type", [*MODELS, *POST_NORMS])
def test_the_parts_add_up_to_the_logits_of_the_model(model_type, tmp_path):
    model = make(model_type)
    run, logits = captured(model, tmp_path / "run.stream"), logits_of(model)
    found = direct_logit_attribution(run, model, sequence=1)
    following = logits[1, np.arange(5), IDS[1, 1:]]
    np.testing.assert_allclose(found.logits, following, rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(found.values.sum(0), following, rtol=1e-3, atol=1e-4)
    assert np.abs(found.rounding).max() < 1e-4
    assert found.targets.tolist() == IDS[1, 1:].tolist()
    minus = direct_logit_attribution(run, model, 13, 29, heads=False)
    np.testing.assert_allclose(
        minus.values.sum(0), logits[0, :, 13] - logits[0, :, 29], rtol=1e-3, atol=1e-4
    )
    assert minus.parts[:3] == ("input", "a0", "m0") and minus.parts[-1] == "bias"


@pytest.mark.parametrize("model_type", MODELS)
def test_a_part_adds_what_is_missing_without_it_under_the_same_scale(model_type, tmp_path):
    """The last norm runs on the stream without a part, and its output is brought to one scale."""
    model = make(model_type)
    run = captured(model, tmp_path / "run.stream")
    found = direct_logit_attribution(run, model, 13)
    layers = attribution_layers(model)
    norm, head = model.get_submodule(layers[-1]), model.get_output_embeddings()
    with ActivationReader(run) as reader:

        def vectors(name: str) -> torch.Tensor:
            names = [one for one in reader.layers if one.startswith(name) and "input" in one]
            return reader[names[0]][0].to_torch()[0]

        stream, result = vectors(layers[-1]), vectors(layers[1])
    weight = model.get_submodule(layers[1]).weight.detach()
    weight = weight.T if model_type == "gpt2" else weight
    heads = [name for name in found.parts if name.startswith("a0.h")]
    size = len(weight.T) // len(heads)
    assert len(heads) == 4
    with torch.no_grad():
        zero = norm(torch.zeros(1, stream.shape[1]))

        def scale(x: torch.Tensor) -> torch.Tensor:
            has_mean = torch.allclose(norm(x), norm(x + 1), atol=1e-3)
            x = x - x.mean(-1, keepdim=True) if has_mean else x
            return (x.square().mean(-1, keepdim=True) + 1e-5).sqrt()

        for number, head_name in enumerate(heads):
            columns = slice(number * size, (number + 1) * size)
            without = stream - result[:, columns] @ weight[:, columns].T
            normed = zero + (norm(without) - zero) * scale(without) / scale(stream)
            missing = (head(norm(stream)) - head(normed))[:, 13]
            np.testing.assert_allclose(found[head_name], missing, rtol=2e-3, atol=2e-4)


@pytest.mark.parametrize("model_type", POST_NORMS)
def test_a_head_adds_what_is_missing_without_it_under_the_scale_of_the_norm_behind(
    model_type, tmp_path
):
    model = make(model_type)
    found = direct_logit_attribution(captured(model, tmp_path / "run.stream"), model, 13)
    layer = model.model.layers[0]
    out = layer.self_attn.o_proj
    behind = layer.post_attention_layernorm
    if model_type == "glm4":
        behind = layer.post_self_attn_layernorm
    seen = {}
    hooks = [
        out.register_forward_pre_hook(lambda _, args: seen.update(heads=args[0][0])),
        model.model.norm.register_forward_hook(
            lambda _, args, made: seen.update(stream=args[0][0])
        ),
    ]
    with torch.no_grad():
        model(IDS)
        for hook in hooks:
            hook.remove()
        size = out.in_features // 4
        total = out(seen["heads"])
        for number in range(4):
            columns = slice(number * size, (number + 1) * size)
            one = seen["heads"][:, columns] @ out.weight[:, columns].T
            # The norm of the sum, its scale, and the head under this scale.
            factor = behind(total) / total
            weight = model.model.norm(seen["stream"]) / seen["stream"]
            missing = ((one * factor * weight) @ model.lm_head.weight[13]).numpy()
            np.testing.assert_allclose(found[f"a0.h{number}"], missing, rtol=2e-3, atol=2e-4)


def test_biases_are_parts_of_their_own(tmp_path):
    model = make("gpt2")
    run = captured(model, tmp_path / "run.stream")
    by_head = direct_logit_attribution(run, model, 13)
    by_part = direct_logit_attribution(run, model, 13, heads=False)
    assert [one for one in by_head.parts if "bias" in one] == ["a0.bias", "a1.bias", "bias"]
    for number in range(2):
        heads = sum(by_head[one] for one in by_head.parts if one.startswith(f"a{number}."))
        np.testing.assert_allclose(heads, by_part[f"a{number}"])
    bias = (model.lm_head.weight[13] @ model.transformer.ln_f.bias).detach()
    np.testing.assert_allclose(by_head["bias"], float(bias), rtol=1e-5)
    without = direct_logit_attribution(
        captured(llama := make("llama"), tmp_path / "llama.stream"), llama, 13
    )
    assert [one for one in without.parts if "bias" in one] == ["bias"]
    assert not without["bias"].any()


def test_values_of_float16_leave_a_rounding_that_is_told(tmp_path):
    model = make("gpt2")
    run = captured(model, tmp_path / "run.stream", exact=False)
    found = direct_logit_attribution(run, model)
    assert 0 < np.abs(found.rounding).max() < 0.01 * np.abs(found.logits).max()
    np.testing.assert_allclose(found.values.sum(0) + found.rounding, found.logits)


def test_the_result_is_shown(tmp_path):
    model = make("gpt2")
    found = direct_logit_attribution(captured(model, tmp_path / "run.stream"), model, 13, 29)
    (first, value), *_ = found.top(3)
    assert abs(value) == np.abs(found.values[:, -1]).max() and found[first][-1] == value
    assert f"{first} " in str(found) and "minus that of token 29" in str(found)
    assert first in found._repr_html_()
    frame = found.to_pandas()
    assert frame.loc[first, 5] == value and frame.shape == found.values.shape
    with pytest.raises(InvalidArgumentError, match="no part 'a9': the parts are input, a0"):
        found["a9"]


@pytest.mark.parametrize(
    ("model_type", "message"),
    [
        ("bert", "norm the sum"),
        ("t5", "it has an encoder"),
        ("mamba", "a recurrence in place of attention"),
    ],
)
def test_models_that_are_no_such_sum_are_refused(model_type, message, tmp_path):
    with pytest.raises(UnsupportedError, match=message):
        attribution_layers(tiny_models.make(model_type).model)


def test_logits_that_are_scaled_are_refused(tmp_path):
    class Scaled(type(make("llama"))):
        def forward(self, *args: Any, **how: Any) -> Any:
            output = super().forward(*args, **how)
            output.logits = 30 * torch.tanh(output.logits / 3)
            return output

    model = make("llama")
    run = captured(model, tmp_path / "run.stream")
    model.__class__ = Scaled
    with pytest.raises(UnsupportedError, match="it scales or caps its logits"):
        direct_logit_attribution(run, model, 13)


def test_parts_that_do_not_add_up_are_refused(tmp_path):
    """A capture of another model: its parts are projected by other weights."""
    run = captured(make("gpt2"), tmp_path / "run.stream")
    other = make("gpt2")
    with torch.no_grad():
        other.transformer.h[0].attn.c_proj.weight.mul_(5)
    with pytest.raises(UnsupportedError, match=r"added differs by \d+% .* another model"):
        direct_logit_attribution(run, other, 13)


def test_what_was_not_captured_is_named(tmp_path):
    model = make("gpt2")
    config = InstrumentationConfig.balanced().with_layers(attribution_layers(model))
    with torch.no_grad(), capture_activations(model, tmp_path / "run.stream", config=config):
        model(IDS)
    with pytest.raises(UnknownActivationError, match=r"lacks the input of 'transformer.h.0'"):
        direct_logit_attribution(tmp_path / "run.stream", model)


@pytest.mark.parametrize("values_at_once", [1, 4 << 20])  # one text, or all
@pytest.mark.parametrize("model_type", ["gpt2", "olmo2"])
def test_several_texts_are_as_each_alone(model_type, values_at_once, tmp_path, monkeypatch):
    """Texts of several lengths, in three steps."""
    model = make(model_type)
    run = tmp_path / "run.stream"
    config = InstrumentationConfig.balanced().with_layers(attribution_layers(model)).with_inputs()
    with torch.no_grad(), capture_activations(model, run, config=config.with_float32()):
        for length in (6, 3, 5):
            model(IDS[:, :length])
    monkeypatch.setattr(logit_attribution, "_BLOCK", values_at_once)

    def same(found: list[LogitAttribution], sequences: Any, tokens: Any, against: Any) -> None:
        assert len(found) == len(sequences)
        for one, sequence, token, minus in zip(found, sequences, tokens, against, strict=True):
            alone = direct_logit_attribution(run, model, token, minus, sequence=sequence)
            assert one.parts == alone.parts and one.tokens == alone.tokens
            assert one.against == alone.against
            for name in ("positions", "targets"):
                np.testing.assert_array_equal(getattr(one, name), getattr(alone, name))
            for name in ("values", "logits", "rounding"):
                np.testing.assert_allclose(
                    getattr(one, name), getattr(alone, name), rtol=1e-9, atol=1e-9
                )

    everything = direct_logit_attributions(run, model)
    same(everything, range(6), [None] * 6, [None] * 6)
    assert [len(one.positions) for one in everything] == [5, 5, 2, 2, 4, 4]
    chosen = [4, 0, 3]
    found = direct_logit_attributions(run, model, [13, 7, 13], [9, 8, 7], sequences=chosen)
    same(found, chosen, [13, 7, 13], [9, 8, 7])
    same(direct_logit_attributions(run, model, 13, sequences=[1]), [1], [13], [None])


def test_tokens_that_are_not_one_for_each_text_are_refused(tmp_path):
    model = make("gpt2")
    run = captured(model, tmp_path / "run.stream")
    with pytest.raises(InvalidArgumentError, match="tokens has 3 tokens, and there are 2 texts"):
        direct_logit_attributions(run, model, [1, 2, 3])
    with pytest.raises(InvalidArgumentError, match="against has 1 tokens, and there are 2 texts"):
        direct_logit_attributions(run, model, 1, [2])
    with pytest.raises(InvalidArgumentError, match="sequence = 5: .* has the texts 0 to 1"):
        direct_logit_attributions(run, model, 1, sequences=[0, 5])
    assert direct_logit_attributions(run, model, 1, sequences=[]) == []
    numbers = torch.tensor([1, 0])
    found = direct_logit_attributions(run, model, numbers[0], sequences=numbers)
    assert [one.targets[0] for one in found] == [1, 1]
    with pytest.raises(InvalidArgumentError, match="sequence = -1"):
        direct_logit_attribution(run, model, 1, sequence=-1)


def test_rows_of_no_known_text_are_in_none(tmp_path):
    """What beams are is not known behind their first step."""
    model = make("llama", pad_token_id=0, bos_token_id=None, eos_token_id=None)
    run = tmp_path / "run.stream"
    config = InstrumentationConfig.balanced().with_layers(attribution_layers(model)).with_inputs()
    with torch.no_grad(), capture_activations(model, run, config=config.with_float32()):
        model.generate(IDS, max_new_tokens=3, num_beams=3, do_sample=False)
    with ActivationReader(run) as reader:
        norm = next(name for name in reader.layers if "norm" in name)
        texts = reader.rows(norm).column("sequence")
    assert (texts < 0).any()
    found = direct_logit_attributions(run, model, 13)
    assert len(found) == len(set(texts[texts >= 0].tolist()))


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"token": 10**6}, "token 1000000: the model has"),
        ({"token": 3, "against": -1}, "token -1: the model has"),
        ({"token": 3, "sequence": 2}, "sequence = 2"),
    ],
)
def test_wrong_arguments_are_named(how, message, tmp_path):
    model = make("gpt2")
    run = captured(model, tmp_path / "run.stream")
    with pytest.raises(InvalidArgumentError, match=message):
        direct_logit_attribution(run, model, **how)
    with pytest.raises(InvalidArgumentError, match="no token follows the last one of text 0"):
        direct_logit_attribution(captured(model, tmp_path / "one.stream", ids=IDS[:, :1]), model)


@pytest.mark.parametrize("model_type", ["gpt2", "gemma3_text"])
def test_some_positions_are_as_among_all(model_type, tmp_path):
    model = make(model_type)
    run = captured(model, tmp_path / "run.stream")
    whole = direct_logit_attributions(run, model, 13, 29)
    following = direct_logit_attributions(run, model)
    for given, places in [(-1, [5]), (0, [0]), ([3, -2, 1], [3, 4, 1]), (np.array([2]), [2])]:
        some = direct_logit_attributions(run, model, 13, 29, positions=given)
        for all_, found in zip(whole, some, strict=True):
            assert found.positions.tolist() == places
            assert found.tokens == tuple(all_.tokens[at] for at in places)
            np.testing.assert_allclose(found.values, all_.values[:, places], rtol=1e-9, atol=1e-9)
            np.testing.assert_allclose(found.logits, all_.logits[places], rtol=1e-9, atol=1e-9)
    found = direct_logit_attribution(run, model, sequence=1, positions=[4, 0])
    assert found.targets.tolist() == following[1].targets[[4, 0]].tolist() == [21, 2]

    for wrong in (6, -7):
        with pytest.raises(InvalidArgumentError, match=f"position {wrong}: of text 0 .* 6 tokens"):
            direct_logit_attribution(run, model, 13, positions=wrong)
    with pytest.raises(InvalidArgumentError, match="no token follows the last one"):
        direct_logit_attribution(run, model, positions=-1)
    with pytest.raises(InvalidArgumentError, match="positions is empty: give at least one"):
        direct_logit_attribution(run, model, 13, positions=[])


@pytest.mark.parametrize(
    "wrong",
    [True, [0, False], np.array([True, False]), torch.tensor(True), 1.0, [0.5], "1", slice(2)],
)
def test_positions_and_tokens_are_integers(tmp_path, wrong):
    model = make("gpt2")
    run = captured(model, tmp_path / "run.stream")
    with pytest.raises(InvalidArgumentError, match="positions = .*: give an integer, or a list"):
        direct_logit_attribution(run, model, 13, positions=wrong)
    with pytest.raises(InvalidArgumentError, match="tokens = .*: give an integer, or a list"):
        direct_logit_attributions(run, model, wrong)


def test_a_capture_of_last_positions_has_their_attribution(tmp_path):
    model = make("gpt2")
    whole = direct_logit_attributions(captured(model, tmp_path / "all.stream"), model, 13, 29)
    config = InstrumentationConfig.balanced().with_layers(attribution_layers(model)).with_inputs()
    config.with_last_position().with_float32()
    with torch.no_grad(), capture_activations(model, tmp_path / "last.stream", config=config):
        model(IDS)
    last = direct_logit_attributions(tmp_path / "last.stream", model, 13, 29, positions=5)
    for all_, found in zip(whole, last, strict=True):
        np.testing.assert_allclose(found.values, all_.values[:, 5:], rtol=1e-9, atol=1e-9)
        assert found.positions.tolist() == [5]


def test_a_token_that_does_not_follow_is_not_taken_for_one_that_does(tmp_path):
    """Of a generation every other step was captured."""
    model = make("llama", pad_token_id=0, bos_token_id=None, eos_token_id=None)
    run = tmp_path / "run.stream"
    config = InstrumentationConfig.balanced().with_layers(attribution_layers(model)).with_inputs()
    config.with_every(2).with_float32()
    with torch.no_grad(), capture_activations(model, run, config=config):
        model.generate(IDS, max_new_tokens=6, min_new_tokens=6, do_sample=False)
    assert direct_logit_attribution(run, model, 13).positions.tolist() == [*range(6), 7, 9]
    assert direct_logit_attribution(run, model, positions=[0, 4]).targets.tolist() == [17, 11]
    with pytest.raises(InvalidArgumentError, match="lacks the token behind position 5 of text 0"):
        direct_logit_attribution(run, model)
