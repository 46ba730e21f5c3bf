"""Each kind of edit, beside the same result reached another way."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers
from intervened import LAYER, MLP, output_of, result, seen_by
from llm_instrumentation import ActivationReader, InstrumentationConfig, capture_activations
from llm_instrumentation.errors import InvalidArgumentError, UnsupportedError
from llm_instrumentation.interventions import (
    add,
    apply,
    freeze,
    intervene,
    mean,
    noise,
    replace,
    resample,
    zero,
)
from tiny_models import make
from torch import Tensor, nn
from transformers_cache import CACHE_NAME


def test_zeros_are_the_model_without_the_weights(llama, ids):
    other = copy.deepcopy(llama)
    nn.init.zeros_(other.model.layers[0].mlp.down_proj.weight)
    with intervene(llama, zero(MLP)) as applied:
        assert torch.equal(result(llama, ids), result(other, ids))
    assert applied.counts == [1] and applied.steps == 1


def test_a_vector_is_added_to_the_chosen_tokens(llama, ids):
    vector = torch.randn(32, generator=torch.Generator().manual_seed(2))
    before = output_of(llama, LAYER, ids)
    after = output_of(llama, LAYER, ids, add(LAYER, vector, scale=-3.0, positions=slice(2, 4)))
    expected = before.clone()
    expected[:, 2:4] += -3.0 * vector
    assert torch.equal(after, expected)
    part = output_of(llama, LAYER, ids, add(LAYER, expected[:, 2:4], positions=[3, 2]))
    assert torch.equal(part[:, 2:4], before[:, 2:4] + expected[:, 2:4])
    assert torch.equal(part[:, 4:], before[:, 4:])


def test_the_mean_leaves_padding_out(minilm):
    model, given, layer = minilm.model, minilm.inputs, "encoder.layer.3"
    before, real = output_of(model, layer, given), given["attention_mask"].bool()
    assert not real.all()
    after = output_of(model, layer, given, mean(layer))
    assert torch.allclose(after, before[real].mean(0).expand_as(before), atol=1e-6)
    over = output_of(model, layer, given, mean(layer, over="sequences", positions=1))
    assert torch.allclose(over[:, 1], before[:, 1].mean(0).expand(8, -1), atol=1e-6)
    assert torch.equal(over[:, 2:], before[:, 2:])


def test_the_mean_leaves_padding_out_where_a_mask_is_of_all_places_of_a_cache(llama, ids):
    mask = torch.ones(2, 16, dtype=torch.int64)
    mask[1, :4] = 0

    def found(*edits):
        cache = transformers.StaticCache(config=llama.config, max_cache_len=16)
        given = {"input_ids": ids, "attention_mask": mask, CACHE_NAME: cache}
        return output_of(llama, LAYER, given, *edits)

    before, real = found(), mask[:, : ids.shape[1]].bool()
    expected = before[real].mean(0).expand_as(before)
    assert torch.allclose(found(mean(LAYER)), expected, atol=1e-6)


def test_the_mean_of_each_position_leaves_padding_out(minilm):
    layer, mask = "encoder.layer.1.output.dense", minilm.inputs["attention_mask"]
    plain, changed = [], []
    with torch.no_grad(), intervene(minilm.model, apply(layer, seen_by(plain))):
        minilm.model(**minilm.inputs)
    edits = [mean(layer, over="sequences"), apply(layer, seen_by(changed))]
    with torch.no_grad(), intervene(minilm.model, *edits):
        minilm.model(**minilm.inputs)
    real = mask[:, 9].bool()
    assert not real.all(), "some texts are shorter"
    assert torch.allclose(changed[0][0, 9], plain[0][real, 9].mean(0), atol=1e-6)
    one = {name: values[:1] for name, values in minilm.inputs.items()}
    with (
        pytest.raises(InvalidArgumentError, match="one sequence, whose mean is itself"),
        torch.no_grad(),
        intervene(minilm.model, mean(layer, over="sequences")),
    ):
        minilm.model(**one)


def test_values_of_the_caller_survive_a_model_that_works_in_place():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True)).eval()
    given = torch.full((2, 4), -1.0)
    with torch.no_grad(), intervene(model, replace("0", given)):
        model(torch.ones(2, 4))
    assert (given == -1).all()
    with torch.no_grad(), intervene(model, freeze("0")):
        first, *others = [model(torch.full((2, 4), float(n))) for n in range(1, 4)]
    assert all(torch.equal(first, one) for one in others)


def test_the_mean_of_a_decoder_knows_its_own_mask(build, ids):
    model = build("t5")
    mask = torch.ones_like(ids)
    mask[1, 3:] = 0
    given = {"input_ids": ids, "decoder_input_ids": ids, "attention_mask": mask}
    for layer, kept in ("decoder.block.0", mask >= 0), ("encoder.block.0", mask > 0):
        before = output_of(model, layer, given)
        after = output_of(model, layer, given, mean(layer))
        assert torch.allclose(after, before[kept].mean(0).expand_as(before), atol=1e-6), layer


def test_no_padding_is_left_out_of_what_is_of_no_tokens(build):
    """Patches of an image, pairs of places, and a convolution's channels, as many as tokens."""
    text = {"vocab_size": 50, "max_position_embeddings": 16, "pad_token_id": 0}
    sizes = {
        "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }  # fmt: skip
    config = transformers.CLIPConfig(
        text_config=text | sizes, vision_config=sizes | {"image_size": 8, "patch_size": 4}
    )
    clip = transformers.CLIPModel(config).eval()
    mask = torch.ones(5, 5, dtype=torch.long).triu()
    tokens = torch.arange(25).reshape(5, 5) + 3
    given = {"input_ids": tokens, "attention_mask": mask}
    images = {"pixel_values": torch.randn(5, 3, 8, 8)}
    vision = next(
        name
        for name, _ in clip.named_modules()
        if name.startswith("vision_model") and name.endswith("layers.0.mlp")
    )
    decoder = {"decoder_input_ids": tokens[:, :3]}
    bias = "encoder.block.0.layer.0.SelfAttention.relative_attention_bias"
    for model, layer, inputs in (
        (clip, vision, given | images),
        (build("t5"), bias, given | decoder),
        (_Convolved(), "convolution", given),
    ):
        seen: list[Tensor] = []
        with torch.no_grad():
            for edits in ([], [mean(layer)]):
                with intervene(model, *edits, apply(layer, seen_by(seen))):
                    model(**inputs)
        before, after = seen
        expected = before.flatten(0, -2).mean(0).expand_as(before)
        assert torch.allclose(after, expected, atol=1e-6), layer


class _Convolved(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.convolution = nn.Embedding(50, 5), nn.Conv1d(5, 5, 1)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return self.convolution(self.embedding(input_ids).mT)


def test_the_mean_of_a_layer_of_both_texts_is_refused_unless_its_shape_tells_which():
    tiny = make("t5gemma2")
    layer = "model.decoder.layers.0.self_attn.k_proj"
    ids = tiny.inputs(rows=2)["input_ids"][:, :5]
    mask = torch.ones_like(ids)
    mask[0, 3:] = 0
    given = {"input_ids": ids, "attention_mask": mask}
    with pytest.raises(UnsupportedError, match="does not say which of them this call has"):
        output_of(tiny.model, layer, given | {"decoder_input_ids": ids}, mean(layer))
    shorter = given | {"decoder_input_ids": ids[:, :4]}
    seen: list[Tensor] = []
    with intervene(tiny.model, apply(layer, seen_by(seen))):
        result(tiny.model, shorter)
    after: list[Tensor] = []
    with intervene(tiny.model, mean(layer), apply(layer, seen_by(after))):
        result(tiny.model, shorter)
    before = next(one for one in seen if one.shape[1] == 5)
    found = next(one for one in after if one.shape[1] == 5)
    real = mask.bool()
    assert torch.allclose(found, before[real].mean(0).expand_as(before), atol=1e-6)


def test_the_mean_of_other_values(llama, ids, tmp_path):
    other = torch.randn(4, 9, 32)
    assert torch.allclose(
        output_of(llama, MLP, ids, mean(MLP, other)), other.mean((0, 1)).expand(2, 9, 32), atol=1e-6
    )
    found = output_of(llama, MLP, ids, mean(MLP, other, over="sequences", sequences=1))
    assert torch.allclose(found[1], other.mean(0), atol=1e-6)
    assert torch.equal(found[0], output_of(llama, MLP, ids)[0])
    with capture_activations(
        llama, tmp_path / "a.stream", config=InstrumentationConfig.balanced().with_float32()
    ):
        for batch in (ids, ids[:, :4], ids[:1]):
            result(llama, batch)
    with ActivationReader(tmp_path / "a.stream") as reader:
        rows = torch.cat([one.to_torch().flatten(0, 1) for one in reader[MLP]])
        found = output_of(llama, MLP, ids, mean(MLP, reader))
        assert torch.allclose(found, rows.mean(0).expand(2, 9, 32), atol=1e-6)


def test_values_of_other_sequences_of_the_batch(llama):
    ids = torch.randint(0, 97, (5, 6), generator=torch.Generator().manual_seed(3))
    before = {layer: output_of(llama, layer, ids) for layer in ("model.embed_tokens", MLP)}
    donors = {}
    for seed in (0, 1):
        for layer, values in before.items():
            after = output_of(llama, layer, ids, resample(layer, seed=seed))
            donors[layer, seed] = [
                next(i for i in range(5) if torch.equal(values[i], row)) for row in after
            ]
            assert sorted(donors[layer, seed]) == list(range(5))
            assert all(donor != i for i, donor in enumerate(donors[layer, seed]))
    for seed in (0, 1):  # the same example at each layer
        assert donors["model.embed_tokens", seed] == donors[MLP, seed]
    assert donors[MLP, 0] != donors[MLP, 1]
    with intervene(llama, resample(MLP), unused="ignore"):
        with pytest.raises(InvalidArgumentError, match="the batch has one sequence"):
            result(llama, ids[:1])


def test_values_of_examples_elsewhere(llama, ids, tmp_path):
    config = InstrumentationConfig.balanced().with_float32()
    examples = torch.randint(0, 97, (6, 9), generator=torch.Generator().manual_seed(4))
    with capture_activations(llama, tmp_path / "a.stream", config=config):
        for batch in (examples[:4], examples[4:]):
            result(llama, batch)
    with ActivationReader(tmp_path / "a.stream") as reader:
        values = torch.cat([one.to_torch() for one in reader[LAYER]])
        for seed in range(3):
            drawn = output_of(llama, LAYER, ids, resample(LAYER, values, seed=seed))
            assert torch.equal(
                drawn, output_of(llama, LAYER, ids, resample(LAYER, reader, seed=seed))
            )
            assert all(any(torch.equal(row, one) for one in values) for row in drawn)
        part = output_of(llama, LAYER, ids, resample(LAYER, reader, seed=2, positions=0))
        assert torch.equal(part[:, 0], drawn[:, 0])
        assert torch.equal(part[:, 1:], output_of(llama, LAYER, ids)[:, 1:])


def test_noise_has_the_scale_and_comes_again_with_its_seed(llama, ids):
    layer = "model.embed_tokens"
    before = output_of(llama, layer, ids)

    def added(**how: Any) -> Tensor:
        return output_of(llama, layer, ids, noise(layer, 3.0, **how)) - before

    assert added().std().item() == pytest.approx(3, rel=0.1)  # of 576 values
    assert added(unit="std").std().item() == pytest.approx(3 * before.std().item(), rel=0.1)
    assert torch.equal(added(), added()) and not torch.equal(added(), added(seed=1))
    seen: list[Tensor] = []
    with intervene(llama, noise(layer, 1.0), apply(layer, seen_by(seen))):
        result(llama, ids)
        result(llama, ids)
    assert not torch.equal(*seen)  # each step has its own
    first, second = (
        output_of(llama, f"model.layers.{n}", ids, noise(f"model.layers.{n}", 1.0))
        - output_of(llama, f"model.layers.{n}", ids)
        for n in range(2)
    )
    assert not torch.allclose(first, second, atol=1e-3)  # and each site


def test_frozen_values_stay(llama, ids, clean):
    edit = freeze(LAYER)
    for _ in range(2):  # the edit itself keeps nothing
        with intervene(llama, edit):
            assert torch.equal(result(llama, ids), clean)
            assert torch.equal(result(llama, ids.flip(0)), clean)
            with pytest.raises(
                InvalidArgumentError, match=r"first call had the shape \[2, 9, 32\]"
            ):
                result(llama, ids[:1])
        with intervene(llama, edit):
            other = result(llama, ids.flip(0))
        assert not torch.equal(other, clean)


def test_a_function_of_the_caller(llama, ids):
    before = output_of(llama, MLP, ids)
    after = output_of(llama, MLP, ids, apply(MLP, torch.relu, sequences=0))
    assert torch.equal(after[0], before[0].relu()) and torch.equal(after[1], before[1])

    def in_place(values: Tensor) -> Tensor:
        return values.zero_()

    assert not output_of(llama, MLP, ids, apply(MLP, in_place, positions=0))[:, 0].any()
