"""Regions of memory, their labels, and the tokens of a model under a torch tracer."""

from __future__ import annotations

import gc
import time

import numpy as np
import pytest
import torch
import transformers
from llm_instrumentation.errors import InvalidArgumentError
from llm_instrumentation.mrm.collector import TorchTracer
from llm_instrumentation.mrm.collector.torch import regions
from llm_instrumentation.mrm.collector.torch.recorder import BLOCK_ROWS
from llm_instrumentation.mrm.schema import Phase
from torch import nn
from torch_traces import OldCache, moves, rows_of, traced, whole


def test_a_region_lasts_as_long_as_its_storage():
    """If the allocator uses a freed address again, the new storage is a new region."""
    x = torch.randn(1000)

    def work():
        for _ in range(20):
            y = x.neg()
            z = y.view(10, 100)[3:].abs()
            del y, z

    frame = traced(work)
    stores = frame[(frame.op_type == "store") & (frame.symbol == "aten::neg")]
    assert stores.region_id.is_unique
    assert not stores.address.is_unique, "no address came again, so this shows nothing"
    loads = frame[(frame.op_type == "load") & (frame.symbol == "aten::abs")]
    assert list(loads.region_id) == list(stores.region_id)
    assert set(frame.region_type) == {"activation"}
    assert 1 not in set(frame.region_id)


def test_memory_of_numpy_at_an_old_address_is_a_region_of_its_own():
    """No operator makes these storages, so only their identity shows that they are new."""
    memory = np.zeros(64, np.float32)

    def work():
        for _ in range(5):
            torch.from_numpy(memory).neg()

    frame = traced(work)
    loads = frame[frame.op_type == "load"]
    assert set(loads.address) == {memory.__array_interface__["data"][0]}
    assert loads.region_id.is_unique


def test_views_belong_to_the_region_of_their_storage():
    x = torch.randn(6, 6)

    def work():
        view = x.neg()[2:]
        gc.collect()
        for _ in range(3):
            view.t().abs()

    frame = traced(work)
    made = frame[(frame.symbol == "aten::neg") & (frame.op_type == "store")].region_id
    read = frame[(frame.symbol == "aten::abs") & (frame.op_type == "load")].region_id
    assert set(made) == set(read)


def test_dead_storages_are_forgotten():
    x = torch.randn(4)
    with TorchTracer() as one, torch.no_grad(), one.thread():
        session = one._session
        assert session is not None
        for _ in range(4 * BLOCK_ROWS):
            x.neg()
        assert len(session.regions.words) <= BLOCK_ROWS
        assert session.spool.rows >= 7 * BLOCK_ROWS
        frame = rows_of(one)
    assert len(frame) == 8 * BLOCK_ROWS
    assert frame.region_id.nunique() == 4 * BLOCK_ROWS + 1
    assert (frame.sample_id == np.arange(len(frame))).all()
    assert frame.timestamp_ns.is_monotonic_increasing


def test_caches_are_stale_before_an_address_is_used_again(monkeypatch):
    """Another thread may fill its cache while the released storages are found."""
    with TorchTracer() as one, torch.no_grad(), one.thread():
        found = one._session.regions
        for _ in range(9):
            torch.randn(4).neg()
        seen, freed = [], []
        expired, free = regions._expired, regions._free_weak_ref
        monkeypatch.setattr(
            regions, "_expired", lambda p: (seen.append(found.forgotten.value), expired(p))[1]
        )
        monkeypatch.setattr(
            regions, "_free_weak_ref", lambda p: (freed.append(found.forgotten.value), free(p))
        )
        for _ in range(2):
            found.forget_dead()
            torch.randn(4).neg()
            assert freed and not set(seen) & set(freed)
            freed.clear()


def test_parameters_and_buffers_are_weights():
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)).eval()
    tied = nn.Linear(3, 3)
    tied.weight = model[0].weight
    model.append(tied)
    with TorchTracer() as one, torch.no_grad():
        with one.attach(model):
            model(torch.randn(2, 3))
        frame = rows_of(one)
    weights = frame[frame.region_type == "weight"]
    buffers = [b for b in model.buffers() if b.dim()]  # the counter is not read
    assert set(weights.address) == {w.data_ptr() for w in [*model.parameters(), *buffers]}
    assert set(weights.region_id) == {1}
    assert set(weights.op_type) == {"load"}
    assert set(frame[frame.region_type != "weight"].region_type) == {"activation"}


def test_weights_that_come_in_later_are_weights_too():
    """Offloading replaces a parameter by another for one call; the other is a weight too."""
    model = nn.Linear(3, 3, bias=False)
    with TorchTracer() as one, torch.no_grad():
        with one.attach(model):
            model.weight = nn.Parameter(torch.ones(3, 3))
            model(torch.randn(1, 3))
            frame = rows_of(one)
        there = frame[(frame.symbol == "aten::mm") & (frame.address == model.weight.data_ptr())]
    assert set(there.region_type) == {"weight"}


