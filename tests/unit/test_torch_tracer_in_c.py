"""The torch tracer's recorder in C writes the same rows as its twin in Python."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pandas as pd
import pytest
import torch
from llm_instrumentation._native import NativeForm
from llm_instrumentation.mrm.collector import TorchTracer
from llm_instrumentation.mrm.collector.torch import recorder
from torch import nn
from torch_traces import rows_of
from transformers_cache import CACHE_NAME

pytestmark = [
    pytest.mark.skipif(
        not recorder.view_in_c(), reason="this torch or interpreter does not show tensors to C"
    ),
]

COMPARED = [
    "op_type", "address", "length_bytes", "symbol", "dso", "region_type", "region_id", "phase",
    "token_index", "context_tokens", "thread_id",
]  # fmt: skip


@contextmanager
def both(**options) -> Iterator[tuple[TorchTracer, TorchTracer]]:
    """Runs a tracer in Python and, inside it, a tracer in C; both see the same tensors."""
    with pytest.MonkeyPatch.context() as patch, TorchTracer(**options) as in_python:
        patch.setattr(recorder, "view_in_c", lambda: 0)
        with in_python.thread():
            pass  # makes the recorder in Python
        patch.undo()
        with TorchTracer(**options) as in_c:
            yield in_python, in_c


def check_same(in_python: TorchTracer, in_c: TorchTracer) -> pd.DataFrame:
    rows = rows_of(in_c)
    pd.testing.assert_frame_equal(rows[COMPARED], rows_of(in_python)[COMPARED])
    for about in ("tensors_without_address", "taken_whole"):
        assert in_c._session.about()[about] == in_python._session.about()[about]
    return rows


def small_llama() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=97, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


def small_gpt2() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(vocab_size=97, n_positions=64, n_embd=32, n_layer=2, n_head=4)
    return transformers.GPT2LMHeadModel(config).eval()


@pytest.mark.parametrize("build", [small_llama, small_gpt2])
@pytest.mark.parametrize("guard", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("every", [1, 5])
def test_the_rows_of_a_generation_are_the_same(build, guard, every):
    model = build()
    with both(sample_every=every) as (in_python, in_c), guard():
        with in_python.attach(model), in_c.attach(model):
            step, cache = torch.arange(12).reshape(1, 12), None
            for _ in range(4):
                out = model(input_ids=step, **{CACHE_NAME: cache}, use_cache=True)
                cache, step = out[CACHE_NAME], out.logits[:, -1:].argmax(-1)
        rows = check_same(in_python, in_c)
    assert set(rows.region_type) == {"weight", "kv_cache", "activation"}
    assert len(rows) * every > 300


def _foreach(x: torch.Tensor) -> None:
    torch._foreach_add_([x.clone(), x.clone()], 1.0)


OPERATIONS: dict[str, Callable[[torch.Tensor], object]] = {
    "number": lambda x: x + 2,
    "number of each sort": lambda x: (x * 2.5, x * True, x.to(torch.complex64) * 1j),
    "in place": lambda x: x.add_(x),
    "overwritten": lambda x: x.zero_(),
    "out": lambda x: torch.add(x, x, out=torch.empty_like(x)),
    "list": lambda x: torch.cat([x, x]),
    "lists": _foreach,
    "several results": lambda x: (x.topk(2), x.sort(), x.max(dim=0)),
    "no result": lambda x: torch._assert_async(torch.tensor(True)),
    "slices": lambda x: x[:, ::2] + x[:, 1::2],
    "transposed": lambda x: x.t() @ x,
    "expanded": lambda x: x[:1].expand(6, 8) * 2,
    "copied view": lambda x: (x.t().reshape(48), x.reshape(48), x.t().contiguous()),
    "converted": lambda x: (x.to(torch.float64), x.to(torch.float32), x.type_as(x)),
    "no elements": lambda x: x[:0] + 1,
    "no dimensions": lambda x: x.sum() + 1,
    "linear": lambda x: (nn.functional.linear(x, x), nn.functional.linear(x.t(), x.t())),
    "linear of one": lambda x: nn.functional.linear(x[0], x[0]),
    "chosen rows": lambda x: (x[torch.tensor([1, 2])], x.index_select(0, torch.tensor([4]))),
    "optional": lambda x: nn.functional.layer_norm(x, (8,)),
    "conjugated": lambda x: torch.complex(x, x).conj() + 1,
    "negated": lambda x: torch.complex(x, x).conj().imag + 1,
    "sparse": lambda x: x.to_sparse() @ x.t(),
    "meta": lambda x: torch.empty(3, device="meta") + torch.empty(3, device="meta"),
    "another sort of parameter": lambda x: nn.Buffer(x) + 1,
    "a parameter": lambda x: nn.Parameter(x, requires_grad=False) + 1,
    "a view of a parameter": lambda x: nn.Parameter(x, requires_grad=False).t() + 1,
}


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("guard", [torch.no_grad, torch.inference_mode])
def test_the_rows_of_an_operation_are_the_same(name, guard):
    x = torch.randn(6, 8)
    with both() as (in_python, in_c), guard():
        for _ in range(2):
            with in_python.thread(), in_c.thread():
                OPERATIONS[name](x)
        check_same(in_python, in_c)


@pytest.mark.parametrize(
    "dtype",
    [
        torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16,
        torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.float8_e4m3fn,
    ],
)  # fmt: skip
def test_the_rows_of_a_type_are_the_same(dtype):
    x = torch.zeros(5, dtype=dtype)
    with both() as (in_python, in_c):
        with in_python.thread(), in_c.thread():
            x.clone()
        assert len(check_same(in_python, in_c)) == 2


def test_the_rows_of_a_parameter_with_gradients_are_the_same():
    """The recorder in C handles parameters that require gradients, as most weights do."""
    x = nn.Parameter(torch.randn(5))
    with both() as (in_python, in_c), torch.no_grad():
        with in_python.thread(), in_c.thread():
            x.neg()
        rows = check_same(in_python, in_c)
    assert list(rows.region_type) == ["weight", "activation"]


def test_many_blocks_of_rows_are_the_same():
    x = torch.randn(3, 4)
    with both() as (in_python, in_c), torch.no_grad():
        with in_python.thread(), in_c.thread():
            for _ in range(recorder.BLOCK_ROWS):
                x = x.t() + 1  # each result is a new storage
            x[:, ::2].neg()  # gives a row for each piece
        assert len(check_same(in_python, in_c)) > 2 * recorder.BLOCK_ROWS


def test_memory_that_is_used_again_is_a_new_region():
    with TorchTracer() as tracer, torch.no_grad():
        with tracer.thread():
            for _ in range(3 * recorder.BLOCK_ROWS):
                torch.zeros(64)
        rows = rows_of(tracer)
    assert rows.region_id.nunique() == len(rows)


def test_a_known_operator_on_known_storages_runs_no_python_of_ours():
    x, y = torch.randn(8), torch.randn(8)
    calls = []

    def told(frame, event, _):
        if event == "call" and "llm_instrumentation" in frame.f_code.co_filename:
            calls.append(frame.f_code.co_name)

    with TorchTracer() as tracer, tracer.thread(), torch.no_grad():
        x.add_(y)  # the recorder learns the operator and the storages
        sys.setprofile(told)
        try:
            x.add_(y)
        finally:
            sys.setprofile(None)
    assert calls == []


def test_an_error_of_an_operator_is_raised_to_the_caller():
    x = torch.randn(2)
    with TorchTracer() as tracer, tracer.thread(), torch.no_grad():
        for _ in range(2):
            with pytest.raises(RuntimeError, match="must match"):
                x + torch.randn(3)


def test_an_unused_recorder_is_garbage_collected():
    tracer = TorchTracer()
    with tracer.thread():
        torch.zeros(3).neg()
    mode = weakref.ref(tracer._session.recorder_here().mode)
    tracer.close()
    del tracer
    gc.collect()
    assert mode() is None


def test_operators_beyond_the_table_in_c_run_in_python():
    x = torch.zeros(4)
    with TorchTracer() as tracer:
        with tracer.thread():
            in_c = tracer._session.recorder_here()._in_c
            learnt = 0
            while in_c.learn(object(), None, None, form=NativeForm.IN_PYTHON):
                learnt += 1
            y = x.neg()
        assert learnt > 400
        assert list(rows_of(tracer).address) == [x.data_ptr(), y.data_ptr()]
