"""Rows: each token's vector, and what the token was, against tensors that the test keeps."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
import transformers
from llm_instrumentation import ActivationReader, InstrumentationConfig, annotate
from llm_instrumentation.analysis.rows import NoCallsError, NotTokenAlignedError
from llm_instrumentation.core.capture import capture_activations
from llm_instrumentation.core.files.calls_file import calls_path_for
from llm_instrumentation.errors import CorruptError, UnsupportedError
from torch import Tensor, nn
from transformers_cache import CACHE_NAME

LOSSLESS = InstrumentationConfig.max().with_float32()


class Kept:
    """The outputs of some modules, each with its step, from hooks of the test's own."""

    def __init__(self, model: nn.Module, *names: str) -> None:
        self.steps = 0
        self.outputs: dict[str, list[tuple[int, Tensor]]] = {name: [] for name in names}
        for name in names:
            model.get_submodule(name).register_forward_hook(self._hook(name))

    def _hook(self, name: str) -> Any:
        def keep(module: nn.Module, args: Any, output: Any) -> None:
            tensor = output if isinstance(output, Tensor) else output[0]
            self.outputs[name].append((self.steps, tensor.detach().clone()))

        return keep

    def __call__(self, call: Any) -> Any:
        result = call()
        self.steps += 1
        return result


def assert_rows(rows: Any, expected: list[tuple[int, int, int, int, Tensor]]) -> None:
    """Checks rows against (step, batch row, position, token id, vector), in order."""
    assert len(rows) == len(expected)
    for name, at in (("step", 0), ("batch_row", 1), ("position", 2), ("token_id", 3)):
        assert rows.column(name).tolist() == [one[at] for one in expected]
    assert torch.equal(rows.to_torch(), torch.stack([one[4] for one in expected]))


def left_padded(ids: Tensor, *lengths: int) -> tuple[Tensor, Tensor]:
    mask = torch.stack([(torch.arange(ids.shape[1]) >= ids.shape[1] - n).long() for n in lengths])
    return ids * mask, mask


# ---- the truth of tokens --------------------------------------------------------------------


@pytest.mark.parametrize("codec", ["none", "lz4", "zstd"])
def test_rows_of_a_batch_with_right_padding(minilm, path, codec):
    name = "encoder.layer.3"
    kept = Kept(minilm.model, name)
    config = InstrumentationConfig.max().with_float32().with_compression(codec)
    with torch.no_grad(), capture_activations(minilm.model, path, config=config):
        kept(lambda: minilm.model(**minilm.inputs))
    ids, mask = minilm.inputs["input_ids"], minilm.inputs["attention_mask"]
    ((_, output),) = kept.outputs[name]
    with ActivationReader(path) as reader:
        rows = reader.rows(name, tokenizer=minilm.tokenizer)
        assert_rows(
            rows,
            [
                (0, b, t, int(ids[b, t]), output[b, t])
                for b in range(len(ids))
                for t in range(int(mask[b].sum()))
            ],
        )
        texts = [minilm.tokenizer.decode([n]) for n in ids[mask == 1].tolist()]
        assert rows.column("text").tolist() == texts
        with_padding = reader.rows(name, padding=True)
        assert torch.equal(with_padding.to_torch(), output.flatten(0, 1))
        special = minilm.tokenizer.all_special_ids
        without = reader.rows(name, without_tokens=special)
        assert not set(without.column("token_id").tolist()) & set(special)
        assert len(without) == len(rows) - 2 * len(ids)


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "mixtral"])
def test_rows_of_a_generation_with_left_padding(build, ids, path, architecture):
    model = build(architecture)
    name = "transformer.h.1" if architecture == "gpt2" else "model.layers.1"
    kept = Kept(model, name)
    prompt, mask = left_padded(ids, 9, 4)
    model.register_forward_hook(lambda *_: setattr(kept, "steps", kept.steps + 1))
    with torch.no_grad(), capture_activations(model, path, config=LOSSLESS):
        whole = model.generate(
            prompt, attention_mask=mask, max_new_tokens=4, min_new_tokens=4, do_sample=False,
            pad_token_id=0,
        )  # fmt: skip
    expected = []
    for step, output in kept.outputs[name]:
        for b, length in enumerate((9, 4)):
            for t in range(output.shape[1]):
                place = t if step == 0 else 8 + step
                position = place - (9 - length)
                if position >= 0:
                    expected.append((step, b, position, int(whole[b, place]), output[b, t]))
    with ActivationReader(path) as reader:
        rows = reader.rows(name)
        assert_rows(rows, expected)
        assert rows.column("sequence").tolist() == [one[1] for one in expected]
        # A token of a text, in one line.
        vector = reader.rows(name).at(sequence=1, position=5).to_torch()
        assert torch.equal(vector, kept.outputs[name][2][1][1, 0])


