"""The calls file: what each step of the model was given, against what the test gave it."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
import torch
import transformers
from llm_instrumentation import (
    ActivationReader,
    InstrumentationConfig,
    InstrumentationFramework,
    annotate,
)
from llm_instrumentation._native import Session, capture_id_of
from llm_instrumentation.core.calls.encoders import encoders_of
from llm_instrumentation.core.calls.sequences import Sequences
from llm_instrumentation.core.capture import capture_activations
from llm_instrumentation.core.files.calls_file import calls_path_for, read_calls
from llm_instrumentation.errors import CorruptError, InvalidArgumentError
from torch import Tensor, nn
from transformers_cache import CACHE_NAME

GENERATED = 4
END_MARK = bytes.fromhex("ffffffff00000000")


def rows(path: Path) -> list[dict[str, Any]]:
    """The rows of calls; those that say how many tokens were kept are not among them."""
    table = read_calls(path, capture_id_of(path))
    assert table is not None
    return [row for row in table.to_pylist() if row["kept"] is None]


def column(path: Path, name: str) -> list[Any]:
    return [row[name] for row in rows(path)]


def joined(found: list[dict[str, Any]], name: str) -> list[Any]:
    return list(itertools.chain.from_iterable(row[name] for row in found))


def captured(model: nn.Module, path: Path, call: Any, **options: Any) -> list[dict[str, Any]]:
    with torch.no_grad(), capture_activations(model, path, **options):
        call()
    return rows(path)


def left_padded(ids: Tensor, *lengths: int) -> tuple[Tensor, Tensor]:
    """Token ids padded with 0 on the left, and the mask."""
    mask = torch.stack([(torch.arange(ids.shape[1]) >= ids.shape[1] - n).long() for n in lengths])
    return ids * mask, mask


# ---- tokens, masks and positions ----------------------------------------------------


def test_a_batch_has_a_row_for_each_text(llama, ids, path):
    first, second = captured(llama, path, lambda: llama(ids))
    assert first["token_ids"] == ids[0].tolist() and second["token_ids"] == ids[1].tolist()
    assert (first["step"], first["row"], second["step"], second["row"]) == (0, 0, 0, 1)
    assert (first["sequence"], second["sequence"]) == (0, 1)
    assert first["positions"] == list(range(9))
    assert (first["model"], first["entry"], first["mask"], first["inputs"]) == (
        "llama", "", None, None,
    )  # fmt: skip


def test_right_padding_has_no_position(minilm, path):
    inputs = minilm.inputs
    found = captured(minilm.model, path, lambda: minilm.model(**inputs))
    for row, tokens, mask in zip(found, inputs["input_ids"], inputs["attention_mask"], strict=True):
        assert row["token_ids"] == tokens.tolist()
        assert row["mask"] == mask.bool().tolist()
        assert row["token_types"] == [0] * len(tokens)
        length = int(mask.sum())
        assert row["positions"] == [*range(length), *[-1] * (len(tokens) - length)]


def test_a_generation_with_left_padding_keeps_its_sequences(llama, ids, path):
    prompt, mask = left_padded(ids, 9, 5)
    whole: Tensor

    def generate() -> None:
        nonlocal whole
        whole = llama.generate(
            prompt, attention_mask=mask, max_new_tokens=GENERATED, min_new_tokens=GENERATED,
            do_sample=False,
        )  # fmt: skip

    found = captured(llama, path, generate)
    assert len(found) == 2 * GENERATED  # the last token is not fed back
    for sequence in (0, 1):
        mine = [row for row in found if row["sequence"] == sequence]
        assert [row["step"] for row in mine] == list(range(GENERATED))
        assert joined(mine, "token_ids") == whole[sequence, :-1].tolist()
        kept = [
            (position, token)
            for row in mine
            for position, token, real in zip(
                row["positions"], row["token_ids"], row["mask"], strict=True
            )
            if real
        ]
        real = prompt[sequence, mask[sequence] == 1].tolist() + whole[sequence, 9:-1].tolist()
        assert kept == list(enumerate(real))


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_positions_are_derived_from_the_cache_without_a_mask(llama, ids, path, cache):
    def steps() -> None:
        held: Any = None
        if cache == "static":
            held = transformers.StaticCache(config=llama.config, max_cache_len=16)
        for part in (ids[:, :4], ids[:, 4:5], ids[:, 5:]):
            held = llama(part, use_cache=True, **{CACHE_NAME: held})[CACHE_NAME]

    found = captured(llama, path, steps)
    mine = [row for row in found if row["sequence"] == 1]
    assert [row["positions"] for row in mine] == [[0, 1, 2, 3], [4], [5, 6, 7, 8]]
    assert joined(mine, "token_ids") == ids[1].tolist()


def test_a_mask_of_a_part_of_the_cache_does_not_number_its_tokens(llama, ids, path):
    """As in a model with a window, whose mask has no columns for older tokens."""

    def steps() -> None:
        cache = llama(ids[:, :6], use_cache=True)[CACHE_NAME]
        mask = torch.ones(2, 3, dtype=torch.long)
        llama(ids[:, 6:7], attention_mask=mask, use_cache=True, **{CACHE_NAME: cache})

    found = captured(llama, path, steps)
    assert [(row["positions"], row["mask"]) for row in found[2:]] == [([6], [True])] * 2


@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.float32, torch.bfloat16])
def test_masks_of_any_type(llama, ids, path, dtype):
    _, mask = left_padded(ids, 9, 5)
    found = captured(llama, path, lambda: llama(ids, attention_mask=mask.to(dtype)))
    assert [row["mask"] for row in found] == mask.bool().tolist()


def test_a_mask_that_is_added_to_scores_keeps_its_zeros(path, ids):
    class Adds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(97, 4)

        def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
            return self.embed(input_ids) + attention_mask[..., None].clamp(min=-1)

    _, mask = left_padded(ids, 9, 5)
    added = torch.zeros(2, 9).masked_fill(mask == 0, -torch.inf)
    model = Adds()
    found = captured(model, path, lambda: model(ids, attention_mask=added))
    assert [row["mask"] for row in found] == mask.bool().tolist()


def test_given_position_ids_are_stored_as_they_are(llama, ids, path):
    positions = torch.arange(9)[None] + 100
    found = captured(llama, path, lambda: llama(ids, position_ids=positions))
    assert [row["positions"] for row in found] == [positions[0].tolist()] * 2


def test_tokens_that_the_caller_changes_after_the_call_are_those_of_the_call(llama, ids, path):
    buffer = ids.clone()
    with torch.no_grad(), capture_activations(llama, path):
        llama(buffer)
        buffer.zero_()
    assert column(path, "token_ids") == ids.tolist()


def test_beams_that_change_places_have_no_known_sequence(llama, ids, path):
    found = captured(
        llama, path, lambda: llama.generate(ids, max_new_tokens=3, min_new_tokens=3, num_beams=2)
    )
    assert [row["sequence"] for row in found if row["step"] == 0] == [0, 1, 2, 3]
    assert {row["sequence"] for row in found if row["step"] > 0} == {None}


def test_a_cropped_cache_keeps_its_sequences(llama, ids, path):
    """Speculative decoding takes back the tokens that were not accepted."""

    def draft_and_crop() -> None:
        cache = llama(ids[:1, :6], use_cache=True)[CACHE_NAME]
        cache.crop(-2)
        llama(ids[:1, 4:5], use_cache=True, **{CACHE_NAME: cache})

    found = captured(llama, path, draft_and_crop)
    assert [(row["sequence"], row["positions"][-1]) for row in found] == [(0, 5), (0, 4)]


def test_an_unknown_cache_has_unknown_sequences(llama, ids, path):
    """The prompt was read before the capture began."""
    with torch.no_grad():
        cache = llama(ids, use_cache=True)[CACHE_NAME]
    found = captured(llama, path, lambda: llama(ids[:, :1], use_cache=True, **{CACHE_NAME: cache}))
    assert [(row["sequence"], row["positions"]) for row in found] == [(None, [9])] * 2


def test_steps_that_are_left_out_have_no_rows_but_their_sequences_go_on(llama, ids, path):
    config = InstrumentationConfig.balanced().with_every(2)
    found = captured(
        llama, path, lambda: llama.generate(ids, max_new_tokens=5, min_new_tokens=5), config=config
    )
    assert [row["step"] for row in found] == [0, 0, 2, 2, 4, 4]
    assert [row["sequence"] for row in found] == [0, 1] * 3
    assert [row["positions"][0] for row in found] == [0, 0, 10, 10, 12, 12]


# ---- other models -----------------------------------------------------------------------


def test_encoder_and_decoder_have_their_own_tokens(build, ids, path):
    t5 = build("t5")
    targets = ids[:, :4]
    found = captured(t5, path, lambda: t5(input_ids=ids, decoder_input_ids=targets))
    assert [row["token_ids"] for row in found] == ids.tolist()
    assert [row["decoder_token_ids"] for row in found] == targets.tolist()
    assert [row["decoder_positions"] for row in found] == [[0, 1, 2, 3]] * 2


def test_a_generation_of_an_encoder_decoder_model_continues_the_encoders_sequences(
    build, ids, path
):
    t5 = build("t5")
    found = captured(
        t5, path, lambda: t5.generate(ids, max_new_tokens=3, min_new_tokens=3, do_sample=False)
    )
    encoder = [row for row in found if row["entry"] == "encoder"]
    decoder = [row for row in found if row["entry"] == ""]
    assert [row["token_ids"] for row in encoder] == ids.tolist()
    assert [(row["sequence"], row["decoder_positions"]) for row in decoder] == [
        (0, [0]), (1, [0]), (0, [1]), (1, [1]), (0, [2]), (1, [2]),
    ]  # fmt: skip
    table = read_calls(path, None)
    encoders = json.loads(table.schema.metadata[b"encoders"])
    assert encoders == {"t5": {"modules": ["encoder"], "shared": []}}


def test_modules_that_encoder_and_decoder_share_are_listed():
    class Both(nn.Module):
        config = SimpleNamespace(is_encoder_decoder=True)

        def __init__(self) -> None:
            super().__init__()
            shared = nn.Linear(2, 2)
            self.encoder = nn.Sequential(shared, nn.Linear(2, 2))
            self.decoder = nn.Sequential(shared)

        def get_encoder(self) -> nn.Module:
            return self.encoder

    assert encoders_of("both", Both()) == {
        "both": {"modules": ["encoder"], "shared": ["decoder.0", "encoder.0"]}
    }


def test_a_model_of_embeddings_has_positions_and_no_tokens(llama, ids, path):
    with torch.no_grad():
        vectors = llama.get_input_embeddings()(ids)
    found = captured(llama, path, lambda: llama(inputs_embeds=vectors))
    assert [row["token_ids"] for row in found] == [None, None]
    assert [row["positions"] for row in found] == [list(range(9))] * 2
    assert json.loads(found[0]["inputs"]) == {
        "inputs_embeds": {"shape": [2, 9, 32], "dtype": "float32"}
    }


def test_a_model_of_images_has_the_shape_of_its_input(path):
    config = transformers.ViTConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
        image_size=8, patch_size=4,
    )  # fmt: skip
    vit = transformers.ViTModel(config).eval()
    found = captured(vit, path, lambda: vit(torch.zeros(3, 3, 8, 8)))
    assert len(found) == 3 and found[0]["positions"] is None
    assert json.loads(found[0]["inputs"]) == {
        "pixel_values": {"shape": [3, 3, 8, 8], "dtype": "float32"}
    }


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested")
def test_a_jagged_batch_has_a_row_for_each_of_its_tensors(path):
    class Values(nn.Linear):
        def forward(self, batch: Tensor) -> Tensor:
            return super().forward(batch.values())

    tensors = [torch.ones(2, 4), torch.ones(3, 4), torch.ones(1, 4)]
    batch = torch.nested.nested_tensor(tensors, layout=torch.jagged)
    model = Values(4, 4)
    found = captured(model, path, lambda: model(batch))
    assert [row["row"] for row in found] == [0, 1, 2]


@pytest.mark.parametrize("by_name", [False, True])
def test_the_first_argument_of_other_models_is_the_text_if_it_has_integers(ids, path, by_name):
    class Small(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(97, 4)

        def forward(self, tokens: Tensor, targets: Any = None) -> Tensor:
            return self.embed(tokens)

    model = Small()
    found = captured(model, path, lambda: model(tokens=ids) if by_name else model(ids))
    assert [row["token_ids"] for row in found] == ids.tolist()
    assert found[0]["inputs"] is None


# ---- sequences that only look known -----------------------------------------------------


def test_beams_of_a_quantized_cache_have_no_known_sequence(llama, ids, path):
    """A quantized cache reorders its rows in tensors of its own."""
    try:
        cache = transformers.QuantizedCache("fp8", llama.config)
    except (TypeError, ValueError):
        pytest.skip("this transformers has no fp8 cache")
    found = captured(
        llama,
        path,
        lambda: llama.generate(
            ids, max_new_tokens=3, min_new_tokens=3, num_beams=3, **{CACHE_NAME: cache}
        ),
    )
    assert [row["sequence"] for row in found if row["step"] == 0] == [0, 1, 2, 3, 4, 5]
    assert {row["sequence"] for row in found if row["step"] > 0} == {None}


class MadeUpCache:
    def __init__(self, length: Any) -> None:
        self.layers = [SimpleNamespace(keys=torch.ones(2, 1, 3, 4), _pending_beam_idx=None)]
        self._length = length

    def get_seq_length(self) -> Any:
        return self._length


def test_a_reorder_that_waits_makes_sequences_unknown():
    cache, sequences = MadeUpCache(length=3), Sequences()
    sequences.end(sequences.begin([], 2, held=0).numbers, [cache], held=3)
    assert sequences.held([cache]) == 3
    assert sequences.begin([cache], 2, held=3).numbers == (0, 1)
    cache.layers[0]._pending_beam_idx = torch.tensor([1, 0])
    assert sequences.begin([cache], 2, held=3).numbers is None


def test_a_static_cache_that_is_reset_has_no_known_sequence_if_its_length_is_on_a_device():
    cache, sequences = (
        MadeUpCache(length=torch.zeros((), dtype=torch.int64, device="meta")),
        Sequences(),
    )
    sequences.end(sequences.begin([], 2, held=0).numbers, [cache])
    assert isinstance(sequences.held([cache]), Tensor)
    assert sequences.begin([cache], 2, held=None).numbers == (0, 1)
    cache.layers[0].keys.zero_()
    assert sequences.begin([cache], 2, held=None).numbers is None


class Inner(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model


class Outer(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.inner = Inner(model)

    def forward(self, input_ids: Tensor) -> Any:
        return self.inner.model(input_ids)


def test_a_call_that_is_found_late_does_not_count_its_own_tokens_as_cached(llama, ids, path):
    """The second layer's output is the first that is seen; the first has filled its cache."""
    outer = Outer(llama)
    config = InstrumentationConfig.max().with_layers(include=["inner.model.model.layers.1"])
    cache = transformers.DynamicCache(config=llama.config)

    def steps() -> None:
        for part in (ids[:, :4], ids[:, 4:5]):
            llama(part, use_cache=True, **{CACHE_NAME: cache})

    found = captured(outer, path, steps, config=config)
    assert [(row["sequence"], row["positions"]) for row in found] == [
        (None, [-1] * 4), (None, [-1] * 4), (None, [4]), (None, [4]),
    ]  # fmt: skip


