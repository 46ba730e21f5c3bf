"""What captures hold, as numbers, beside what the model itself says."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from llm_instrumentation import (
    ActivationReader,
    InstrumentationConfig,
    capture_activations,
    for_request,
)
from llm_instrumentation.analysis.attention import (
    NoAttentionError,
    attention_layers,
    attention_weights,
)  # fmt: skip
from llm_instrumentation.analysis.logit_lens import logit_lens
from llm_instrumentation.analysis.plots import plot_massive_activations
from llm_instrumentation.analysis.rows import NotTokenAlignedError
from llm_instrumentation.analysis.views import (
    layer_statistics,
    massive_activations,
    token_errors,
    token_norms,
)  # fmt: skip
from llm_instrumentation.core.files.calls_file import calls_path_for
from llm_instrumentation.errors import InvalidArgumentError, NotFoundError
from torch import nn

LOSSLESS = InstrumentationConfig.max().with_float32()
GOLDEN = Path(__file__).parents[1] / "golden"


class Letters:
    """A tokenizer: each id is a letter, or two."""

    @staticmethod
    def decode(ids):
        return chr(ord("A") + ids[0] % 26) * (1 + ids[0] // 26)


def eager(build, architecture):
    model = build(architecture)
    model.set_attn_implementation("eager")
    return model


def capture(path, model, *args, config=LOSSLESS, **kwargs):
    with torch.no_grad(), capture_activations(model, path, config=config):
        return model(*args, **kwargs)


# ---- attention ------------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "mixtral"])
def test_attention_weights_are_those_that_the_model_returns(build, ids, path, architecture):
    model = eager(build, architecture)
    capture(path, model, ids)
    with torch.no_grad():
        expected = model(ids, output_attentions=True).attentions
    names = attention_layers(path)
    assert len(names) == len(expected) == 2
    assert all(name.endswith("attn[1]") for name in names)
    for layer, of_layer in enumerate(expected):
        for row in range(2):
            found = attention_weights(path, layer, batch_row=row, tokenizer=Letters)
            assert found.layer == names[layer]
            np.testing.assert_array_equal(found.weights, of_layer[row].numpy())
            texts = tuple(Letters.decode([n]) for n in ids[row].tolist())
            assert found.queries == found.keys == texts


def test_the_bias_of_positions_beside_attention_weights_is_none_of_them(build, ids, path):
    model = eager(build, "t5")
    capture(path, model, input_ids=ids, decoder_input_ids=ids[:, :4])
    names = attention_layers(path)
    assert len(names) == 6  # two of the encoder, and in each block of the decoder two
    assert all(name.endswith("Attention[2]") for name in names)
    across = attention_weights(path, "decoder.block.1.layer.1.EncDecAttention")
    assert across.weights.shape == (4, 4, 9)
    assert across.queries == tuple(map(str, ids[0, :4].tolist()))
    assert across.keys == tuple(f"#{place}" for place in range(9))


def test_keys_of_another_text_are_not_named_after_the_queries(build, ids, path):
    """The text of the decoder is as long as that of the encoder, and has padding."""
    mask = torch.tensor([[1] * 9, [1] * 5 + [0] * 4])
    other = ids.flip(1)
    capture(
        path, eager(build, "t5"), input_ids=ids, decoder_input_ids=other,
        decoder_attention_mask=mask,
    )  # fmt: skip
    across = attention_weights(path, "decoder.block.1.layer.1.EncDecAttention", batch_row=1)
    assert across.queries == tuple(map(str, other[1, :5].tolist()))
    assert across.keys == tuple(f"#{place}" for place in range(9))
    assert across.weights.shape == (4, 5, 9)
    of_encoder = attention_weights(path, "encoder.block.1.layer.0.SelfAttention")
    assert of_encoder.keys == of_encoder.queries == tuple(map(str, ids[0].tolist()))


def test_weights_that_several_modules_return_are_listed_once(minilm, path):
    model = minilm.model
    kept = model.config._attn_implementation
    try:
        model.set_attn_implementation("eager")
        capture(path, model, **minilm.inputs, output_attentions=True)
    finally:
        model.set_attn_implementation(kept)
    with ActivationReader(path) as reader:
        assert "encoder.layer.0.attention[1]" in reader.layers  # the same tensor
        assert "['attentions'][0]" in reader.layers
        assert attention_layers(reader) == tuple(
            f"encoder.layer.{n}.attention.self[1]" for n in range(6)
        )
        mask = minilm.inputs["attention_mask"]
        found = attention_weights(reader, "encoder.layer.2", batch_row=2)
        length = int(mask[2].sum())
        weights = reader["encoder.layer.2.attention.self[1]"][0].to_numpy()
    assert length < mask.shape[1]  # padding is left out
    np.testing.assert_array_equal(found.weights, weights[2, :, :length, :length])
    assert found.queries == tuple(map(str, minilm.inputs["input_ids"][2, :length].tolist()))


def test_the_attention_of_a_generation_is_joined(build, ids, path):
    model = eager(build, "llama")
    with torch.no_grad(), capture_activations(model, path, config=LOSSLESS):
        whole = model.generate(ids, max_new_tokens=4, min_new_tokens=4, do_sample=False)
    found = attention_weights(path, "model.layers.1", tokenizer=Letters)
    assert found.steps == (0, 1, 2, 3)
    assert found.weights.shape == (4, 12, 12)
    with torch.no_grad():
        expected = model(whole[:, :12], output_attentions=True).attentions[1][0].numpy()
    known = ~np.isnan(found.weights)
    np.testing.assert_allclose(found.weights[known], expected[known], atol=1e-6)
    assert (expected[~known] == 0).all()
    assert found.keys == tuple(Letters.decode([n]) for n in whole[0, :12].tolist())
    one = attention_weights(path, "model.layers.1", step=2)
    assert (one.steps, one.weights.shape) == ((2,), (4, 1, 11))
    assert one.keys[0] == "#0"


def test_texts_of_several_steps_are_not_joined(build, ids, path):
    model = eager(build, "llama")
    with torch.no_grad(), capture_activations(model, path, config=LOSSLESS):
        model(ids)
        model(ids[:, :4])
    assert attention_weights(path).steps == (0,)
    assert attention_weights(path, step=1).weights.shape == (4, 4, 4)


def test_a_text_behind_a_cached_one_is_not_joined_with_another(build, ids, path):
    """The second call has as many keys as the first one and its own tokens together."""
    model = eager(build, "llama")
    with torch.no_grad():
        prefix = model(ids[1:, :5], use_cache=True).past_key_values
        with capture_activations(model, path, config=LOSSLESS):
            model(ids[:1, :5])
            model(ids[:1, 5:7], past_key_values=prefix)
    found = attention_weights(path)
    assert (found.steps, found.weights.shape) == ((0,), (4, 5, 5))
    assert found.queries == tuple(map(str, ids[0, :5].tolist()))
    assert attention_weights(path, step=1).weights.shape == (4, 2, 7)


def test_steps_of_one_request_are_joined_and_those_of_another_are_not(build, ids, path):
    model = eager(build, "llama")
    with torch.no_grad(), capture_activations(model, path, config=LOSSLESS):
        with for_request("one"):
            cache = model(ids[:, :5], use_cache=True).past_key_values
            model(ids[:, 5:6], past_key_values=cache)
        with for_request("other"):
            model(ids[:, 6:7], past_key_values=cache)
    assert attention_weights(path, batch_row=1).steps == (0, 1)


def test_beams_that_change_places_are_not_joined(build, ids, path):
    model = eager(build, "llama")
    with torch.no_grad(), capture_activations(model, path, config=LOSSLESS):
        model.generate(ids[:1], num_beams=3, max_new_tokens=4, min_new_tokens=4, do_sample=False)
    assert attention_weights(path).steps == (0,)
    assert attention_weights(path, step=3).weights.shape == (4, 1, 12)


def test_steps_without_what_the_model_was_given_are_not_joined(build, ids, path):
    model = eager(build, "llama")
    with torch.no_grad(), capture_activations(model, path, config=LOSSLESS):
        model.generate(ids, max_new_tokens=3, min_new_tokens=3, do_sample=False)
    assert attention_weights(path).steps == (0, 1, 2)
    calls_path_for(path).unlink()
    assert attention_weights(path).steps == (0,)


def test_a_capture_without_attention_weights(build, ids, path, minilm):
    capture(path, build("llama"), ids)  # sdpa returns none
    assert attention_layers(path) == ()
    with pytest.raises(NoAttentionError, match='Load the model with attn_implementation="eager"'):
        attention_weights(path)
    capture(path, eager(build, "llama"), ids)
    for layer, message in (
        ("model.layers.7", "'model.layers.7' has no attention weights in .*name one of 'model.la"),
        ("model", "'model' has 2 attention weights"),
        (2, "layer = 2: .* has 2 of them"),
        (np.int64(2), "layer = 2: .* has 2 of them"),
    ):
        with pytest.raises(NoAttentionError, match=message):
            attention_weights(path, layer)
    assert attention_weights(path, np.int64(1)).layer == "model.layers.1.self_attn[1]"
    for wrong in (True, 1.0, [0, 1]):
        with pytest.raises(InvalidArgumentError, match="layer = .*: give"):
            attention_weights(path, wrong)
    with pytest.raises(InvalidArgumentError, match="batch_row = 2: the batch has 2 rows"):
        attention_weights(path, batch_row=2)
    with pytest.raises(InvalidArgumentError, match="step = 5: .* has the steps 0 to 0"):
        attention_weights(path, step=5)


# ---- the logit lens -------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "mixtral"])
def test_at_the_last_layer_the_logit_lens_is_the_models_prediction(build, ids, path, architecture):
    model = build(architecture)
    logits = capture(path, model, ids).logits
    lens = logit_lens(path, model, sequence=1, tokenizer=Letters)
    probabilities = logits[1].double().softmax(-1)
    best = probabilities.argmax(-1)
    assert lens.ids.shape == lens.probabilities.shape == (2, 9)
    assert lens.ids[-1].tolist() == best.tolist()
    np.testing.assert_allclose(lens.probabilities[-1], probabilities.max(-1).values, rtol=1e-4)
    assert lens.texts[-1] == tuple(Letters.decode([n]) for n in best.tolist())
    assert lens.tokens == tuple(Letters.decode([n]) for n in ids[1].tolist())


def test_the_logit_lens_of_an_earlier_layer(llama, ids, path):
    hidden = capture(path, llama, ids, output_hidden_states=True).hidden_states
    with torch.no_grad():
        expected = llama.lm_head(llama.model.norm(hidden[1][0])).softmax(-1)
    lens = logit_lens(path, llama, "model.layers.0")
    assert lens.layers == ("model.layers.0",)
    assert lens.ids[0].tolist() == expected.argmax(-1).tolist()
    np.testing.assert_allclose(lens.probabilities[0], expected.max(-1).values, rtol=1e-4)


def test_norm_and_unembedding_can_be_given(minilm, path):
    capture(path, minilm.model, **minilm.inputs)
    with pytest.raises(InvalidArgumentError, match="BertModel has no output embeddings: pass unem"):
        logit_lens(path, minilm.model)
    unembedding = nn.Linear(384, len(minilm.tokenizer), bias=False)
    unembedding.weight = minilm.model.embeddings.word_embeddings.weight
    with pytest.raises(InvalidArgumentError, match="BertModel has no norm outside"):
        logit_lens(path, minilm.model, unembedding=unembedding)
    lens = logit_lens(
        path, minilm.model, unembedding=unembedding, norm=nn.Identity(),
        tokenizer=minilm.tokenizer,
    )  # fmt: skip
    # The first layer of an encoder still knows the token itself.
    assert np.mean(np.array(lens.texts[0]) == np.array(lens.tokens)) > 0.8
    with pytest.raises(InvalidArgumentError, match="do not take: choose layers"):
        logit_lens(
            path, minilm.model, "encoder.layer.0.intermediate", unembedding=unembedding,
            norm=nn.Identity(),
        )  # fmt: skip


# ---- tokens ---------------------------------------------------------------------------------


def test_a_layer_that_runs_twice_has_the_norms_of_both_calls(build, ids, path):
    model = build("llama")
    model.model.layers[1] = model.model.layers[0]
    seen = []
    hook = model.model.layers[0].register_forward_hook(lambda *one: seen.append(one[2]))
    capture(path, model, ids, use_cache=False)
    hook.remove()
    found = token_norms(path, "model.layers.0")
    calls = torch.cat([one[0] for one in seen]).norm(dim=1).numpy()
    np.testing.assert_allclose(found.values[0], calls, rtol=1e-5)


def test_norms_of_the_tokens_of_a_text(minilm, path):
    with torch.no_grad(), capture_activations(minilm.model, path, config=LOSSLESS):
        hidden = minilm.model(**minilm.inputs, output_hidden_states=True).hidden_states
    norms = token_norms(path, sequence=2, tokenizer=minilm.tokenizer)
    length = int(minilm.inputs["attention_mask"][2].sum())
    assert norms.layers == tuple(f"encoder.layer.{n}" for n in range(6))
    assert norms.tokens[:3] == ("[CLS]", "who", "signed")
    expected = torch.stack(hidden[1:])[:, 2, :length].double().norm(dim=-1)
    np.testing.assert_allclose(norms.values, expected)
    with pytest.raises(InvalidArgumentError, match="sequence = 8: .* has the texts 0 to 7"):
        token_norms(path, sequence=8)


def test_several_texts_are_not_shown_as_one(build, ids, path):
    model = build("llama")
    capture(path, model, ids)
    for view in (
        token_norms, massive_activations, lambda *one, **of: token_errors(*one, *one, **of),
        lambda *one, **of: logit_lens(*one, model, **of),
    ):  # fmt: skip
        for wrong in ([0, 1], np.arange(2), [1]):
            with pytest.raises(InvalidArgumentError, match="give the number of one text"):
                view(path, sequence=wrong)
        for wrong in (True, 1.0, None):
            with pytest.raises(InvalidArgumentError, match="sequence = .*: give an integer"):
                view(path, sequence=wrong)
        assert view(path, sequence=np.int64(1)).tokens == tuple(map(str, ids[1].tolist()))


def test_norms_without_what_the_model_was_given(llama, ids, path):
    with torch.no_grad(), capture_activations(llama, path, config=LOSSLESS):
        llama(ids)
        llama(ids[:1, :3])
    with_calls = token_norms(path, sequence=1)
    calls_path_for(path).unlink()
    np.testing.assert_array_equal(token_norms(path, sequence=1).values, with_calls.values)
    assert token_norms(path, sequence=2).tokens == ("#0", "#1", "#2")


def test_layers_without_a_vector_for_each_token(minilm, path):
    capture(path, minilm.model, **minilm.inputs)
    with pytest.raises(NotTokenAlignedError, match="pooler"):
        token_norms(path, ["encoder.layer.0", "pooler"])
    with pytest.raises(KeyError, match="no activation named 'encoder.layer.9'"):
        token_norms(path, "encoder.layer.9")


def test_errors_of_tokens_are_those_of_their_vectors(build, ids, tmp_path):
    paths = tmp_path / "a.stream", tmp_path / "b.stream"
    for path, dtype in zip(paths, (torch.float32, torch.bfloat16), strict=True):
        capture(path, build("llama").to(dtype), ids)
    found = token_errors(*paths, sequence=1)
    with ActivationReader(paths[0]) as a, ActivationReader(paths[1]) as b:
        for layer, errors in zip(found.layers, found.values, strict=True):
            x, y = (reader[layer][0].to_torch()[1].double() for reader in (a, b))
            np.testing.assert_allclose(errors, (y - x).norm(dim=1) / x.norm(dim=1))
    assert not token_errors(paths[0], paths[0]).values.any()
    capture(paths[1], build("llama"), ids[:, :4])
    with pytest.raises(NotTokenAlignedError, match="has 9 tokens of width 32 in .* and 4 of width"):
        token_errors(*paths)
    with pytest.raises(KeyError, match=r"b\.stream has no activation named 'blocks\.0'"):
        token_errors(*paths, rename={"model.layers.*": "blocks.*"})


def test_errors_between_other_texts_of_the_same_length_are_refused(build, ids, tmp_path):
    paths = tmp_path / "a.stream", tmp_path / "b.stream"
    other = ids.clone()
    other[1, 3] = ids[1, 3] + 1
    capture(paths[0], build("llama"), ids)
    capture(paths[1], build("llama"), other)
    assert not token_errors(*paths, sequence=0).values.any()
    said = rf"token 3 of 'model.layers.0' has the token id {ids[1, 3]} in .*a.stream, and "
    with pytest.raises(NotTokenAlignedError, match=said):
        token_errors(*paths, sequence=1)
    calls_path_for(paths[1]).unlink()  # unknown ids are not compared
    assert token_errors(*paths, sequence=1).values.any()


def test_errors_between_tokens_at_other_positions_are_refused(build, ids, tmp_path):
    paths = tmp_path / "a.stream", tmp_path / "b.stream"
    places = torch.arange(9)[None].expand(2, -1)
    for path, given in zip(paths, (places, places + 2), strict=True):
        capture(path, build("llama"), ids, position_ids=given)
    with pytest.raises(NotTokenAlignedError, match="token 0 .* has the position 0 in .*, and 2 in"):
        token_errors(*paths)
    calls_path_for(paths[0]).unlink()  # then positions are places in a row
    assert token_errors(*paths).values.any()


# ---- outliers and statistics ----------------------------------------------------------------


class Outlier(nn.Module):
    """Noise of about 1, and 5,000 in channel 7 of token 2."""

    def forward(self, ids):
        x = torch.randn(*ids.shape, 16, generator=torch.Generator().manual_seed(0))
        x[:, 2, 7] = -5000
        return x


def test_massive_activations_have_a_channel_and_a_token(path):
    model = nn.Sequential(Outlier(), nn.LayerNorm(16))
    capture(path, model, torch.arange(6)[None])
    found = massive_activations(path, tokenizer=Letters)
    with ActivationReader(path) as reader:
        values = np.abs(reader["0"][0].to_numpy()[0].astype(np.float64))
    assert found.median[0] == np.median(values)
    (one,) = found.massive
    assert (one.layer, one.token, one.place, one.channel) == ("0", "C", 2, 7)
    assert (one.value, one.ratio) == (-5000, 5000 / np.median(values))
    assert [len(of_layer) for of_layer in found.largest] == [3, 3]
    sizes = [abs(one.value) for one in found.largest[0]]
    assert sizes == sorted(values.reshape(-1), reverse=True)[:3]
    assert massive_activations(path, min_ratio=1e5).massive == ()
    assert massive_activations(path, min_magnitude=5000).massive == ()


class Broken(Outlier):
    """Beside the outlier NaN, and infinities if asked."""

    def __init__(self, *infinite: float) -> None:
        super().__init__()
        self.infinite = infinite

    def forward(self, ids):
        x = super().forward(ids)
        x[:, 4, 1] = math.nan
        for channel, value in enumerate(self.infinite):
            x[:, 5, channel] = value
        return x


def test_values_that_are_not_finite_hide_no_massive_ones(path):
    capture(path, nn.Sequential(Outlier()), torch.arange(6)[None])
    whole = massive_activations(path, largest=96)
    capture(path, nn.Sequential(Broken()), torch.arange(6)[None])
    found = massive_activations(path, largest=96)
    assert [(one.place, one.channel, one.value) for one in found.massive] == [(2, 7, -5000)]
    np.testing.assert_allclose(found.median, whole.median, rtol=0.1)
    assert (len(whole.largest[0]), len(found.largest[0])) == (96, 95)
    capture(path, nn.Sequential(Broken(-math.inf, math.inf)), torch.arange(6)[None])
    found = massive_activations(path)
    assert [one.value for one in found.massive] == [-math.inf, math.inf, -5000]
    assert [one.ratio for one in found.massive][:2] == [math.inf, math.inf]
    assert math.isfinite(found.median[0])


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_layers_without_a_finite_value(path, value):
    class Nothing(nn.Module):
        def forward(self, ids):
            return torch.full((*ids.shape, 2), value)

    capture(path, nn.Sequential(Nothing()), torch.arange(6)[None])
    found = massive_activations(path)
    assert math.isnan(found.median[0])
    assert len(found.largest[0]) == len(found.massive) == (0 if math.isnan(value) else 3)
    plot_massive_activations(path).figure.canvas.draw()


def test_layers_with_few_numbers_are_drawn_beside_others(path):
    class Few(nn.Module):
        """One number in the vectors; the others are NaN."""

        def forward(self, x):
            few = torch.full_like(x, math.nan)
            few[:, 2, 1] = 3.0
            return few

    capture(path, nn.Sequential(Outlier(), Few()), torch.arange(6)[None])
    found = massive_activations(path)
    assert [len(ones) for ones in found.largest] == [3, 1]
    axes = plot_massive_activations(path)
    assert [text.get_text() for text in axes.texts] == ["channel 7, 2", "channel 1, 2"]


@pytest.mark.parametrize("largest", [0, -1])
def test_at_least_one_large_value_is_asked_for(path, largest):
    with pytest.raises(InvalidArgumentError, match=f"largest = {largest}: give at least 1"):
        massive_activations(path, largest=largest)


def test_statistics_are_those_of_all_values(minilm, path):
    half = len(minilm.inputs["input_ids"]) // 2
    with torch.no_grad(), capture_activations(minilm.model, path, preset="balanced"):
        for part in (slice(0, half), slice(half, None)):
            minilm.model(**{name: value[part] for name, value in minilm.inputs.items()})
    every = layer_statistics(path)
    assert [one.name for one in every] == [f"encoder.layer.{n}" for n in range(6)]
    with ActivationReader(path) as reader:
        for one in every:
            values = np.asarray(reader[one.name], np.float64)
            assert (one.tensors, one.values) == (2, values.size)
            assert (one.min, one.max, one.nan, one.inf) == (values.min(), values.max(), 0, 0)
            np.testing.assert_allclose(
                (one.mean, one.std, one.rms),
                (values.mean(), values.std(), np.sqrt((values**2).mean())),
            )
    assert layer_statistics(path, "pooler", steps=1)[0].tensors == 1


def test_values_that_are_not_finite_count_apart(path):
    model = nn.Sequential(nn.Identity())
    capture(path, model, torch.tensor([1.0, math.nan, math.inf, 0.0]))
    (one,) = layer_statistics(path, "0")
    assert (one.values, one.nan, one.inf, one.zeros, one.max, one.mean) == (4, 1, 1, 1, 1.0, 0.5)
    capture(path, model, torch.tensor([math.nan]))
    (one,) = layer_statistics(path, "0")
    assert math.isnan(one.mean) and math.isnan(one.max)


def test_a_stream_of_1_3_1_has_statistics_and_no_tokens(tmp_path):
    path = tmp_path / "old.stream"
    shutil.copy(GOLDEN / "older-lz4.packets", path)
    with ActivationReader(path, warn=False) as reader:
        small, big, root = layer_statistics(reader)
        assert (small.name, big.name, root.name) == ("small", "big", "")
        # The inputs are 0 to 11, less 0, 1 and 2.
        assert (small.min, small.max, small.mean) == (-1.0, 5.5, 2.25)
        assert root.mean == 1024 * small.mean
        with pytest.raises(NotTokenAlignedError, match="strap import --format stream-1.3.1"):
            token_norms(reader)
        with pytest.raises(NoAttentionError):
            attention_weights(reader)


@pytest.mark.parametrize(
    "view", [attention_weights, token_norms, massive_activations, layer_statistics]
)
def test_a_wrong_path_and_an_empty_capture(tmp_path, view):
    from llm_instrumentation._native import Session

    with pytest.raises(NotFoundError, match=r"none\.stream"):
        view(tmp_path / "none.stream")
    empty = tmp_path / "empty.stream"
    Session(empty, codec="lz4", workers=1, max_memory_bytes=16 << 20).close()
    with pytest.raises(LookupError, match=r"empty\.stream has no a"):
        view(empty)