def test_rows_of_encoder_and_decoder(build, ids, path):
    t5 = build("t5")
    names = ("encoder.block.1", "decoder.block.1")
    kept = Kept(t5, *names)
    targets = ids[:, :4]
    with torch.no_grad(), capture_activations(t5, path, config=LOSSLESS):
        kept(lambda: t5(input_ids=ids, decoder_input_ids=targets))
    with ActivationReader(path) as reader:
        for name, tokens in zip(names, (ids, targets), strict=True):
            ((_, output),) = kept.outputs[name]
            expected = [
                (0, b, t, int(tokens[b, t]), output[b, t])
                for b in range(2)
                for t in range(tokens.shape[1])
            ]
            assert_rows(reader.rows(name), expected)


def test_rows_of_a_generation_with_an_encoder(build, ids, path):
    t5 = build("t5")
    with torch.no_grad(), capture_activations(t5, path, config=LOSSLESS):
        whole = t5.generate(ids, max_new_tokens=3, min_new_tokens=3, do_sample=False)
    with ActivationReader(path) as reader:
        encoder, decoder = reader.rows("encoder.block.0"), reader.rows("decoder.block.0")
        assert encoder.column("token_id").tolist() == ids.flatten().tolist()
        assert decoder.column("token_id").tolist() == whole[:, :-1].T.flatten().tolist()
        assert decoder.column("position").tolist() == [0, 0, 1, 1, 2, 2]
        assert decoder.column("sequence").tolist() == [0, 1] * 3


def test_batches_of_unequal_lengths(llama, ids, path):
    name = "model.layers.0"
    kept = Kept(llama, name)
    lengths = [3, 9, 1, 5]
    with torch.no_grad(), capture_activations(llama, path, config=LOSSLESS):
        for length in lengths:
            kept(lambda length=length: llama(ids[:, :length]))
    expected = [
        (step, b, t, int(ids[b, t]), output[b, t])
        for step, output in kept.outputs[name]
        for b in range(2)
        for t in range(lengths[step])
    ]
    with ActivationReader(path) as reader:
        rows = reader.rows(name)
        assert_rows(rows, expected)
        chosen = np.random.default_rng(0).permutation(len(rows))[:20]
        assert_rows(rows[chosen], [expected[n] for n in chosen])
        assert_rows(rows[5:9], expected[5:9])
        assert_rows(rows[rows.column("step") == 3], [one for one in expected if one[0] == 3])
        assert_rows(
            reader.rows(name, steps=slice(1, 3)), [one for one in expected if one[0] in (1, 2)]
        )


def test_documents_and_requests_of_rows(llama, ids, path):
    with torch.no_grad(), capture_activations(llama, path) as framework:
        with framework.annotate(document=["a", "b"]):
            llama(ids)
        with annotate(document="c", split="test"):
            llama(ids[:1])
    with ActivationReader(path) as reader:
        rows = reader.rows("model.layers.0")
        assert rows.column("document").tolist() == ["a"] * 9 + ["b"] * 9 + ["c"] * 9
        row = rows.at(document="b", position=2)
        assert (row.step, row.batch_row, row.sequence, row.token_id) == (0, 1, 1, int(ids[1, 2]))
        assert rows.at(document="c", position=0).labels == '{"split": "test"}'
        assert len(rows.select(document="b")) == 9


# ---- forms of outputs -----------------------------------------------------------------------