class Recurrent(nn.Module):
    """Its state is a pair of tensors for each layer, as keys and values of older releases are."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.cell = nn.Embedding(97, 4), nn.LSTMCell(4, 4)

    def forward(self, tokens: Tensor, states: Any = None) -> Any:
        state = states[0] if states else None
        for token in self.embed(tokens).unbind(1):
            state = self.cell(token, state)
        return state[0], [state]


def test_the_size_of_a_recurrent_state_is_no_number_of_tokens(ids, path):
    model = Recurrent()

    def steps() -> None:
        states: Any = None
        for part in (ids[:, :3], ids[:, 3:4], ids[:, 4:6]):
            _, states = model(part, states)

    found = captured(model, path, steps)
    mine = [row for row in found if row["sequence"] == 1]
    assert [row["positions"] for row in mine] == [[0, 1, 2], [3], [4, 5]]


@pytest.mark.parametrize("architecture", ["bart", "whisper"])
def test_encoders_deep_in_a_model_begin_the_sequences(ids, path, architecture):
    sizes: dict[str, Any] = {
        "vocab_size": 97, "d_model": 16, "encoder_layers": 1, "decoder_layers": 1,
        "encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 16,
        "decoder_ffn_dim": 16, "bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0,
        "decoder_start_token_id": 2, "forced_eos_token_id": None,
    }  # fmt: skip
    if architecture == "bart":
        model: Any = transformers.BartForConditionalGeneration(transformers.BartConfig(**sizes))
        given = ids
    else:
        model = transformers.WhisperForConditionalGeneration(
            transformers.WhisperConfig(
                **sizes, num_mel_bins=8, max_source_positions=10, max_target_positions=20,
                suppress_tokens=[], begin_suppress_tokens=[],
            )
        )  # fmt: skip
        given = torch.zeros(2, 8, 20)
    found = captured(model.eval(), path, lambda: model.generate(given, max_new_tokens=2))
    assert {row["entry"] for row in found} == {"model.encoder", ""}
    assert [row["sequence"] for row in found] == [0, 1] * (len(found) // 2)


# ---- models that cannot be recorded ----------------------------------------------------------


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(97, 4)

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None) -> Tensor:
        return self.embed(input_ids.long() % 97)


@pytest.mark.parametrize("kind", ["export", "vmap", "meta"])
@pytest.mark.filterwarnings("ignore:Accessing the data pointer")
def test_tokens_that_cannot_be_read_do_not_end_the_capture(ids, path, kind):
    model = Small()
    with torch.no_grad(), capture_activations(model, path):
        with pytest.warns(RuntimeWarning, match="was given is not recorded as a whole"):
            if kind == "export":
                torch.export.export(model, (ids,))
            elif kind == "vmap":
                torch.func.vmap(model)(ids)
            else:
                torch.func.functional_call(
                    model, {"embed.weight": torch.empty(97, 4, device="meta")}, ids.to("meta")
                )
        model(ids)
    assert column(path, "token_ids") == ids.tolist()


class WithPositions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(97, 4)

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None) -> Tensor:
        return self.embed(input_ids)


def test_calls_that_cannot_be_recorded_do_not_end_the_capture(ids, path):
    """Their number is told; the tensors and the other calls are there."""
    model = WithPositions()
    with pytest.warns(RuntimeWarning, match="lacks calls .*1099511627776 is beyond the int32"):
        with torch.no_grad(), capture_activations(model, path) as framework:
            model(ids)
            model(ids, position_ids=torch.full_like(ids, 2**40))
            model(ids)
    assert framework.stats().tensors == 6 and framework.stats().lost_calls == 1
    assert [row["step"] for row in rows(path)] == [0, 0, 2, 2]
    assert not calls_path_for(path).read_bytes().endswith(END_MARK)
    with ActivationReader(path) as reader:
        assert len(reader["embed"]) == 3
        with pytest.warns(RuntimeWarning, match="lacks the calls of 1 activations of 'embed'"):
            found = reader.rows("embed")
        assert found.column("step").tolist() == [0] * 18 + [2] * 18 and found.left_out == 1


def test_a_calls_file_that_cannot_be_made_is_tried_again(ids, path):
    model = WithPositions()
    with pytest.warns(RuntimeWarning, match="lacks calls .*Is a directory"):
        with torch.no_grad(), capture_activations(model, path) as framework:
            calls_path_for(path).mkdir()
            model(ids)
            while not framework.stats().lost_calls:
                time.sleep(0.01)
            calls_path_for(path).rmdir()
            model(ids)
    assert framework.stats().tensors == 4 and framework.stats().lost_calls == 1
    assert [row["step"] for row in rows(path)] == [1, 1]


def test_a_complete_calls_file_has_an_end_mark(ids, path):
    model = WithPositions()
    captured(model, path, lambda: model(ids))
    assert calls_path_for(path).read_bytes().endswith(END_MARK)


def test_strict_captures_end_with_a_call_that_cannot_be_recorded(ids, path):
    model = WithPositions()
    config = InstrumentationConfig.balanced().with_strict()
    with pytest.warns(RuntimeWarning, match="has stopped"):
        with pytest.raises(InvalidArgumentError, match="1099511627776 is beyond"):
            with torch.no_grad(), capture_activations(model, path, config=config):
                model(ids, position_ids=torch.full_like(ids, 2**40))


def test_numbers_that_are_no_token_ids_are_other_tensors(path):
    model = Small()
    config = InstrumentationConfig.max().with_token_ids("hashed")
    found = captured(model, path, lambda: model(torch.rand(2, 3)), config=config)
    assert [row["token_hashes"] for row in found] == [None, None]
    assert json.loads(found[0]["inputs"]) == {"input_ids": {"shape": [2, 3], "dtype": "float32"}}


def test_texts_with_choices_are_rows_of_the_batch(ids, path):
    """Token ids of three dimensions, as for multiple choice, are of another form."""
    model = Small()
    with annotate(document=["a", "b"]):
        found = captured(model, path, lambda: model(torch.stack([ids, ids, ids], dim=1)))
    assert [(row["document"], row["token_ids"]) for row in found] == [("a", None), ("b", None)]
    assert json.loads(found[0]["inputs"]) == {"input_ids": {"shape": [2, 3, 9], "dtype": "int64"}}


def test_a_wrapper_that_passes_its_arguments_on_has_the_first_as_text(ids, path):
    class Wrapper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = Small()

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return self.model(*args, **kwargs)

    model = Wrapper()
    found = captured(model, path, lambda: model(ids))
    assert [row["token_ids"] for row in found] == ids.tolist()


def test_a_checkpoint_covers_no_tensor_without_its_call(llama, ids, path, monkeypatch):
    """Another thread calls the model while the checkpoint is made."""
    framework = InstrumentationFramework(InstrumentationConfig.balanced())
    framework.instrument_model(llama)
    make, synced = Session.checkpoint, []

    def checkpoint(session: Session, *args: Any) -> int:
        with torch.no_grad():
            llama(ids)
        return make(session, *args)

    with framework.capture_activations(path, track_per_token=True) as tracker:
        tracker.record_token(1, "a")
        with monkeypatch.context() as patched:
            patched.setattr(Session, "checkpoint", checkpoint)
            tracker.checkpoint()
        synced = rows(path)
    assert [row["step"] for row in synced] == [0, 0]


# ---- labels -----------------------------------------------------------------------------


def test_labels_of_the_batch_and_of_its_rows(llama, ids, path):
    with torch.no_grad(), capture_activations(llama, path) as framework:
        with framework.annotate(split="train"):
            with framework.annotate(document=["a", 7], score=[0.5, None]):
                llama(ids)
            llama(ids)
        llama(ids)
    found = rows(path)
    assert [row["document"] for row in found] == ["a", "7", None, None, None, None]
    assert [row["labels"] and json.loads(row["labels"]) for row in found] == [
        {"split": "train", "score": 0.5}, {"split": "train"}, {"split": "train"},
        {"split": "train"}, None, None,
    ]  # fmt: skip


def test_annotate_without_a_block_holds_from_then_on(llama, ids, path):
    with annotate(), torch.no_grad(), capture_activations(llama, path):
        annotate(document="first")
        llama(ids[:1])
        annotate(document="second")
        llama(ids[:1])
        annotate(document=None)
        llama(ids[:1])
    assert column(path, "document") == ["first", "second", None]


def test_labels_follow_the_rows_that_a_generation_makes_of_each_text(llama, ids, path):
    with annotate(document=["a", "b"]):
        found = captured(
            llama, path, lambda: llama.generate(ids, max_new_tokens=2, num_beams=3), overwrite=True
        )
    assert [row["document"] for row in found if row["step"] == 0] == ["a"] * 3 + ["b"] * 3


def test_labels_that_do_not_fit_the_batch_are_told(llama, ids, path):
    with annotate(document=["a", "b", "c"]):
        with pytest.warns(RuntimeWarning, match=r"labels \(document has 3\) .* batch of 2 rows"):
            found = captured(llama, path, lambda: llama(ids))
        config = InstrumentationConfig.balanced().with_strict()
        with pytest.raises(ValueError, match="batch of 2 rows"):
            captured(llama, path.with_name("strict.stream"), lambda: llama(ids), config=config)
    assert [row["document"] for row in found] == [None, None]
    assert [row["token_ids"] for row in found] == ids.tolist()


@pytest.mark.parametrize(
    ("labels", "error", "message"),
    [
        ({"document": object()}, TypeError, "document must be a text or a number"),
        ({"score": float("nan")}, ValueError, "score must be a finite number, not nan"),
        ({"a": ["x"], "b": ["y", "z"]}, ValueError, "a has 1, b has 2"),
        ({"document": "\udcff.txt"}, ValueError, "document must be text that UTF-8 can store"),
    ],
)
def test_labels_that_cannot_be_stored_are_refused(labels, error, message):
    with pytest.raises(error, match=message):
        annotate(**labels)


def test_threads_have_their_own_labels(llama, ids, path):
    def serve(name: str) -> None:
        with torch.no_grad(), annotate(document=name):
            llama(ids[:1])

    with capture_activations(llama, path):
        threads = [threading.Thread(target=serve, args=(f"thread {n}",)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sorted(column(path, "document")) == [f"thread {n}" for n in range(4)]


# ---- private text -------------------------------------------------------------------------


def test_hashed_tokens_are_equal_where_the_tokens_are(llama, ids, path):
    config = InstrumentationConfig.balanced().with_token_ids("hashed", key=b"secret")
    found = captured(llama, path, lambda: llama(ids), config=config)
    assert [row["token_ids"] for row in found] == [None, None]
    tokens, hashes = ids.flatten().tolist(), joined(found, "token_hashes")
    assert len(set(hashes)) == len(set(tokens)) == len(set(zip(tokens, hashes, strict=True)))
    again = captured(llama, path.with_name("2.stream"), lambda: llama(ids), config=config)
    assert [row["token_hashes"] for row in again] == [row["token_hashes"] for row in found]


def test_a_random_key_gives_other_hashes(llama, ids, path):
    config = InstrumentationConfig.balanced().with_token_ids("hashed")
    first = captured(llama, path, lambda: llama(ids), config=config)
    second = captured(llama, path.with_name("2.stream"), lambda: llama(ids), config=config)
    assert first[0]["token_hashes"] != second[0]["token_hashes"]


def test_without_token_ids_positions_and_labels_stay(llama, ids, path):
    config = InstrumentationConfig.balanced().with_token_ids("none")
    with annotate(document="a"):
        found = captured(llama, path, lambda: llama(ids), config=config)
    assert found[0]["token_ids"] is None and found[0]["token_hashes"] is None
    assert found[0]["positions"] == list(range(9)) and found[0]["document"] == "a"


@pytest.mark.parametrize("key", [b"", b"x" * 65, "text"])
def test_a_key_has_1_to_64_bytes(key):
    with pytest.raises(ValueError, match="token_key must be 1 to 64 bytes"):
        InstrumentationConfig.balanced().with_token_ids("hashed", key=key)


# ---- the file -------------------------------------------------------------------------------


def test_calls_are_in_the_file_while_the_capture_runs(llama, ids, path):
    with torch.no_grad(), capture_activations(llama, path):
        llama(ids)
        deadline = threading.Event()
        for _ in range(100):
            if (table := read_calls(path, None)) is not None and len(table) == 2:
                break
            deadline.wait(0.1)
        assert table is not None and table["token_ids"].to_pylist() == ids.tolist()


def test_a_torn_end_is_left_out(llama, ids, path):
    captured(llama, path, lambda: [llama(ids), llama(ids)])
    file = calls_path_for(path)
    whole = file.read_bytes()
    table = read_calls(path, None)
    for length in range(0, len(whole), 97):
        file.write_bytes(whole[:length])
        torn = read_calls(path, None)
        assert torn is None or torn.equals(table) or len(torn) == 0


def test_the_calls_of_another_capture_are_not_taken(llama, ids, path):
    captured(llama, path, lambda: llama(ids))
    other = path.with_name("other.stream")
    captured(llama, other, lambda: llama(ids))
    calls_path_for(other).replace(calls_path_for(path))
    assert read_calls(path, capture_id_of(path)) is None


def test_a_new_capture_replaces_the_calls_of_the_earlier_one(llama, ids, path):
    captured(llama, path, lambda: llama(ids))
    captured(llama, path, lambda: llama(ids[:1, :3]))
    assert column(path, "token_ids") == ids[:1, :3].tolist()


def test_a_file_of_the_users_own_is_not_replaced(llama, ids, path):
    calls_path_for(path).write_text("my phone calls")
    with pytest.raises(ValueError, match="no calls file of a capture"):
        captured(llama, path, lambda: llama(ids))
    assert not path.exists() and calls_path_for(path).read_text() == "my phone calls"
    assert len(captured(llama, path, lambda: llama(ids), overwrite=True)) == 2


def test_a_resumed_capture_keeps_the_calls_before_its_checkpoint(llama, ids, path):
    framework = InstrumentationFramework(InstrumentationConfig.balanced())
    framework.instrument_model(llama)
    with pytest.raises(RuntimeError, match="stop"), torch.no_grad():
        with framework.capture_activations(path, track_per_token=True) as tracker:
            llama(ids[:, :2])
            llama(ids[:, :3])
            tracker.record_token(1, "a")
            tracker.checkpoint()
            llama(ids[:, :4])
            raise RuntimeError("stop")
    with torch.no_grad():
        with framework.capture_activations(path, track_per_token=True, resume_from_checkpoint=True):
            llama(ids[:, :5])
    assert [(row["step"], row["sequence"], len(row["token_ids"])) for row in rows(path)] == [
        (0, 0, 2), (0, 1, 2), (1, 2, 3), (1, 3, 3), (2, 4, 5), (2, 5, 5),
    ]  # fmt: skip
    with pa.ipc.open_stream(path.with_name("run.stream.calls.tail-1").read_bytes()) as cut:
        assert cut.read_all()["step"].to_pylist() == [0, 0, 1, 1, 2, 2]


def test_what_the_test_compares_with_is_what_the_model_computes(llama, ids, path):
    """The rows of the tokens are the vectors of the embedding, in the same order."""
    table: nn.Embedding = llama.get_input_embeddings()
    seen: list[Tensor] = []
    handle = table.register_forward_hook(lambda m, a, output: seen.append(output.clone()))
    found = captured(llama, path, lambda: llama(ids))
    handle.remove()
    for row, vectors in zip(found, seen[0], strict=True):
        assert torch.equal(table.weight[torch.tensor(row["token_ids"])], vectors)


PROGRAM = """
import sys, torch
from llm_instrumentation import annotate, capture_activations

