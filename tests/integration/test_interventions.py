"""Interventions on models of transformers, beside the same results reached another way."""

from __future__ import annotations

import copy
import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from llm_instrumentation import ActivationReader, InstrumentationConfig, capture_activations
from llm_instrumentation.analysis.reader import UnknownActivationError
from llm_instrumentation.errors import InvalidArgumentError, UnsupportedError
from llm_instrumentation.interventions import (
    Edit,
    HeadLayout,
    Site,
    UnusedEditError,
    add,
    apply,
    attention_heads,
    freeze,
    intervene,
    mean,
    noise,
    register_heads,
    replace,
    resample,
    zero,
)
from tiny_models import make
from torch import Tensor, nn
from transformers_cache import CACHE_NAME

LAYER = "model.layers.0"  # of the llama
MLP = f"{LAYER}.mlp"


def inputs_of(architecture: str, ids: Tensor) -> dict[str, Tensor]:
    given = {"input_ids": ids}
    return given | {"decoder_input_ids": ids[:, :5]} if architecture == "t5" else given


def result(model: nn.Module, given: dict[str, Tensor] | Tensor) -> Tensor:
    with torch.no_grad():
        output: Any = model(given) if isinstance(given, Tensor) else model(**given)
    found: Tensor = output["logits"] if "logits" in output else output["last_hidden_state"]
    return found


def captured(model: nn.Module, given: Any, path: Path, exact: bool = True) -> ActivationReader:
    config = InstrumentationConfig.balanced().with_inputs()
    if exact:
        config = config.with_float32()
    with torch.no_grad(), capture_activations(model, path, config=config):
        result(model, given)
    return ActivationReader(path)


def seen_by(seen: list[Tensor]) -> Callable[[Tensor], Tensor]:
    """A function for `apply` that changes nothing."""

    def keep(values: Tensor) -> Tensor:
        seen.append(values.detach().clone())
        return values

    return keep


def output_of(model: nn.Module, layer: str, given: Any, *edits: Edit) -> Tensor:
    """What a layer returns, after edits."""
    seen: list[Tensor] = []
    with intervene(model, *edits, apply(layer, seen_by(seen))):
        result(model, given)
    return seen[-1]


def hooks(model: nn.Module) -> list[Any]:
    """All that hooks leave in a model, and the mode of its modules."""
    return [
        {name: dict(value) for name, value in vars(part).items() if "hooks" in name and value}
        | {"training": part.training, "own forward": "forward" in vars(part)}
        for part in model.modules()
    ]


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Threads of these small models would wait for each other on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def clean(llama, ids) -> Tensor:
    return result(llama, ids)


# ---- replacing ------------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "bert", "mixtral", "t5"])
def test_the_clean_value_of_each_layer_changes_no_bit(build, ids, tmp_path, architecture):
    model, given = build(architecture), inputs_of(architecture, ids)
    clean, before = result(model, given), hooks(model)
    with captured(model, given, tmp_path / "clean.stream") as reader:
        assert len(reader.layers) > 60
        for layer in reader.layers:
            with intervene(model, replace(layer, reader)) as applied:
                patched = result(model, given)
            assert torch.equal(patched, clean), layer
            assert applied.counts == [len(reader[layer])], layer
    assert hooks(model) == before


def test_the_clean_value_of_a_trained_model_restores_its_result(minilm, tmp_path):
    model, given = minilm.model, minilm.inputs
    clean = result(model, given)
    corrupted = {**given, "input_ids": given["input_ids"].flip(0)}
    assert not torch.equal(result(model, corrupted), clean)
    with captured(model, given, tmp_path / "clean.stream") as reader:
        for layer in ("embeddings", "encoder.layer.2", "encoder.layer.5"):
            with intervene(model, replace(layer, reader)):
                patched = result(model, {**corrupted})
            assert torch.equal(patched, clean), layer


