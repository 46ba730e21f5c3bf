"""Tensors whose shape only looks as if they had a vector for each token of the text."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from llm_instrumentation import (
    ActivationReader,
    InstrumentationConfig,
    annotate,
    capture_activations,
)
from llm_instrumentation.analysis.rows import NotTokenAlignedError
from llm_instrumentation.core.tensors.model_layouts import layouts_of
from llm_instrumentation.errors import UnsupportedError
from llm_instrumentation.interventions import Site, apply, intervene, mean, zero
from torch import Tensor, nn

LOSSLESS = InstrumentationConfig.max().with_float32()


def captured(model: nn.Module, path: Any, *batches: Any) -> dict[str, list[Tensor]]:
    """Captures calls of a model, and returns what hooks of the test's own saw."""
    seen: dict[str, list[Tensor]] = {}
    handles = []
    for name, module in model.named_modules():

        def keep(module: nn.Module, args: Any, output: Any, name: str = name) -> None:
            if isinstance(output, Tensor):
                seen.setdefault(name, []).append(output.clone())

        handles.append(module.register_forward_hook(keep))
    with torch.no_grad(), capture_activations(model, path, config=LOSSLESS):
        for batch in batches:
            rows = len(next(iter(batch.values())) if isinstance(batch, dict) else batch)
            with annotate(document=[f"text {row}" for row in range(rows)]):
                model(**batch) if isinstance(batch, dict) else model(batch)
    for handle in handles:
        handle.remove()
    return seen


def tokens(rows: int, length: int) -> Tensor:
    return torch.arange(rows * length).reshape(rows, length) % 29 + 1


# ---- tokens before the batch ------------------------------------------------------------------


class SequenceFirst(nn.Module):
    """Its encoder gets [tokens, batch, width]."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.embed, self.encoder, self.head = nn.Embedding(30, 8), encoder, nn.Linear(8, 8)

    def forward(self, input_ids: Tensor) -> Tensor:
        vectors = self.encoder(self.embed(input_ids).transpose(0, 1))
        return self.head(vectors.transpose(0, 1))


class OwnLayers(nn.Module):
    """Layers that do not say on which axis the batch is."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, vectors: Tensor) -> Tensor:
        for layer in self.layers:
            vectors = vectors + layer(vectors).cumsum(0)
        return vectors


def encoders() -> dict[str, nn.Module]:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0)
    return {
        "torch": nn.TransformerEncoder(layer, 2, enable_nested_tensor=False),
        "own": OwnLayers(),
    }


@pytest.mark.parametrize("kind", ["torch", "own"])
def test_layers_with_the_tokens_first_have_rows(path, kind):
    model = SequenceFirst(encoders()[kind]).eval()
    seen = captured(model, path, tokens(2, 5))
    with ActivationReader(path) as reader:
        for name in ("encoder", "encoder.layers.1", "embed", "head"):
            (tensor,) = seen[name]
            if name.startswith("encoder"):
                assert tensor.shape == (5, 2, 8)
                tensor = tensor.transpose(0, 1)
            rows = reader.rows(name)
            assert rows.column("token_id").tolist() == tokens(2, 5).flatten().tolist()
            assert torch.equal(rows.to_torch(), tensor.reshape(10, 8)), name
            one = rows.at(document="text 1", position=2)
            assert torch.equal(one.to_torch(), tensor[1, 2])


def test_torchs_layers_say_where_the_batch_is_if_there_are_as_many_texts_as_tokens(path):
    model = SequenceFirst(encoders()["torch"]).eval()
    seen = captured(model, path, tokens(4, 4))
    with ActivationReader(path) as reader:
        for name in ("encoder", "encoder.layers.0", "encoder.layers.1.linear1"):
            expected = seen[name][0].transpose(0, 1).flatten(0, 1)
            assert torch.equal(reader.rows(name).to_torch(), expected)
        with pytest.raises(NotTokenAlignedError, match=r"may be \[batch, tokens, width\] or \[tok"):
            reader.rows("head")


class SecondOutputs(nn.Module):
    """Modules of torch.nn that return a second tensor beside that of the tokens."""

    def __init__(self, recurrent: type[nn.RNNBase], batch_first: bool, layers: int) -> None:
        super().__init__()
        self.embed, self.batch_first = nn.Embedding(30, 8), batch_first
        self.attention = nn.MultiheadAttention(8, 2, batch_first=batch_first)
        self.recurrent = recurrent(8, 8, layers, batch_first=batch_first)

    def forward(self, input_ids: Tensor) -> Tensor:
        vectors = self.embed(input_ids)
        vectors = vectors if self.batch_first else vectors.transpose(0, 1)
        mixed, self.weights = self.attention(vectors, vectors, vectors)
        return self.recurrent(mixed)[0]