class Model(torch.nn.Embedding):
    def forward(self, input_ids, attention_mask):
        return super().forward(input_ids)

model = Model(9, 4)
mask = torch.tensor([[1, 1, 1], [0, 1, 1]])
with torch.no_grad(), capture_activations(model, sys.argv[1]), annotate(document=["one", None]):
    model(torch.arange(6).reshape(2, 3), attention_mask=mask)
print("pandas" in sys.modules)
"""


def test_a_capture_imports_no_pandas(tmp_path):
    """It would take half a second, in which the model and the first checkpoint wait."""
    path = tmp_path / "run.stream"
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, path], capture_output=True, text=True, check=True
    )
    assert done.stdout == "False\n"
    with ActivationReader(path) as reader:
        rows = reader.rows("")
        assert rows.column("token_id").tolist() == [0, 1, 2, 4, 5]
        assert rows.column("document").tolist() == ["one"] * 3 + [None] * 2


# ---- files of others ------------------------------------------------------------------


@pytest.fixture
def embedded(path: Path) -> Path:
    """A capture of an embedding."""
    model = nn.Embedding(100, 16)
    with torch.no_grad(), capture_activations(model, path):
        model(input=torch.ones(2, 7, dtype=torch.int64))
    return path


def rewritten(path: Path, change: Any, **options: Any) -> None:
    """Writes the calls file again, with another table."""
    calls = calls_path_for(path)
    table = change(pa.ipc.open_stream(calls.read_bytes()).read_all())
    with pa.ipc.new_stream(calls, table.schema, **options) as writer:
        writer.write_table(table)


@pytest.mark.parametrize(
    "encoders", [b"[]", b"5", b'{"": 1}', b'{"": {"modules": [1]}}', b"[" * 9999]
)
def test_a_damaged_list_of_encoders_is_refused(encoders, embedded):
    rewritten(
        embedded,
        lambda table: table.replace_schema_metadata(
            {**table.schema.metadata, b"encoders": encoders}
        ),
    )
    with ActivationReader(embedded) as reader:
        with pytest.raises(CorruptError, match="has a damaged list of encoders"):
            reader.rows("")


@pytest.mark.parametrize("codec", ["zstd", "lz4"])
def test_compressed_buffers_are_refused_before_they_take_memory(codec, embedded):
    options = pa.ipc.IpcWriteOptions(compression=codec)
    rewritten(embedded, lambda table: table, options=options)
    with ActivationReader(embedded) as reader:
        with pytest.raises(CorruptError, match=r"\.calls has compressed buffers of \d+ bytes"):
            reader.rows("")