def test_values_of_a_capture_are_a_reader_a_view_or_an_activation(llama, ids, clean, tmp_path):
    other = ids.flip(1)
    with captured(llama, ids, tmp_path / "clean.stream") as reader:
        one = reader[LAYER][0]
        for values in (reader, reader.select("model.layers.*"), one, one.to_torch()):
            with intervene(llama, replace(LAYER, values)):
                assert torch.equal(result(llama, other), clean)
        with intervene(llama, replace(LAYER, reader, positions=-1)):
            patched = output_of(llama, LAYER, other)
        expected = output_of(llama, LAYER, other)
        expected[:, -1] = one.to_torch()[:, -1]
        assert torch.equal(patched, expected)


def test_a_capture_in_float16_is_put_back_as_float32(llama, ids, clean, tmp_path):
    with captured(llama, ids, tmp_path / "clean.stream", exact=False) as reader:
        assert reader[LAYER][0].dtype == "float16"
        found = output_of(llama, LAYER, ids, replace(LAYER, reader))
        assert torch.equal(found, reader[LAYER][0].to_torch().float())


def test_the_tensors_of_a_step_and_call_are_taken(llama, ids, tmp_path):
    config = InstrumentationConfig.balanced().with_float32()
    batches, copied = [ids, ids.flip(0), ids.flip(1)], copy.deepcopy(llama)
    with capture_activations(llama, tmp_path / "a.stream", config=config):
        for batch in batches:
            result(llama, batch)
    with ActivationReader(tmp_path / "a.stream") as reader:
        with intervene(llama, replace(LAYER, reader, first_step=1)) as applied:
            for batch in batches[1:]:
                assert torch.equal(result(llama, ids), result(copied, batch))
            with pytest.raises(InvalidArgumentError, match="no activations .* of step 3, call 0"):
                result(llama, ids)
        assert (applied.counts, applied.steps) == ([2], 3)


def test_captured_inputs_need_a_capture_of_inputs(llama, ids, tmp_path):
    with capture_activations(llama, tmp_path / "a.stream"):
        result(llama, ids)
    with ActivationReader(tmp_path / "a.stream") as reader:
        site = Site(f"{LAYER}.self_attn", head=0)
        with intervene(llama, replace(site, reader), unused="ignore"):
            with pytest.raises(UnknownActivationError, match="with_inputs"):
                result(llama, ids)
        with intervene(llama, replace(MLP, reader.select("*.norm")), unused="ignore"):
            with pytest.raises(UnknownActivationError, match="no activation named"):
                result(llama, ids)


def test_parts_of_tensors_are_not_put_back(llama, ids, tmp_path):
    config = InstrumentationConfig.balanced().with_last_position()
    with capture_activations(llama, tmp_path / "a.stream", config=config):
        result(llama, ids)
    with ActivationReader(tmp_path / "a.stream") as reader:
        with intervene(llama, replace(LAYER, reader), unused="ignore"):
            with pytest.raises(InvalidArgumentError, match="last_position of a tensor"):
                result(llama, ids)


# ---- the edits ------------------------------------------------------------------------------


def test_zeros_are_the_model_without_the_weights(llama, ids):
    other = copy.deepcopy(llama)
    nn.init.zeros_(other.model.layers[0].mlp.down_proj.weight)
    with intervene(llama, zero(MLP)) as applied:
        assert torch.equal(result(llama, ids), result(other, ids))
    assert applied.counts == [1] and applied.steps == 1