class Packed(nn.Module):
    """Joins the tokens of all texts, as mixtures of experts and servers do."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(97, 8)
        self.joined, self.heads, self.split = nn.Identity(), nn.Identity(), nn.Identity()
        self.pooled, self.experts = nn.Identity(), nn.ModuleList([nn.Identity()])

    def forward(self, input_ids: Tensor) -> Tensor:
        values = self.embed(input_ids)
        batch, tokens, width = values.shape
        self.joined(values.reshape(batch * tokens, width))
        self.split(values.reshape(batch, tokens, 2, width // 2))
        self.heads(values.reshape(batch, tokens, 2, width // 2).transpose(1, 2))
        self.experts[0](values.reshape(batch * tokens, width)[:3])
        return self.pooled(values.mean(1))


@pytest.fixture
def packed(ids, path):
    model = Packed().eval()
    with torch.no_grad(), capture_activations(model, path, config=LOSSLESS):
        model(ids)
        model(ids[:, :5])
    vectors = torch.cat([model.embed(ids).flatten(0, 1), model.embed(ids[:, :5]).flatten(0, 1)])
    return vectors.detach()


def test_packed_tokens_and_heads(packed, path):
    with ActivationReader(path) as reader:
        assert torch.equal(reader.rows("joined").to_torch(), packed)
        for name in ("heads", "split"):
            rows = reader.rows(name)
            assert rows.shape == (2, 4)
            assert torch.equal(rows.to_torch(), packed.reshape(-1, 2, 4))
            assert torch.equal(rows[20].to_torch(), packed[20].reshape(2, 4))
        assert np.array_equal(np.asarray(reader.rows("joined")), packed.numpy())


def test_layers_that_are_not_aligned_say_so(packed, path):
    with ActivationReader(path) as reader:
        with pytest.raises(
            NotTokenAlignedError, match=r"shape is \[2, 8\] in step 0, where 2 rows "
        ):
            reader.rows("pooled")
        with pytest.raises(NotTokenAlignedError, match=r"'experts\.0' is inside experts"):
            reader.rows("experts.0")


def test_heads_as_many_as_tokens_are_ambiguous(ids, path):
    model = Packed().eval()
    with torch.no_grad(), capture_activations(model, path):
        model(ids[:, :2])
    with ActivationReader(path) as reader:
        with pytest.raises(NotTokenAlignedError, match="axis 1 or axis 2 may be the tokens"):
            reader.rows("heads")


def test_the_last_position_of_each_text(llama, ids, path):
    config = InstrumentationConfig.max().with_float32().with_last_position()
    kept = Kept(llama, "model.layers.0")
    with torch.no_grad(), capture_activations(llama, path, config=config):
        kept(lambda: llama(ids))
    ((_, output),) = kept.outputs["model.layers.0"]
    with ActivationReader(path) as reader:
        assert_rows(
            reader.rows("model.layers.0"),
            [(0, b, 8, int(ids[b, 8]), output[b, 8]) for b in range(2)],
        )


def test_values_beyond_float16_come_from_their_twin(path, ids):
    class Large(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(97, 4)

        def forward(self, input_ids: Tensor) -> Tensor:
            return self.embed(input_ids) * (1e6 if input_ids.shape[1] == 9 else 1)

    model = Large()
    with torch.no_grad(), capture_activations(model, path):
        first, second = model(ids), model(ids[:, :3])
    with ActivationReader(path) as reader:
        rows = reader.rows("")
        assert rows.dtype == "float32"
        expected = torch.cat([first.flatten(0, 1), second.half().float().flatten(0, 1)])
        assert torch.equal(rows.to_torch(), expected.detach())
        assert torch.equal(rows[20].to_torch(), expected[20].detach())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_types_of_rows(llama, ids, path, dtype):
    llama.to(dtype)
    kept = Kept(llama, "model.layers.0")
    with torch.no_grad(), capture_activations(llama, path):
        kept(lambda: llama(ids))
    expected = kept.outputs["model.layers.0"][0][1].flatten(0, 1)
    with ActivationReader(path) as reader:
        rows = reader.rows("model.layers.0")
        assert torch.equal(rows.to_torch(), expected)
        assert torch.equal(rows.to_torch("float32"), expected.float())
        assert np.array_equal(rows.to_numpy("float32"), expected.float().numpy())


# ---- captures without, or with a part of, what is needed ----------------------------------------


def test_without_calls_rows_are_known_by_their_places(llama, ids, path):
    kept = Kept(llama, "model.layers.0")
    with torch.no_grad(), capture_activations(llama, path, config=LOSSLESS):
        kept(lambda: llama(ids))
    calls_path_for(path).unlink()
    with ActivationReader(path) as reader:
        with pytest.raises(NoCallsError, match=r"run\.stream\.calls is missing .* without_calls"):
            reader.rows("model.layers.0")
        rows = reader.rows("model.layers.0", without_calls=True)
        output = kept.outputs["model.layers.0"][0][1]
        assert torch.equal(rows.to_torch(), output.flatten(0, 1))
        assert rows.column("position").tolist() == [*range(9)] * 2
        assert rows.column("batch_row").tolist() == [0] * 9 + [1] * 9
        assert rows.column("token_id").tolist() == [-1] * 18
        assert rows[0].document is None and rows[0].token_id is None


def test_activations_without_a_call_are_left_out_and_counted(llama, ids, path):
    """The process died before the last calls were in the file."""
    with torch.no_grad(), capture_activations(llama, path):
        llama(ids)
        with capture_activations(llama, path.with_name("short.stream")):
            pass
        llama(ids)
    file = calls_path_for(path)
    whole = file.read_bytes()
    with ActivationReader(path) as reader:
        assert reader.rows("model.layers.0").left_out == 0
    from llm_instrumentation._native import capture_id_of
    from llm_instrumentation.core.files.calls_file import (
        AboutModels,
        CallsFile,
        read_calls,
        rows_before,
    )

    earlier = rows_before(read_calls(path, None), 1)
    CallsFile(file, capture_id_of(path), AboutModels({}, {}, {}), earlier).close()
    assert file.read_bytes() != whole
    with ActivationReader(path) as reader:
        rows = reader.rows("model.layers.0")
        assert rows.left_out == 1 and len(rows) == 18


def test_rows_of_a_salvaged_capture(llama, ids, path):
    kept = Kept(llama, "model.layers.0")
    with torch.no_grad(), capture_activations(llama, path, config=LOSSLESS):
        kept(lambda: llama(ids))
        kept(lambda: llama(ids[:, :4]))
    with open(path, "r+b") as stream:
        stream.write(b"damage at the beginning")
    report = ActivationReader.salvage(path)
    assert report.repaired == 1  # its header and name were overwritten
    with ActivationReader(report.path) as reader:
        rows = reader.rows("model.layers.0", steps=1)
        output = kept.outputs["model.layers.0"][1][1]
        expected = [(1, b, t, int(ids[b, t]), output[b, t]) for b in range(2) for t in range(4)]
        assert_rows(rows, expected)


def test_images_have_no_tokens(path):
    config = transformers.ViTConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
        image_size=8, patch_size=4,
    )  # fmt: skip
    vit = transformers.ViTModel(config).eval()
    with torch.no_grad(), capture_activations(vit, path):
        vit(torch.zeros(1, 3, 8, 8))
    with ActivationReader(path) as reader:
        layer = next(name for name in reader.layers if "layer" in name)
        with pytest.raises(NotTokenAlignedError, match="what the model was given has no tokens"):
            reader.rows(layer)


def test_rows_that_are_not_there(llama, ids, path):
    with torch.no_grad(), capture_activations(llama, path):
        llama(ids)
    with ActivationReader(path) as reader:
        rows = reader.rows("model.layers.0")
        with pytest.raises(LookupError, match="no row with sequence=7, position=0"):
            rows.at(sequence=7, position=0)
        with pytest.raises(LookupError, match="2 rows with position=0, in 1 steps"):
            rows.at(position=0)
        with pytest.raises(IndexError, match="row 18 of 18"):
            rows[18]
        with pytest.raises(ValueError, match="no column 'colour'"):
            rows.column("colour")
        with pytest.raises(ValueError, match="needs a tokenizer"):
            rows.column("text")
        with pytest.raises(KeyError, match="Did you mean"):
            reader.rows("model.layers.9")


def test_rows_of_a_cached_generation_are_those_of_the_whole_text(llama, ids, path):
    """A token has the same vector in a step of its own as in a call with all tokens."""
    with torch.no_grad(), capture_activations(llama, path, config=LOSSLESS):
        cache = llama(ids[:, :6], use_cache=True)[CACHE_NAME]
        for t in range(6, 9):
            cache = llama(ids[:, t : t + 1], use_cache=True, **{CACHE_NAME: cache})[CACHE_NAME]
        llama(ids)
    with ActivationReader(path) as reader:
        rows = reader.rows("model.layers.1")
        for sequence in (0, 1):
            parts, whole = rows.select(sequence=sequence), rows.select(sequence=sequence + 2)
            assert parts.column("token_id").tolist() == whole.column("token_id").tolist()
            assert parts.column("position").tolist() == whole.column("position").tolist()
            torch.testing.assert_close(parts.to_torch(), whole.to_torch(), atol=1e-5, rtol=1e-4)


# ---- what must not be taken for tokens ----------------------------------------------------------


def test_a_decoder_that_makes_its_text_of_labels_has_no_tokens(build, ids, path):
    """The encoder's tokens are as many, but they are not the decoder's."""
    t5 = build("t5")
    with torch.no_grad(), capture_activations(t5, path):
        t5(input_ids=ids, labels=ids.clone())
    with ActivationReader(path) as reader:
        assert reader.rows("encoder.block.0").column("token_id").tolist() == ids.flatten().tolist()
        for layer in ("decoder.block.0", "lm_head"):
            with pytest.raises(NotTokenAlignedError, match="without text for the decoder"):
                reader.rows(layer)


def test_a_decoder_that_is_called_alone_has_the_text_of_its_call(build, ids, path):
    t5 = build("t5")
    with torch.no_grad(), capture_activations(t5, path):
        t5.decoder(input_ids=ids, encoder_hidden_states=torch.zeros(2, 3, 32))
    with ActivationReader(path) as reader:
        assert reader.rows("decoder.block.0").column("token_id").tolist() == ids.flatten().tolist()


def test_a_layer_in_two_calls_of_one_step_belongs_to_neither(ids, path):
    class Nested(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.outer = nn.Sequential(nn.Sequential(nn.Embedding(97, 4)))

        def forward(self, input_ids: Tensor) -> Tensor:
            return self.outer(input_ids)

        def both(self, first: Tensor, second: Tensor) -> None:
            self.outer(first)
            self.outer[0](second)

    model = Nested()
    with torch.no_grad(), capture_activations(model, path):
        model.both(ids, ids.flip(0))
    with ActivationReader(path) as reader:
        with pytest.raises(NotTokenAlignedError, match="step 0 has several calls"):
            reader.rows("outer.0.0")


def test_last_positions_of_a_generation(llama, ids, path):
    """The tensors of the later steps have one position, and are whole."""
    config = InstrumentationConfig.max().with_float32().with_last_position()
    kept = Kept(llama, "model.layers.0")
    llama.register_forward_hook(lambda *_: setattr(kept, "steps", kept.steps + 1))
    with torch.no_grad(), capture_activations(llama, path, config=config):
        whole = llama.generate(ids, max_new_tokens=3, min_new_tokens=3, do_sample=False)
    with ActivationReader(path) as reader:
        assert_rows(
            reader.rows("model.layers.0"),
            [
                (step, b, 8 + step, int(whole[b, 8 + step]), output[b, -1])
                for step, output in kept.outputs["model.layers.0"]
                for b in range(2)
            ],
        )


def test_the_last_position_of_a_tensor_for_the_whole_batch_is_not_aligned(llama, ids, path):
    config = InstrumentationConfig.max().with_last_position()
    with torch.no_grad(), capture_activations(llama, path, config=config):
        llama(ids)
    with ActivationReader(path) as reader:
        with pytest.raises(NotTokenAlignedError, match=r"shape is \[1, 1, 8\] in step 0"):
            reader.rows("model.rotary_emb")


def test_a_number_has_no_rows(ids, path):
    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.loss = nn.Embedding(97, 4), nn.Identity()

        def forward(self, input_ids: Tensor) -> Tensor:
            return self.loss(self.embed(input_ids).sum())

    model = Loss()
    with torch.no_grad(), capture_activations(model, path):
        model(ids)
    with ActivationReader(path) as reader:
        with pytest.raises(NotTokenAlignedError, match=r"its shape is \[\] in step 0"):
            reader.rows("loss")


def test_indices_of_rows(llama, ids, path):
    with torch.no_grad(), capture_activations(llama, path):
        llama(ids)
    with ActivationReader(path) as reader:
        rows = reader.rows("model.layers.0")
        assert len(rows[[]]) == 0 and rows[[]].to_torch().shape == (0, 32)
        for one in (torch.tensor(3), np.array(3), np.int64(3), -15):
            assert rows[one].position == 3
        assert rows[torch.tensor([3])].column("position").tolist() == [3]
        assert rows[::-1].column("position").tolist() == [*range(8, -1, -1)] * 2
        with pytest.raises(IndexError, match=r"shape \[1, 2\]: rows have one axis"):
            rows[np.array([[1, 2]])]


def test_damaged_calls_files_are_refused_or_read(llama, ids, path):
    """No damage may end the process, or give an untyped error."""
    with torch.no_grad(), annotate(document=["a", "b"]), capture_activations(llama, path):
        llama(ids, attention_mask=torch.ones_like(ids))
    file = calls_path_for(path)
    whole = file.read_bytes()
    random = np.random.default_rng(0)
    outcomes = set()
    for _ in range(400):
        damaged = bytearray(whole)
        at = int(random.integers(len(whole)))
        damaged[at : at + 4] = random.choice([b"\xff\xff\xff\x7f", b"\xff", b"\0\0\0\0", b"\1"])
        file.write_bytes(damaged[: len(whole)])
        try:
            with ActivationReader(path) as reader:
                rows = reader.rows("model.layers.0")
                for name in ("token_id", "position", "sequence", "document"):
                    assert len(rows.column(name)) == len(rows)
            outcomes.add("read")
        except (NoCallsError, NotTokenAlignedError, CorruptError, UnsupportedError) as error:
            outcomes.add(type(error).__name__)
    assert {"read", "NoCallsError"} <= outcomes


def test_nulls_where_the_format_has_none_end_the_calls(llama, ids, path):
    with torch.no_grad(), capture_activations(llama, path):
        llama(ids)
    file = calls_path_for(path)
    with pa.ipc.open_stream(file.read_bytes()) as source:
        table = source.read_all()
    broken = table.set_column(0, table.schema.field(0), pa.array([0, None], pa.int64()))
    with pa.ipc.new_stream(file, table.schema) as target:
        target.write_table(broken)
    with ActivationReader(path) as reader:
        with pytest.raises(NoCallsError, match=r"no call for 'model\.layers\.0'"):
            reader.rows("model.layers.0")


def test_arguments_and_gradients_have_rows_as_outputs_have(path):
    torch.manual_seed(0)
    config = transformers.GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=50)
    model = transformers.GPT2LMHeadModel(config).eval()
    ids = torch.tensor([[3, 4, 5], [6, 7, 8]])
    how = InstrumentationConfig.balanced().with_layers("transformer.h.*").with_float32()
    with capture_activations(model, path, config=how.with_inputs().with_gradients()):
        model(ids, labels=ids).loss.backward()
    with ActivationReader(path) as reader:
        output = reader.rows("transformer.h.0")
        given = reader.rows("transformer.h.1!input")
        gradient = reader.rows("transformer.h.1!grad")
        assert given.column("token_id").tolist() == ids.flatten().tolist()
        assert torch.equal(given.to_torch(), output.to_torch())
        whole = reader["transformer.h.1!grad"][0].to_torch()
        assert torch.equal(gradient.to_torch(), whole.flatten(0, 1))


def test_what_a_decoder_is_given_of_the_encoder_has_the_rows_of_the_encoder(path):
    torch.manual_seed(0)
    config = transformers.T5Config(
        vocab_size=50, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2,
        decoder_start_token_id=0,
    )  # fmt: skip
    model = transformers.T5ForConditionalGeneration(config).eval()
    ids, decoded = torch.tensor([[3, 4, 5]]), torch.tensor([[6, 7, 8]])
    how = InstrumentationConfig.balanced().with_layers("*EncDecAttention").with_inputs()
    with torch.no_grad(), capture_activations(model, path, config=how):
        model(input_ids=ids, decoder_input_ids=decoded)
    with ActivationReader(path) as reader:
        name = "decoder.block.0.layer.1.EncDecAttention"
        rows = reader.rows(f"{name}['key_value_states']!input")
        assert rows.column("token_id").tolist() == [3, 4, 5]
        assert reader.rows(name).column("token_id").tolist() == [6, 7, 8]