@pytest.mark.parametrize("batch_first", [False, True], ids=["tokens first", "batch first"])
@pytest.mark.parametrize("recurrent", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize(("texts", "length"), [(4, 4), (2, 2), (2, 5), (3, 2)])
def test_second_outputs_lie_in_a_way_of_their_own(path, recurrent, batch_first, texts, length):
    torch.manual_seed(0)
    # As many layers as tokens, or as texts.
    model = SecondOutputs(recurrent, batch_first, layers=texts if batch_first else length).eval()
    captured(model, path, tokens(texts, length))
    with ActivationReader(path) as reader:
        rows = reader.rows("attention[1]")
        assert torch.equal(rows.to_torch(), model.weights.reshape(-1, length))
        states = [name for name in reader.layers if name.startswith("recurrent[1]")]
        assert states
        for name in states:
            with pytest.raises(NotTokenAlignedError, match="something else than the text"):
                reader.rows(name)


def test_other_calls_tell_where_the_batch_is(path):
    model = SequenceFirst(encoders()["own"]).eval()
    seen = captured(model, path, tokens(4, 4), tokens(2, 5))
    with ActivationReader(path) as reader:
        rows = reader.rows("encoder.layers.1", steps=0)
        assert torch.equal(
            rows.to_torch(), seen["encoder.layers.1"][0].transpose(0, 1).flatten(0, 1)
        )
        rows = reader.rows("head", steps=0)
        assert torch.equal(rows.to_torch(), seen["head"][0].flatten(0, 1))


def test_modules_around_a_layer_tell_where_the_batch_is(path):
    """The layer ran for the square batch alone."""

    class Sometimes(OwnLayers):
        def forward(self, vectors: Tensor) -> Tensor:
            vectors = vectors + self.layers[0](vectors)
            return self.layers[1](vectors) if len(vectors) == 4 else vectors

    model = SequenceFirst(Sometimes()).eval()
    seen = captured(model, path, tokens(4, 4), tokens(2, 5))
    with ActivationReader(path) as reader:
        rows = reader.rows("encoder.layers.1")
        (only,) = seen["encoder.layers.1"]
        assert torch.equal(rows.to_torch(), only.transpose(0, 1).flatten(0, 1))


def test_no_call_tells_where_the_batch_is(path):
    model = SequenceFirst(encoders()["own"]).eval()
    captured(model, path, tokens(4, 4))
    with ActivationReader(path) as reader:
        for name in ("encoder.layers.1", "embed"):
            with pytest.raises(NotTokenAlignedError, match=r"4 texts have 4 tokens: it may be"):
                reader.rows(name)


def test_models_of_transformers_have_the_batch_first(path):
    config = transformers.BertConfig(
        vocab_size=40, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=24,
    )  # fmt: skip
    model = transformers.BertModel(config).eval()
    seen = captured(model, path, tokens(4, 4))
    with ActivationReader(path) as reader:
        rows = reader.rows("encoder.layer.1.output")
        assert torch.equal(rows.to_torch(), seen["encoder.layer.1.output"][0].flatten(0, 1))


def test_an_older_calls_file_does_not_say_where_the_batch_is(path):
    """Its layouts are unknown, so shapes alone tell."""
    from llm_instrumentation.core.files.calls_file import calls_path_for

    model = SequenceFirst(encoders()["torch"]).eval()
    captured(model, path, tokens(4, 4))
    calls = calls_path_for(path)
    calls.write_bytes(calls.read_bytes().replace(b"sequence_first", b"sequence_forst"))
    with ActivationReader(path) as reader:
        with pytest.raises(NotTokenAlignedError, match="4 texts have 4 tokens"):
            reader.rows("encoder.layers.0")


def test_edits_of_positions_need_the_batch_first():
    model = SequenceFirst(encoders()["torch"]).eval()
    with pytest.raises(UnsupportedError, match=r"are \[tokens, batch, \.\.\.\]"):
        with torch.no_grad(), intervene(model, zero("encoder.layers.0", positions=1)):
            model(tokens(2, 5))
    model = SequenceFirst(encoders()["own"]).eval()
    with pytest.raises(UnsupportedError, match=r"4 texts have 4 tokens"):
        with torch.no_grad(), intervene(model, zero("encoder.layers.0", positions=1)):
            model(tokens(4, 4))


def test_means_leave_out_padding_where_the_tokens_are_first():
    class Masked(SequenceFirst):
        def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
            return super().forward(input_ids)

    model, ids = Masked(encoders()["torch"]).eval(), tokens(2, 5)
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
    before: list[Tensor] = []
    after: list[Tensor] = []
    name = "encoder.layers.1"
    with torch.no_grad(), intervene(
        model,
        apply(name, lambda v: (before.append(v), v)[1]),
        mean(name),
        apply(name, lambda v: (after.append(v), v)[1]),
    ):  # fmt: skip
        model(ids, mask)
    assert torch.allclose(after[0][0, 0], before[0][mask.T == 1].mean(0), atol=1e-6)


# ---- inside experts ---------------------------------------------------------------------------


def mixture(implementation: str) -> nn.Module:
    torch.manual_seed(0)
    config = transformers.MixtralConfig(
        vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=1,
    )  # fmt: skip
    model = transformers.MixtralForCausalLM(config).eval()
    try:
        model.set_experts_implementation(implementation)
    except (AttributeError, ValueError) as error:
        pytest.skip(f"this transformers has other experts: {error}")
    return model


@pytest.mark.parametrize("implementation", ["grouped_mm", "batched_mm", "eager"])
def test_rows_inside_experts_are_refused(path, implementation):
    """With one expert for each token there are as many rows as tokens, in another order."""
    model, ids = mixture(implementation), tokens(2, 7)
    seen = captured(model, path, ids)
    block = "model.layers.1.mlp"
    with ActivationReader(path) as reader:
        inside = [name for name in reader.layers if name.startswith(f"{block}.experts.")]
        assert inside
        for name in inside:
            with pytest.raises(NotTokenAlignedError, match="is inside experts"):
                reader.rows(name)
        for name in (block, f"{block}.experts"):
            assert torch.equal(reader.rows(name).to_torch(), seen[name][0].reshape(14, 16))
    with pytest.raises(UnsupportedError, match="inside experts"):
        with torch.no_grad(), intervene(model, zero(inside[0], positions=0)):
            model(ids)


# ---- of something else than the text ------------------------------------------------------------


class Routed(nn.Module):
    """Sends each token to one of its branches, whose names do not say so."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.act = nn.Linear(8, 3), nn.GELU()
        self.branches = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, vectors: Tensor) -> Tensor:
        flat = vectors.reshape(-1, vectors.shape[-1])
        best = self.gate(flat).argmax(-1)
        order = best.argsort(stable=True)
        given = flat[order]
        found = torch.cat([one(given[best[order] == n]) for n, one in enumerate(self.branches)])
        return torch.empty_like(flat).index_copy_(0, order, self.act(found)).view_as(vectors)


class Flat(nn.Module):
    """Works on the tokens of all texts, one after the other."""

    def __init__(self, block: nn.Module, ahead: bool) -> None:
        super().__init__()
        self.embed, self.block, self.head = nn.Embedding(30, 8), block, nn.Linear(8, 8)
        self.ahead = ahead  # flat before the block, or behind it

    def forward(self, input_ids: Tensor) -> Tensor:
        vectors = self.embed(input_ids.flatten() if self.ahead else input_ids)
        return self.head(self.block(vectors).reshape(-1, 8))


@pytest.mark.parametrize("texts", [1, 2, 4])
def test_rows_that_a_router_may_have_sorted_are_refused(path, texts):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(30, 8), Routed(), nn.Linear(8, 8)).eval()
    seen = captured(model, path, tokens(texts, 7))
    with ActivationReader(path) as reader:
        for name in ("1.act", "1.gate"):
            with pytest.raises(NotTokenAlignedError, match="may be the tokens in another order"):
                reader.rows(name)
        for name in ("0", "1", "2"):
            assert torch.equal(reader.rows(name).to_torch(), seen[name][0].flatten(0, 1))


@pytest.mark.parametrize("ahead", [True, False])
def test_rows_of_models_that_return_all_tokens_one_after_the_other(path, ahead):
    torch.manual_seed(0)
    model = Flat(nn.Linear(8, 8), ahead).eval()
    seen = captured(model, path, tokens(2, 7))
    with ActivationReader(path) as reader:
        for name in ("embed", "block", "head", ""):
            assert torch.equal(reader.rows(name).to_torch(), seen[name][0].reshape(-1, 8))


def test_as_many_patches_as_tokens_are_no_tokens(path):
    sizes = {
        "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
        "num_attention_heads": 2, "projection_dim": 16,
    }  # fmt: skip
    config = transformers.CLIPConfig(
        text_config={**sizes, "vocab_size": 40, "eos_token_id": 39, "bos_token_id": 38},
        vision_config={**sizes, "image_size": 8, "patch_size": 4},
        projection_dim=16,
    )
    model = transformers.CLIPModel(config).eval()
    batch = {"input_ids": tokens(3, 5), "pixel_values": torch.randn(3, 3, 8, 8)}
    seen = captured(model, path, batch)
    image, text = (f"{side}_model.encoder.layers.1" for side in ("vision", "text"))
    assert seen[image][0].shape == seen[text][0].shape == (3, 5, 16)
    with ActivationReader(path) as reader:
        assert torch.equal(reader.rows(text).to_torch(), seen[text][0].flatten(0, 1))
        with pytest.raises(NotTokenAlignedError, match="of something else than the text"):
            reader.rows(image)


def test_keys_of_cross_attention_are_of_the_encoders_text(path):
    config = transformers.BartConfig(
        vocab_size=40, d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=24, decoder_ffn_dim=24,
    )  # fmt: skip
    model = transformers.BartForConditionalGeneration(config).eval()
    source, target = tokens(3, 6), tokens(3, 6).flip(1)
    mask = torch.tensor([[1] * 6, [1] * 4 + [0] * 2, [1] * 3 + [0] * 3])
    batch = {"input_ids": source, "attention_mask": mask, "decoder_input_ids": target}
    seen = captured(model, path, batch)
    attention = "model.decoder.layers.0.encoder_attn"
    with ActivationReader(path) as reader:
        keys, queries = (reader.rows(f"{attention}.{one}_proj") for one in "kq")
        assert keys.column("token_id").tolist() == source[mask == 1].tolist()
        assert torch.equal(keys.to_torch(), seen[f"{attention}.k_proj"][0][mask == 1])
        assert queries.column("token_id").tolist() == target.flatten().tolist()


def test_relative_positions_are_pairs(path):
    config = transformers.T5Config(
        vocab_size=40, d_model=16, d_kv=8, d_ff=24, num_layers=1, num_heads=2,
        decoder_start_token_id=0, pad_token_id=0,
    )  # fmt: skip
    model = transformers.T5ForConditionalGeneration(config).eval()
    captured(model, path, {"input_ids": tokens(5, 5), "decoder_input_ids": tokens(5, 4)})
    with ActivationReader(path) as reader:
        (name,) = (
            one for one in reader.layers if one.startswith("encoder") and one.endswith("_bias")
        )
        with pytest.raises(NotTokenAlignedError, match="for each pair of places"):
            reader.rows(name)


def test_convolutions_have_the_tokens_behind_the_width(path):
    config = transformers.SqueezeBertConfig(
        vocab_size=40, hidden_size=16, embedding_size=16, num_hidden_layers=1,
        num_attention_heads=2, intermediate_size=24, q_groups=1, k_groups=1, v_groups=1,
        post_attention_groups=1, intermediate_groups=1, output_groups=1,
    )  # fmt: skip
    model = transformers.SqueezeBertModel(config).eval()
    query = "encoder.layers.0.attention.query"
    batch = {"input_ids": tokens(2, 16)}  # as many as the width
    seen = captured(model, path, batch)
    assert seen[query][0].shape == (2, 16, 16)
    with (
        ActivationReader(path) as reader,
        pytest.raises(NotTokenAlignedError, match=r"returns \[batch, width, tokens\]"),
    ):
        reader.rows(query)
    site = Site(query, positions=3)
    with pytest.raises(UnsupportedError, match="positions need"), intervene(model, zero(site)):
        model(**batch)
    with intervene(model, zero(Site(query, sequences=1))):
        model(**batch)


def test_a_module_that_is_replaced_is_looked_at_again():
    model = nn.Sequential(nn.Linear(8, 8))
    assert layouts_of(model).of("0") is None
    model[0] = nn.Conv1d(8, 8, 1)
    assert layouts_of(model).of("0") == "width_first"