class _Wrapper(nn.Module):
    """As an adapter has it: the module, and something beside it."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = self.base(*args, **kwargs)
        return output + 1 if isinstance(output, Tensor) else output


def _wrap(parent: nn.Module, child: str) -> None:
    setattr(parent, child, _Wrapper(parent.get_submodule(child)))


REWIRINGS: dict[str, Callable[[nn.Module], Any]] = {
    "wrapped": lambda model: _wrap(model.model.layers[0], "mlp"),
    "wrapped past setattr": lambda model: model.model.layers[0]._modules.update(
        mlp=_Wrapper(model.model.layers[0].mlp)
    ),
    "a layer around it": lambda model: _wrap(model.model.layers, "0"),
    "replaced": lambda model: setattr(model.model.layers[0], "mlp", model.model.layers[1].mlp),
    "another list": lambda model: setattr(
        model.model, "layers", nn.ModuleList(reversed(model.model.layers))
    ),
    "inserted": lambda model: model.model.layers.insert(0, model.model.layers[1]),
}


@pytest.mark.parametrize("side", ["output", "input", "added"])
@pytest.mark.parametrize("rewiring", REWIRINGS)
def test_modules_that_lose_their_places_in_the_block_are_refused(llama, ids, rewiring, side):
    model = copy.deepcopy(llama)
    with intervene(model, zero(MLP, side=side)):
        result(model, ids)
        REWIRINGS[rewiring](model)
        with pytest.raises(UnsupportedError, match="no longer the module that was there"):
            result(model, ids)
    assert not any("hooks" in name for part in hooks(model) for name in part)


def test_other_modules_may_change_in_the_block(llama, ids):
    model = copy.deepcopy(llama)
    with intervene(model, zero(MLP)):
        result(model, ids)
        _wrap(model.model.layers[0].self_attn, "q_proj")
        _wrap(model.model.layers[1], "mlp")
        changed = result(model, ids)
    nn.init.zeros_(model.model.layers[0].mlp.down_proj.weight)
    assert torch.equal(changed, result(model, ids))


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

SIZES: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "pad_token_id": 0, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
SHARED = {**SIZES, "num_key_value_heads": 2}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
MODELS = {
    "Llama": SHARED, "Mistral": SHARED, "Qwen2": SHARED, "Gemma": {**SHARED, "head_dim": 12},
    "Qwen3": {**SHARED, "head_dim": 12}, "Gemma2": {**SHARED, "head_dim": 12}, "Olmo": SHARED,
    "Gemma3Text": {**SHARED, "head_dim": 12}, "Olmo2": SHARED,
    "Mixtral": {**SHARED, "num_local_experts": 4}, "Qwen2Moe": {**SHARED, **EXPERTS},
    "Qwen3Moe": {**SHARED, **EXPERTS, "head_dim": 12}, "GPT2": SIZES, "GPTNeoX": SIZES,
    "OPT": {**SIZES, "ffn_dim": 48, "word_embed_proj_dim": 32}, "Bert": SIZES, "Roberta": SIZES,
    "XLMRoberta": SIZES, "Electra": {**SIZES, "embedding_size": 32},
    "T5": {"vocab_size": 97, "d_model": 32, "d_kv": 12, "d_ff": 48, "num_layers": 2,
           "num_heads": 4, "decoder_start_token_id": 0, "eos_token_id": None, "pad_token_id": 0},
}  # fmt: skip


@pytest.fixture(scope="module")
def of_kind() -> Callable[[str], nn.Module]:
    """Makes a model of each kind in the table of heads, with biases that are not 0."""
    import transformers

    def made(kind: str) -> nn.Module:
        torch.manual_seed(0)
        config = getattr(transformers, f"{kind}Config")(**MODELS[kind])
        model: nn.Module = getattr(transformers, f"{kind}Model")(config).eval()
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                nn.init.normal_(parameter)
        return model

    return made


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
    shared = kind in ("Llama", "Mistral", "Mixtral") or kind.startswith(("Qwen", "Gemma", "Olmo"))
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


# ---- blocks ---------------------------------------------------------------------------------


def test_edits_of_one_site_follow_each_other(llama, ids):
    one = torch.ones(32)
    before = output_of(llama, LAYER, ids)
    double = apply(LAYER, lambda values: 2 * values)
    assert torch.equal(output_of(llama, LAYER, ids, add(LAYER, one), double), 2 * (before + one))
    assert torch.equal(output_of(llama, LAYER, ids, double, add(LAYER, one)), 2 * before + one)
    with intervene(llama, add(LAYER, one)):
        assert torch.equal(output_of(llama, LAYER, ids, double), 2 * (before + one))
    with intervene(llama, double), intervene(llama, add(LAYER, one)):
        assert torch.equal(output_of(llama, LAYER, ids), 2 * before + one)


def test_a_capture_inside_the_block_has_the_edited_values(llama, ids, tmp_path):
    with intervene(llama, zero(MLP)), captured(llama, ids, tmp_path / "inside.stream") as reader:
        assert not reader[MLP][0].to_torch().any()


def test_nothing_is_left_in_the_model(llama, ids, clean):
    before = hooks(llama)

    def generate() -> Iterator[Tensor]:
        with intervene(llama, zero(LAYER)):
            while True:
                yield result(llama, ids)

    running = generate()
    assert not torch.equal(next(running), clean)
    assert hooks(llama) != before
    running.close()
    assert hooks(llama) == before
    for error in (RuntimeError, KeyboardInterrupt):

        def fail(values: Tensor, error: type[BaseException] = error) -> Tensor:
            raise error("stop")

        with pytest.raises(error, match="stop"):
            with intervene(llama, zero(MLP), apply(LAYER, fail)):
                result(llama, ids)
        assert hooks(llama) == before
    with pytest.raises(InvalidArgumentError):
        intervene(llama, zero(MLP), zero("model.layers.7")).__enter__()
    assert hooks(llama) == before
    assert torch.equal(result(llama, ids), clean)


def test_an_interrupted_call_does_not_disturb_the_next(llama, ids):
    stops = iter([True, False])

    def stop(values: Tensor) -> Tensor:
        if next(stops):
            raise KeyboardInterrupt
        return values

    with intervene(llama, zero(MLP, steps=1), apply(LAYER, stop)) as applied:
        with pytest.raises(KeyboardInterrupt):
            result(llama, ids)
        result(llama, ids)
    assert (applied.counts, applied.steps) == ([1, 1], 2)


@pytest.mark.parametrize(
    ("edit", "runs", "message"),
    [
        (zero(LAYER), 0, "was not applied: the model was not called in the block"),
        (zero("unused"), 1, r"zero\('unused'\) was not applied: its module did not run"),
        (zero(LAYER, calls=1), 2, "its module ran 2 times in 2 steps, and not at the calls"),
        (zero(LAYER, steps=5), 1, "its module ran 1 times in 1 steps"),
    ],
)
def test_an_edit_that_did_nothing_is_an_error(llama, ids, edit, runs, message):
    llama.unused = nn.Linear(2, 2)
    with pytest.raises(UnusedEditError, match=message):
        with intervene(llama, zero("model.embed_tokens"), edit):
            for _ in range(runs):
                result(llama, ids)
    with intervene(llama, edit, unused="ignore") as applied:
        result(llama, ids)
    assert applied.counts in ([0], [1])


def test_gradients_flow_through_edits(llama, ids):
    vector = torch.zeros(32, requires_grad=True)
    scale = torch.ones(1, requires_grad=True)
    with intervene(
        llama, add(LAYER, vector, positions=0), apply(MLP, lambda values: values * scale)
    ):
        loss = llama(ids, labels=ids).loss
        loss.backward()
    assert vector.grad is not None and vector.grad.any()
    assert llama.model.embed_tokens.weight.grad.any()

    def loss_at(value: float) -> float:
        with torch.no_grad(), intervene(llama, apply(MLP, lambda values: values * value)):
            return float(llama(ids, labels=ids).loss)

    assert scale.grad is not None
    numeric = (loss_at(1.01) - loss_at(0.99)) / 0.02
    assert scale.grad.item() == pytest.approx(numeric, rel=0.05, abs=1e-5)
    llama.zero_grad()
    with intervene(llama, freeze(LAYER)):
        for _ in range(2):  # a frozen value has no gradient, and no graph that has ended
            llama(ids, labels=ids).loss.backward()


def test_each_thread_has_its_own_block(llama, ids, clean):
    inside, done = threading.Barrier(2), threading.Barrier(2)
    found: dict[str, Tensor] = {}

    def work(layer: str) -> None:
        with intervene(llama, zero(layer)):
            inside.wait(60)
            found[layer] = result(llama, ids)
            done.wait(60)

    threads = [threading.Thread(target=work, args=(layer,)) for layer in (LAYER, MLP)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for layer in (LAYER, MLP):
        with intervene(llama, zero(layer)):
            assert torch.equal(found[layer], result(llama, ids))
    with intervene(llama, zero(LAYER), scope="process"):
        thread = threading.Thread(target=lambda: found.update(other=result(llama, ids)))
        thread.start()
        thread.join()
    assert torch.equal(found["other"], found[LAYER])


def test_a_copy_of_the_model_has_no_edits(llama, ids, clean):
    with intervene(llama, zero(LAYER)):
        result(llama, ids)
        copied = copy.deepcopy(llama)
        assert torch.equal(result(copied, ids), clean)


def test_a_compiled_model_runs_eagerly_meanwhile(llama, ids, clean):
    if not hasattr(torch.compiler, "set_stance"):
        pytest.skip("needs torch 2.6")
    compiled = torch.compile(llama, backend="eager")
    assert torch.equal(result(compiled, ids), clean)
    with intervene(llama, zero(MLP)):
        expected = result(llama, ids)
    with pytest.warns(RuntimeWarning, match="runs eagerly in the block of intervene"):
        with intervene(compiled, zero(MLP)):
            assert torch.equal(result(compiled, ids), expected)
    assert torch.equal(result(compiled, ids), clean)


# ---- refusals -------------------------------------------------------------------------------


def test_active_dropout_is_refused(of_kind, ids):
    model = of_kind("Bert").train()
    with pytest.raises(UnsupportedError, match=r"dropout is active: p = 0.1 in .* model.eval\(\)"):
        intervene(model, zero("encoder.layer.0")).__enter__()
    assert model.training and not hooks(model)[0].keys() & {"_forward_hooks"}
    model.eval()
    model.encoder.layer[1].attention.self.train()  # its dropout's p counts while it trains
    with pytest.raises(UnsupportedError, match="'encoder.layer.1.attention.self.dropout'"):
        intervene(model, zero("encoder.layer.0")).__enter__()
    llama = of_kind("Llama").train()  # without dropout
    with intervene(llama, zero("layers.0")):
        result(llama, ids)
    assert llama.training
    llama.layers[0].self_attn.attention_dropout = 0.2
    with pytest.raises(UnsupportedError, match=r"attention_dropout = 0.2 in 'layers.0.self_attn'"):
        intervene(llama, zero("layers.0")).__enter__()


def test_what_an_edit_keeps_is_freed_with_the_block(llama, ids):
    kept = [torch.zeros(1 << 20)]
    gone = weakref.ref(kept[0])
    gc.disable()
    try:
        with intervene(llama, apply(MLP, lambda value, held=kept: value + held[0][0])):
            result(llama, ids)
        del kept
        assert gone() is None
    finally:
        gc.enable()


def test_replicas_and_other_things_are_refused(llama):
    with pytest.raises(UnsupportedError, match="give model.module"):
        intervene(nn.DataParallel(llama), zero(LAYER)).__enter__()
    with pytest.raises(InvalidArgumentError, match="the model is a dict"):
        intervene({}, zero(LAYER)).__enter__()
    with pytest.raises(InvalidArgumentError, match="'model.layers.0' is no edit"):
        intervene(llama, LAYER).__enter__()
    with pytest.raises(InvalidArgumentError, match="unused = 'warn'"):
        intervene(llama, unused="warn").__enter__()
    with pytest.raises(ValueError, match="scope must be one of"):
        intervene(llama, scope="all").__enter__()


def test_recomputed_modules_are_refused(llama, ids):
    llama.train()
    llama.gradient_checkpointing_enable()
    with intervene(llama, add(f"{LAYER}.input_layernorm", torch.ones(32))):
        loss = llama(ids, labels=ids).loss
        with pytest.raises(UnsupportedError, match="gradient_checkpointing_disable"):
            loss.backward()


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda: replace(MLP, torch.zeros(2, 9, 31)), r"shape \[2, 9, 31\]; give \[2, 9, 32\]"),
        (lambda: replace(MLP, torch.zeros(1, 9, 32)), r"give \[2, 9, 32\] or \[32\]"),
        (lambda: add(MLP, torch.zeros(9, 32)), r"values has the shape \[9, 32\]"),
        (lambda: add(MLP, torch.zeros(1)), r"values has the shape \[1\]"),
        (lambda: add(MLP, torch.zeros(32).half()), r"convert it with .to\(torch.float32\)"),
        (lambda: replace(MLP, torch.zeros(32, device="meta")), r'move it with .to\("cpu"\)'),
        (lambda: apply(MLP, lambda values: values[:1]), r"returned the shape \[1, 9, 32\]"),
        (lambda: apply(MLP, lambda values: values.half()), "the edit returned is torch.float1"),
        (lambda: apply(MLP, lambda values: None), "returned a NoneType, not a tensor"),
        (lambda: mean(MLP, torch.zeros(0, 32)), "of is empty"),
        (lambda: mean(MLP, torch.zeros(3, 8, 32), over="sequences"), r"\[sequences, 9, 32\]"),
        (lambda: resample(MLP, torch.zeros(3, 8, 32)), r"examples have \[9, 32\]"),
        (lambda: resample(MLP, torch.zeros(0, 9, 32)), "of has no examples"),
        (lambda: zero(f"{LAYER}.self_attn[1][0]"), "'model.layers.0.self_attn' returns no tensor"),
        (lambda: zero("model.rotary_emb", sequences=1), r"\[1, 9, 8\], and the model was given"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_named(llama, ids, edit, message):
    with intervene(llama, edit(), unused="ignore"):
        with pytest.raises(InvalidArgumentError, match=message):
            result(llama, ids)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: add(MLP, [1.0]), "values is a list: give a tensor"),
        (lambda: add(MLP, torch.ones(1), scale=float("nan")), "scale = nan"),
        (lambda: replace(MLP, "run.stream"), "values is a str: give a tensor, an ActivationReader"),
        (lambda: mean(MLP, 3), "of is a int"),
        (lambda: mean(MLP, over="batch"), "over = 'batch'"),
        (lambda: noise(MLP, -1), "scale = -1"),
        (lambda: noise(MLP, 1, unit="variance"), "unit = 'variance'"),
    ],
)
def test_arguments_of_edits_are_checked_at_once(make, message):
    with pytest.raises(InvalidArgumentError, match=message):
        make()


def test_integers_are_replaced_and_not_averaged(build, ids):
    model = build("mixtral")
    layer = "model.layers.0.mlp.gate[2]"  # the experts that tokens go to
    chosen = output_of(model, layer, ids)
    assert chosen.dtype == torch.int64
    other = (chosen + 1) % 4
    assert torch.equal(output_of(model, layer, ids, replace(layer, other)), other)
    for edit in (mean(layer), noise(layer, 1.0)):
        with intervene(model, edit, unused="ignore"):
            with pytest.raises(UnsupportedError, match="needs floats, not torch.int64"):
                result(model, ids)


def test_quantized_models_are_edited_where_they_return_floats(ids):
    class Quantized(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inside, self.outside = nn.Identity(), nn.Identity()

        def forward(self, x: Tensor) -> Tensor:
            quantized = torch.quantize_per_tensor(x, 0.1, 0, torch.qint8)
            return self.outside(self.inside(quantized).dequantize())

    model = Quantized()
    with intervene(model, zero("outside")):
        assert not model(torch.ones(2, 3)).any()
    with intervene(model, zero("inside"), unused="ignore"):
        with pytest.raises(UnsupportedError, match="the tensor is quantized"):
            model(torch.ones(2, 3))


def test_a_key_value_cache_is_refused(llama, ids):
    with intervene(llama, zero(f"['{CACHE_NAME}'][0].keys"), unused="ignore"):
        with pytest.raises(UnsupportedError, match="is in a key-value cache"):
            result(llama, ids)


def test_the_first_output_of_a_model_needs_no_place(llama, ids, clean):
    with intervene(llama, zero("", positions=0)):
        logits = result(llama, ids)
    assert not logits[:, 0].any() and torch.equal(logits[:, 1:], clean[:, 1:])