class Scaled(torch.Tensor):
    """A float32 tensor made of int8 numbers and a scale, like the weights of torchao."""

    # Otherwise torch 2.2 makes one of each result, without numbers.
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, numbers, scale):
        made = torch.Tensor._make_wrapper_subclass(cls, numbers.shape, dtype=torch.float32)
        made.numbers, made.scale = numbers, scale
        return made

    def __tensor_flatten__(self):
        return ["numbers", "scale"], None

    @staticmethod
    def __tensor_unflatten__(tensors, context, size, stride):
        return Scaled(**tensors)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.detach.default:
            return Scaled(args[0].numbers, args[0].scale)
        plain = [one.numbers * one.scale if isinstance(one, Scaled) else one for one in args]
        return func(*plain, **(kwargs or {}))


@pytest.mark.parametrize("told", [True, False], ids=["told what it wraps", "not told"])
def test_the_tensors_in_a_wrapped_weight_are_weights(told, monkeypatch):
    """They are found by __tensor_flatten__; without it their loads are not labelled as weights."""
    if not told:
        monkeypatch.delattr(Scaled, "__tensor_flatten__")
    model = nn.Linear(4, 3, bias=False)
    numbers, scale = torch.ones(3, 4, dtype=torch.int8), torch.ones(3, 1)
    model.weight = nn.Parameter(Scaled(numbers, scale), requires_grad=False)
    with TorchTracer() as one, torch.no_grad():
        with one.attach(model):
            model(torch.randn(1, 4))
        frame = rows_of(one)
    weights = moves(frame[frame.region_type == "weight"])
    assert weights == ([whole("load", numbers), whole("load", scale)] if told else [])
    assert {whole("load", numbers), whole("load", scale)} <= set(moves(frame))


def test_a_traced_load_stores_the_weights_once():
    checkpoint = {"weight": torch.randn(3, 3), "bias": torch.randn(3)}
    with TorchTracer() as one, torch.no_grad():
        with one.load():
            model = nn.utils.skip_init(nn.Linear, 3, 3)
            model.load_state_dict(checkpoint)
        with one.attach(model):
            model(torch.randn(1, 3))
        frame = rows_of(one)
    loading = frame[frame.phase == "weight_load"]
    stored = loading[loading.op_type == "store"]
    assert sorted(moves(stored)) == sorted(whole("store", p) for p in model.parameters())
    assert set(stored.region_type) == {"weight"} and set(stored.region_id) == {1}
    assert set(loading[loading.op_type == "load"].region_type) == {"runtime"}
    assert set(frame[frame.phase == "generation"].region_type) == {"weight", "activation"}


def test_a_load_of_weights_that_was_not_traced_can_be_noted():
    model = nn.Linear(3, 3)
    with TorchTracer() as one, torch.no_grad():
        loaded = time.monotonic_ns()
        with one.attach(model):
            assert one.note_weights(loaded) == 2
            model(torch.randn(1, 3))
        frame = rows_of(one)
    noted = frame[frame.symbol == "weight_load"]
    assert sorted(moves(noted)) == sorted(whole("store", p) for p in model.parameters())
    assert set(noted.phase) == {"weight_load"}
    assert set(noted.timestamp_ns) == {loaded}
    assert set(frame[frame.symbol != "weight_load"].phase) == {"generation"}


