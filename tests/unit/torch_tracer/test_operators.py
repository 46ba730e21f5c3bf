"""The rows that each kind of operator leaves in the trace of a torch tracer."""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
import warnings

import pyarrow.parquet as pq
import pytest
import torch
import transformers
from llm_instrumentation.mrm.collector import TorchTracer
from llm_instrumentation.mrm.collector.torch.trace import META_KEY
from torch import nn
from torch_traces import moves, rows_of, traced, whole


def test_inputs_are_loads_and_outputs_are_stores():
    a, b = torch.randn(3, 4), torch.randn(4, 5)
    kept = []
    before = time.monotonic_ns()
    frame = traced(lambda: kept.append(a @ b))
    after = time.monotonic_ns()

    assert moves(frame) == [whole("load", a), whole("load", b), whole("store", kept[0])]
    assert set(frame.symbol) == {"aten::mm"}
    assert set(frame.dso) == {"torch"}
    assert set(frame.thread_id) == {threading.get_native_id()}
    assert frame.timestamp_ns.between(before, after).all()
    assert (frame.address_page == frame.address // 4096).all()
    assert frame[["numa_node", "cpu_id", "cache_level", "access_latency_ns"]].isna().all(axis=None)


@pytest.mark.parametrize(
    "look",
    [
        lambda x: x.view(2, 12),
        lambda x: x.t(),
        lambda x: x.transpose(0, 1),
        lambda x: x.permute(1, 0),
        lambda x: x[1:, ::2],
        lambda x: x[0],
        lambda x: x.unsqueeze(0).expand(5, -1, -1),
        lambda x: x.split(2),
        lambda x: x.chunk(2),
        lambda x: x.unbind(),
        lambda x: x.reshape(24),
        lambda x: x.flatten(),
        lambda x: x.contiguous(),
        lambda x: x.to(torch.float32),
        lambda x: x.detach(),
        lambda x: x.diagonal(),
        lambda x: torch.ops.aten._unsafe_view(x, [24]),
        lambda x: x.unsqueeze_(0).squeeze_(0),
        lambda x: (x.size(), x.stride(), x.is_contiguous(), x.numel()),
        lambda x: torch.empty_like(x),
        lambda x: x.new_empty(7),
        lambda x: torch.empty(1000).resize_(10),
    ],
)
@pytest.mark.parametrize("guard", [torch.no_grad, torch.inference_mode])
def test_views_sizes_and_uninitialised_memory_give_no_rows(look, guard):
    x = torch.randn(4, 6)
    with TorchTracer() as one, guard():
        with one.thread():
            look(x)
        assert moves(rows_of(one)) == []


def test_a_reshape_that_copies_is_a_load_and_a_store():
    x = torch.randn(4, 6).t()
    for guard in (torch.no_grad, torch.inference_mode):
        with TorchTracer() as one, guard():
            with one.thread():
                copy = x.reshape(24)
            assert moves(rows_of(one)) == [whole("load", x), whole("store", copy)]


@pytest.mark.parametrize(
    ("change", "reads_itself"),
    [
        (lambda x, y: x.add_(y), True),
        (lambda x, y: x.mul_(2), True),
        (lambda x, y: x.relu_(), True),
        (lambda x, y: x.copy_(y), False),
        (lambda x, y: x.fill_(3), False),
        (lambda x, y: x.zero_(), False),
        (lambda x, y: x.normal_(), False),
        (lambda x, y: torch.add(y, y, out=x), False),
    ],
)
def test_a_tensor_changed_in_place_is_stored_and_loaded_only_if_read(change, reads_itself):
    x, y = torch.randn(8), torch.randn(8)
    frame = traced(lambda: change(x, y))
    of_x = frame[frame.address == x.data_ptr()]
    assert list(of_x.op_type) == (["load", "store"] if reads_itself else ["store"])
    assert set(frame.address) <= {x.data_ptr(), y.data_ptr()}


def test_templates_are_not_loaded():
    """zeros_like and new_ones use only the shape and type of their argument."""
    x = torch.randn(5)
    frame = traced(lambda: (torch.zeros_like(x), x.new_ones(3)))
    assert x.data_ptr() not in set(frame.address)
    assert set(frame.op_type) == {"store"}


def test_numbers_and_missing_tensors_give_no_rows():
    x = torch.randn(2, 3)
    frame = traced(lambda: (x + 1, 2.5 * x, nn.functional.layer_norm(x, (3,))))
    assert list(frame.op_type).count("load") == 3
    assert set(frame[frame.op_type == "load"].address) == {x.data_ptr()}


def test_each_tensor_of_a_list_is_loaded():
    parts = [torch.randn(2, 3) for _ in range(3)]
    kept = []
    frame = traced(lambda: kept.append(torch.cat(parts)))
    assert moves(frame) == [*(whole("load", one) for one in parts), whole("store", kept[0])]


def test_each_tensor_of_a_list_of_results_is_stored():
    parts = [torch.randn(3), torch.randn(4)]
    kept = []
    frame = traced(lambda: kept.extend(torch._foreach_add(parts, 1.0)))
    assert moves(frame)[2:] == [whole("store", one) for one in kept]


def test_each_of_several_results_is_stored():
    x = torch.randn(4, 8)
    kept = []
    frame = traced(lambda: kept.append(torch.ops.aten.native_layer_norm(x, [8], None, None, 1e-5)))
    assert moves(frame) == [whole("load", x), *(whole("store", one) for one in kept[0])]


def test_tensors_of_literals_are_stored_when_they_are_made():
    kept = []
    frame = traced(lambda: kept.append(torch.tensor([1, 2, 3])))
    assert whole("store", kept[0]) in moves(frame)


def test_integer_tensors_are_traced_too():
    ids = torch.arange(6)
    kept = []
    frame = traced(lambda: kept.append(ids == 3))
    assert moves(frame) == [("load", ids.data_ptr(), 48), ("store", kept[0].data_ptr(), 6)]


def test_an_operator_raises_the_same_error_as_without_a_tracer():
    def refused(tracing) -> tuple[str, object]:
        with tracing, pytest.raises(IndexError) as caught:
            torch.zeros(3, 4)[torch.tensor([0.5])]
        return str(caught.value), caught.value.__context__

    with TorchTracer() as one:
        assert refused(one.thread()) == refused(contextlib.nullcontext())
        assert one._session.about()["taken_whole"] == {}


def test_operators_on_tensors_without_an_address_are_counted(tmp_path):
    sparse = torch.eye(3).to_sparse()
    with TorchTracer(tmp_path / "t.parquet") as one:
        with one.thread():
            sparse.to_dense().neg()
        assert list(rows_of(one).symbol) == ["aten::_to_dense", "aten::neg",
                                                             "aten::neg"]  # fmt: skip
        meta = one.stop()
    assert "not in the trace: aten::_to_dense (1)" in meta.warnings[0]


class Quantised(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(64, 128)
        self.cell = nn.LSTMCell(8, 4)
        self.lstm = nn.LSTM(8, 4)
        self.plain = nn.Linear(128, 3)

    def forward(self, x):
        return self.plain(self.linear(x))


@pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated")
def test_packed_weights_are_counted_and_warned_of(tmp_path):
    quantize = pytest.importorskip("torch.ao.quantization").quantize_dynamic
    model = quantize(Quantised(), {nn.LSTM, nn.LSTMCell, "linear"})
    linear = 64 * 128 + 4 * 128  # int8 weights, and a float32 bias
    cells = 2 * (16 * (8 + 4) + 2 * 4 * 16)
    one, path = TorchTracer(), tmp_path / "torch_trace.parquet"
    one.start([os.getpid()], tmp_path)
    with torch.no_grad():
        with pytest.warns(RuntimeWarning, match="4 packed weights .* are not in the trace"):
            attached = one.attach(model)
        attached.detach()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with one.attach(model):  # the second time it does not warn
                model(torch.randn(1, 64))
    (told,) = one.stop().warnings
    about = json.loads(pq.read_schema(path).metadata[META_KEY])
    assert (about["packed_weights"], about["packed_weight_bytes"]) == (4, linear + cells)
    assert told.startswith(f"4 packed weights of {linear + cells:,} bytes")
    frame = pq.read_table(path).to_pandas()
    read = frame[(frame.region_type == "weight") & (frame.phase == "generation")]
    assert set(read.address) == {one.data_ptr() for one in model.plain.parameters()}


def test_tensors_without_data_leave_no_rows():
    assert moves(traced(lambda: torch.ones(3, device="meta") + 1)) == []
    assert moves(traced(lambda: torch.randn(0, 5).neg())) == []


@pytest.mark.parametrize("architecture", ["GPT2", "Llama"])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_training_gives_the_same_gradients_as_without_a_tracer(architecture, attention):
    torch.manual_seed(0)
    sizes = {
        "vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
        "bos_token_id": None, "eos_token_id": None, "attn_implementation": attention,
    }  # fmt: skip
    config = getattr(transformers, f"{architecture}Config")(**sizes)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    ids = torch.randint(97, (2, 8))

    def gradients():
        model.zero_grad()
        model(ids, labels=ids).loss.backward()
        return [p.grad.clone() for p in model.parameters()]

    expected = gradients()
    with TorchTracer() as one:
        with one.attach(model):
            found = gradients()
            assert model.lm_head.weight.data.data_ptr() == model.lm_head.weight.data_ptr()
        frame = rows_of(one)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert {"weight", "activation"} <= set(frame.region_type)
    assert frame.symbol.str.contains("backward").any()


def test_inference_mode_gives_the_same_rows():
    """Only their order may differ: the bias is last in aten::linear, and first in aten::addmm."""
    layer = nn.Linear(16, 24)
    x = torch.randn(2, 5, 16)

    def work():
        y = torch.matmul(x, x.transpose(1, 2)).softmax(-1)
        layer(x.reshape(10, 16).to(torch.float32)).to(torch.float64)
        return nn.functional.scaled_dot_product_attention(x, x, y @ x).flatten().mean()

    seen = []
    for guard in (torch.no_grad, torch.inference_mode):
        with TorchTracer() as one, guard():
            with one.attach(layer):
                work()
            frame = rows_of(one)
        seen.append(sorted(zip(frame.op_type, frame.region_type, frame.length_bytes, strict=True)))
    assert seen[0] == seen[1]
    assert len(seen[0]) > 15


def test_a_linear_layer_that_needs_several_kernels_gives_rows_for_each():
    layer, x = nn.Linear(16, 24), torch.randn(5, 2, 16).transpose(0, 1)
    with TorchTracer() as one, torch.inference_mode():
        with one.thread():
            layer(x)
        assert set(rows_of(one).symbol) == {"aten::bmm", "aten::add.Tensor"}
        with one.thread():
            layer(x.contiguous())
        assert list(rows_of(one).symbol)[-4:] == ["aten::linear"] * 4