class Recurrent(nn.Module):
    """A model that keeps its own cache in a buffer."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.register_buffer("cache", torch.zeros(8, 4))

    def forward(self, x, position):
        self.cache[position] = x * self.weight
        return self.cache.sum(0)


def test_a_cache_that_is_no_argument_can_be_named():
    model = Recurrent()
    with TorchTracer() as one, torch.no_grad():
        with one.attach(model, cache={"mine": model.cache}):
            model(torch.randn(4), 2)
        frame = rows_of(one)
    cached = frame[frame.region_type == "kv_cache"]
    assert moves(cached) == [("store", model.cache[2].data_ptr(), 16), whole("load", model.cache)]


def test_tokens_are_counted_by_forward_calls():
    model = OldCache()
    with TorchTracer() as one, torch.no_grad():
        with one.attach(model):
            for _ in range(2):
                _, cache = model(torch.ones(1, 5))
                for _ in range(3):
                    _, cache = model(torch.ones(1, 1), past_key_values=cache)
        frame = rows_of(one)
    steps = frame[["token_index", "context_tokens"]].dropna().drop_duplicates()
    assert steps.to_numpy().tolist() == [[0, 5], [1, 6], [2, 7], [3, 8]]
    order = frame.token_index.to_numpy()
    assert (np.diff(order) < 0).sum() == 1, "the second generation begins at token 0"
    cached = frame[(frame.region_type == "kv_cache") & (frame.op_type == "store")]
    sizes = cached.groupby("context_tokens").length_bytes.max()
    assert sizes.to_dict() == {5: 80, 6: 96, 7: 112, 8: 128}


def test_with_kv_regions_layer_the_keys_of_a_layer_are_one_region():
    model = OldCache()
    with TorchTracer(kv_regions="layer") as one, torch.no_grad():
        with one.attach(model):
            _, cache = model(torch.ones(1, 5))
            for _ in range(3):
                _, cache = model(torch.ones(1, 1), past_key_values=cache)
        frame = rows_of(one)
    assert frame[frame.region_type == "kv_cache"].region_id.nunique() == 2


def test_without_a_cache_a_text_one_token_longer_is_the_next_token():
    model = nn.Embedding(10, 4)
    with TorchTracer() as one, torch.no_grad():
        with one.attach(model):
            for length in (3, 4, 5, 3, 9):
                model(torch.zeros(1, length, dtype=torch.long))
        frame = rows_of(one)
    steps = frame[frame.symbol == "aten::embedding"].groupby("timestamp_ns", sort=True)
    told = [(int(s.token_index.iloc[0]), int(s.context_tokens.iloc[0])) for _, s in steps]
    assert told == [(0, 3), (1, 4), (2, 5), (0, 3), (0, 9)]


def t5():
    config = transformers.T5Config(
        vocab_size=97, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2,
        decoder_start_token_id=0,
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration(config).eval()


def bart():
    config = transformers.BartConfig(
        vocab_size=97, d_model=16, encoder_layers=1, decoder_layers=1, encoder_ffn_dim=32,
        encoder_attention_heads=2, decoder_attention_heads=2, decoder_ffn_dim=32,
        forced_eos_token_id=None,
    )  # fmt: skip
    return transformers.BartForConditionalGeneration(config).eval()


def whisper():
    config = transformers.WhisperConfig(
        vocab_size=97, num_mel_bins=8, d_model=16, encoder_layers=1, decoder_layers=1,
        encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=32,
        decoder_ffn_dim=32, max_source_positions=20, pad_token_id=1, bos_token_id=0,
        eos_token_id=2, decoder_start_token_id=3,
    )  # fmt: skip
    return transformers.WhisperForConditionalGeneration(config).eval()


def llama():
    config = transformers.LlamaConfig(
        vocab_size=97, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=2,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


def vit():
    config = transformers.ViTConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
        image_size=16, patch_size=8,
    )  # fmt: skip
    return transformers.ViTModel(config).eval()


TEXT, DECODED = torch.ones(1, 50, dtype=torch.long), torch.ones(1, 3, dtype=torch.long)
SOUND, PICTURE, EMBEDDED = torch.randn(1, 8, 40), torch.randn(1, 3, 16, 16), torch.randn(1, 7, 16)
LENGTHS = {"max_new_tokens": 3, "min_new_tokens": 3, "do_sample": False}


@pytest.mark.parametrize(
    ("build", "call", "expected"),
    [
        (t5, lambda m: m(input_ids=TEXT, decoder_input_ids=DECODED), [3]),
        (t5, lambda m: m(TEXT, None, DECODED), [3]),
        (t5, lambda m: m(TEXT, labels=DECODED), [3]),
        (t5, lambda m: m.generate(TEXT, **LENGTHS), [1, 2, 3]),
        (t5, lambda m: m.generate(TEXT, use_cache=False, **LENGTHS), [1, 2, 3]),
        (bart, lambda m: m(TEXT, decoder_input_ids=DECODED), [3]),
        (bart, lambda m: m(TEXT), [50]),  # the decoder's text is made from the encoder's
        (bart, lambda m: m.generate(TEXT, **LENGTHS), [1, 2, 3]),
        (whisper, lambda m: m(SOUND, None, DECODED), [3]),
        pytest.param(
            whisper,
            lambda m: m.generate(SOUND, **LENGTHS),
            [1, 2, 3],
            marks=pytest.mark.skipif(
                not hasattr(transformers.cache_utils, "StaticLayer"),
                reason="this transformers fails there without a tracer too",
            ),
        ),
        (llama, lambda m: m(None, inputs_embeds=EMBEDDED), [7]),
        (llama, lambda m: m.generate(inputs_embeds=EMBEDDED, **LENGTHS), [7, 8, 9]),
        (vit, lambda m: m(PICTURE), []),
    ],
)
def test_the_context_is_the_text_in_the_cache_of_the_decoder(build, call, expected):
    model = build()
    with TorchTracer() as one, torch.no_grad():
        with one.attach(model):
            call(model)
        frame = rows_of(one)
    steps = frame[["token_index", "context_tokens"]].dropna().drop_duplicates()
    assert steps.to_numpy().tolist() == [[n, length] for n, length in enumerate(expected)]


def test_phases_and_tokens_can_be_set():
    model, x = nn.Linear(2, 2), torch.randn(1, 2)
    with TorchTracer() as one, torch.no_grad():
        with one.attach(model):
            with one.phase("teardown"):
                one.token(4, context_tokens=17)
                model(x)
            with one.phase(Phase.GENERATION):
                model(x)
        frame = rows_of(one)
    told = frame[["phase", "token_index", "context_tokens"]].drop_duplicates()
    assert told.astype(object).where(told.notna(), None).to_numpy().tolist() == [
        ["teardown", 4, 17], ["generation", None, None],
    ]  # fmt: skip
    with pytest.raises(InvalidArgumentError, match=r"phase 'pause': must be one of weight_load"):
        with one.phase("pause"):
            pass
