"""The torch tracer: the rows that each kind of operator leaves, and the lifetime of regions."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import resource
import threading
import time
import warnings
from collections import Counter

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from llm_instrumentation.errors import InvalidArgumentError, InvalidStateError
from llm_instrumentation.mrm import TraceLabeller
from llm_instrumentation.mrm.collector import CollectorUnavailableError, TorchTracer
from llm_instrumentation.mrm.collector.torch import recorder, regions
from llm_instrumentation.mrm.collector.torch.layout import pieces_of
from llm_instrumentation.mrm.collector.torch.recorder import BLOCK_ROWS
from llm_instrumentation.mrm.collector.torch.trace import META_KEY
from llm_instrumentation.mrm.schema import ARROW_SCHEMA, KIND_KEY, Kind, Phase, kind_of
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode


@pytest.fixture(autouse=True, params=["C", "Python"])
def path(request, monkeypatch):
    """Runs each test with the recorder in C, if this torch allows it, and with its Python twin."""
    if request.param == "Python":
        monkeypatch.setattr(recorder, "view_in_c", lambda: 0)
    elif not recorder.view_in_c():
        pytest.skip("this torch or interpreter does not show tensors to C")


@pytest.fixture
def tracer():
    with TorchTracer() as one:
        yield one


def rows_of(tracer: TorchTracer) -> pd.DataFrame:
    return tracer.reader().read_all().to_pandas()


def traced(operation, **options) -> pd.DataFrame:
    """Runs a function without arguments under a tracer, and returns its rows."""
    with TorchTracer(**options) as one, torch.no_grad():
        with one.thread():
            operation()
        return rows_of(one)


def moves(frame: pd.DataFrame) -> list[tuple[str, int, int]]:
    """(load or store, address, bytes) of each row."""
    return list(zip(frame.op_type, frame.address, frame.length_bytes, strict=True))


def whole(op: str, tensor: torch.Tensor) -> tuple[str, int, int]:
    return op, tensor.data_ptr(), tensor.nbytes


# What operators move.


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


def test_only_the_rows_of_an_embedding_that_are_looked_up_are_read():
    table, ids = torch.randn(100, 16), torch.tensor([7, 8, 3, 8])
    kept = []
    frame = traced(lambda: kept.append(nn.functional.embedding(ids, table)))
    row = 16 * 4
    assert moves(frame) == [
        ("load", table.data_ptr() + 3 * row, row),
        ("load", table.data_ptr() + 7 * row, 2 * row),
        whole("load", ids),
        whole("store", kept[0]),
    ]


@pytest.mark.parametrize(
    "choose",
    [
        lambda x, i: x[i],
        lambda x, i: x.index_select(0, i % 10),
    ],
)
def test_only_chosen_rows_are_read(choose):
    x, index = torch.randn(10, 4), torch.tensor([2, -1])
    frame = traced(lambda: choose(x, index))
    first, last = x.data_ptr() + 2 * 16, x.data_ptr() + 9 * 16
    assert [one for one in moves(frame) if one[1] in (first, last, x.data_ptr())] == [
        ("load", first, 16), ("load", last, 16),
    ]  # fmt: skip


@pytest.mark.parametrize(
    "write",
    [
        lambda cache, new, at: cache.index_copy_(2, at, new),
        lambda cache, new, at: cache.__setitem__((slice(None), slice(None), at), new),
    ],
)
def test_only_the_slots_of_a_static_cache_that_are_filled_are_written(write):
    cache, new = torch.zeros(1, 2, 8, 4), torch.randn(1, 2, 3, 4)
    frame = traced(lambda: write(cache, new, torch.tensor([5, 6, 7])))
    stores = frame[(frame.op_type == "store") & (frame.symbol != "aten::lift_fresh")]
    head, slot = 8 * 16, 16
    assert moves(stores) == [
        ("store", cache.data_ptr() + 5 * slot, 3 * slot),
        ("store", cache.data_ptr() + head + 5 * slot, 3 * slot),
    ]
    assert cache.data_ptr() not in set(frame[frame.op_type == "load"].address)


@pytest.mark.parametrize(
    ("choose", "rows"),
    [
        (lambda table, at: nn.functional.embedding(at, table), [2, 7]),
        (lambda table, at: table.index_copy_(0, at, torch.ones(2, 4)), [2, 7]),
        (lambda table, at: table.gather(0, at[:, None]), None),
        (lambda table, at: table.masked_fill_(torch.arange(9)[:, None] == 7, 1.0), [7]),
    ],
)
def test_positions_on_a_device_are_copied_from_it(choose, rows, monkeypatch):
    """Small tables too: that a slot of a cache is written must not seem to write the cache."""
    table, at, copied = torch.zeros(9, 4), torch.tensor([2, 7]), []
    monkeypatch.setattr(torch.Tensor, "is_cpu", property(lambda self: False), raising=False)
    monkeypatch.setattr(torch.Tensor, "cpu", lambda self: copied.append(self) or self)
    frame = traced(lambda: choose(table, at))
    monkeypatch.undo()
    own = frame[frame.address.between(table.data_ptr(), table.data_ptr() + table.nbytes - 1)]
    length = 4 if rows is None else 16
    assert [(one[1] - table.data_ptr(), one[2]) for one in moves(own)] == [
        (16 * row, length) for row in rows or [2, 7]
    ]
    assert len(copied) == 1


def test_adding_to_rows_reads_the_table_too():
    table, at = torch.zeros(6, 4), torch.tensor([1])
    frame = traced(lambda: table.index_put_([at], torch.ones(1, 4), accumulate=True))
    row = table.data_ptr() + 16
    assert ("load", row, 16) in moves(frame)
    assert ("store", row, 16) in moves(frame)
    assert whole("load", table) not in moves(frame)


def loaded(operation, tensor) -> tuple[int, int]:
    """The number of bytes of a tensor that are loaded, and the number of rows."""
    frame = traced(operation)
    own = frame[(frame.op_type == "load") & frame.address.between(
        tensor.data_ptr(), tensor.data_ptr() + tensor.untyped_storage().nbytes() - 1
    )]  # fmt: skip
    return int(own.length_bytes.sum()), len(own)


@pytest.mark.parametrize(
    ("table", "wanted"),
    [
        (torch.randn(1, 8).expand(16, 8), 32),
        (torch.randn(40).unfold(0, 8, 3), 14 * 4),
        (torch.randn(40).as_strided((10, 8), (3, 1)), 14 * 4),
    ],
)
def test_chosen_rows_that_share_memory_count_it_once(table, wanted):
    index = torch.tensor([0, 2])
    for choose in (lambda: table.index_select(0, index), lambda: table[index]):
        assert loaded(choose, table)[0] == wanted


def test_very_many_chosen_pieces_are_one_row_from_the_first_byte_to_the_last():
    table, index = torch.zeros(70_000, 8), torch.tensor([1, 3, 6])
    assert loaded(lambda: table.index_select(1, index), table) == (table.nbytes - 2 * 4, 1)
    index = torch.arange(0, 8, 2)
    assert loaded(lambda: table.index_select(1, index), table) == (table.nbytes - 4, 1)
    table, index = torch.zeros(70_000, 16), torch.arange(0, 70_000, 2)  # rows of 64 bytes
    assert loaded(lambda: table[index], table) == (35_000 * 64, 35_000)


def test_old_values_are_loaded_only_if_the_result_includes_them():
    table, source = torch.ones(2, 4), torch.ones(2, 4)
    index = torch.tensor([[0, 1, 1, 0]])
    for include, wanted in ((True, 16), (False, 0)):
        assert loaded(
            lambda include=include: table.scatter_reduce_(
                0, index, source, "sum", include_self=include
            ),
            table,
        )[0] == wanted  # fmt: skip


def test_a_bag_ends_at_its_last_offset():
    """With include_last_offset, rows from the last offset on belong to no bag and are not read."""
    table, index = torch.randn(10, 4), torch.arange(6)
    look = nn.functional.embedding_bag
    offsets = torch.tensor([0, 2, 4])
    assert loaded(lambda: look(index, table, offsets, mode="sum"), table)[0] == 6 * 16
    assert loaded(
        lambda: look(index, table, offsets, mode="sum", include_last_offset=True), table
    )[0] == 4 * 16  # fmt: skip


@pytest.mark.parametrize("holds", [True, False])
def test_a_mask_without_dimensions_chooses_all_or_nothing(holds):
    x, mask = torch.zeros(()), torch.tensor(holds)
    frame = traced(lambda: x.masked_fill_(mask, 1.0))
    assert (whole("store", x) in moves(frame)) == holds


def test_an_operator_raises_the_same_error_as_without_a_tracer():
    def refused(tracing) -> tuple[str, object]:
        with tracing, pytest.raises(IndexError) as caught:
            torch.zeros(3, 4)[torch.tensor([0.5])]
        return str(caught.value), caught.value.__context__

    with TorchTracer() as one:
        assert refused(one.thread()) == refused(contextlib.nullcontext())
        assert one._session.about()["taken_whole"] == {}


def test_a_scattered_tensor_is_a_row_for_each_piece():
    x = torch.randn(4, 10)
    kept = []
    frame = traced(lambda: kept.append(x[:, 2:5].neg()))
    loads = moves(frame[frame.op_type == "load"])
    assert loads == [("load", x.data_ptr() + (10 * row + 2) * 4, 12) for row in range(4)]


def test_too_many_pieces_are_one_row_from_the_first_byte_to_the_last():
    x = torch.randn(4, 10)
    frame = traced(lambda: x[:, 2:5].neg(), max_runs=3)
    span = (3 * 10 + 3) * 4
    assert moves(frame)[0] == ("load", x.data_ptr() + 8, span)


def test_broadcast_elements_count_once():
    x = torch.randn(1, 6)
    frame = traced(lambda: torch.ops.aten.neg(x.expand(50, 6)))
    assert moves(frame)[0] == ("load", x.data_ptr(), 24)


def test_windows_that_overlap_count_their_elements_once():
    x = torch.randn(3, 5)[:, :4]
    frame = traced(lambda: torch.ops.aten.neg(x.unfold(0, 2, 1)))
    loads = moves(frame[frame.op_type == "load"])
    assert loads == [("load", x.data_ptr() + 20 * row, 16) for row in range(3)]


@given(
    st.lists(st.tuples(st.integers(1, 4), st.integers(0, 3)), min_size=1, max_size=4),
    st.sampled_from([1, 2, 4, 8]),
)
def test_pieces_cover_the_elements_of_a_tensor_and_nothing_else(dims, itemsize):
    """The layouts are those of slices and permutations: each stride spans the inner dimensions."""
    shape, strides, inside = [], [], 1
    for size, gap in dims:
        shape.append(size)
        strides.append(inside)
        inside *= size + gap
    order = np.random.default_rng(inside).permutation(len(shape))
    shape, strides = [shape[k] for k in order], [strides[k] for k in order]

    pieces = pieces_of(tuple(shape), tuple(strides), itemsize, 1 << 20)
    covered = Counter(byte for first, count in pieces for byte in range(first, first + count))
    wanted = {
        int(np.dot(place, strides)) * itemsize + byte
        for place in np.ndindex(*shape)
        for byte in range(itemsize)
    }
    assert covered == Counter(wanted)


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


# Regions.


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


class OldCache(nn.Module):
    """Returns its cache as pairs of tensors, like models before cache classes existed."""

    def forward(self, input_ids, past_key_values=None):
        new = input_ids[..., None].float().expand(-1, -1, 4)[:, None] + 1
        if past_key_values is not None:
            new = torch.cat([past_key_values[0][0], new], dim=2)
        return new.sum(), ((new, new * 2),)


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


# Together with other users of dispatch.


def test_errors_pass_through_and_tracing_goes_on():
    x = torch.randn(2, 3)

    def work():
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            x @ x
        x.neg()

    assert set(traced(work).symbol) == {"aten::neg"}


class Counting(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


def test_other_dispatch_modes_see_the_same_operators():
    x, index = torch.randn(3, 3), torch.tensor([1])

    def work():
        torch.nn.functional.embedding(index, x).reshape(3).add_(1)

    with Counting() as alone:
        work()
    with Counting() as around, TorchTracer() as one, one.thread():
        work()
        inner_rows = len(rows_of(one))
    with TorchTracer() as one, one.thread():
        with Counting() as inside:
            work()
        assert len(rows_of(one)) == inner_rows > 0
    assert alone.seen == around.seen == inside.seen


def test_leaving_in_the_wrong_order_is_an_error():
    with TorchTracer() as one:
        attached = one.attach(nn.Linear(2, 2))
        with Counting():
            with pytest.raises(InvalidStateError, match="Counting was entered after the tracer"):
                attached.detach()
        attached.detach()


class Doubled(torch.Tensor):
    """A subclass whose memory is that of another tensor."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner):
        made = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        plain = [one.inner if isinstance(one, Doubled) else one for one in args]
        return Doubled(func(*plain, **(kwargs or {})))


def test_the_inner_tensors_of_subclasses_are_traced():
    x = torch.randn(4)
    kept = []
    frame = traced(lambda: kept.append(Doubled(x).neg()))
    assert moves(frame) == [whole("load", x), whole("store", kept[0].inner)]


def test_functional_transforms_are_traced_as_they_run():
    x, w = torch.randn(5, 3), torch.randn(3)
    kept = []
    frame = traced(lambda: kept.append(torch.vmap(torch.dot, (0, None))(x, w)))
    torch.testing.assert_close(kept[0], x @ w)
    assert whole("load", x) in moves(frame)


def test_fake_tensors_leave_no_rows():
    from torch._subclasses import FakeTensorMode

    def work():
        with FakeTensorMode():
            torch.randn(3) @ torch.randn(3)

    assert moves(traced(work)) == []


def test_sparse_parameters_leave_no_rows():
    parameter = nn.Parameter(torch.eye(3).to_sparse(), requires_grad=False)
    assert moves(traced(parameter.detach)) == []


def test_a_model_can_be_exported_meanwhile():
    """The tracer accepts the symbolic sizes of an export, which are no numbers."""
    layer, x = nn.Linear(4, 3), torch.randn(5, 4)
    with TorchTracer() as one, one.thread():
        exported = torch.export.export(
            layer, (x,), dynamic_shapes={"input": {0: torch.export.Dim("n", min=2, max=64)}}
        )
        assert torch.equal(exported.module()(x), layer(x))
        assert set(rows_of(one).symbol) >= {"aten::addmm"}


def test_backward_passes_are_traced():
    weight = torch.randn(3, requires_grad=True)
    with TorchTracer() as one:
        with one.thread():
            (weight * 2).sum().backward()
        frame = rows_of(one)
    assert weight.grad.tolist() == [2, 2, 2]
    assert whole("store", weight.grad) in moves(frame)


def test_other_threads_are_traced_only_if_they_ask():
    x = torch.randn(4)
    with TorchTracer() as one:

        def asks():
            with one.thread():
                x.neg()

        def asks_not():
            x.abs()

        with one.thread():
            for work in (asks, asks_not):
                thread = threading.Thread(target=work)
                thread.start()
                thread.join()
            x.sin()
        frame = rows_of(one)
    assert set(frame.symbol) == {"aten::neg", "aten::sin"}
    assert frame.thread_id.nunique() == 2
    loads = frame[frame.op_type == "load"]
    assert loads.region_id.nunique() == 1, "both threads read the same region"


def test_many_threads_at_once():
    start = threading.Barrier(4)
    with TorchTracer() as one:

        def work():
            with one.thread():
                x = torch.randn(16)
                start.wait()
                for _ in range(BLOCK_ROWS):
                    x = x.neg()

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        frame = rows_of(one)
    negations = frame[frame.symbol == "aten::neg"]
    assert len(negations) == 4 * 2 * BLOCK_ROWS
    stores = negations[negations.op_type == "store"]
    assert stores.region_id.is_unique
    for _, mine in negations.groupby("thread_id"):
        # Each step loads the tensor that the step before stored.
        made = mine[mine.op_type == "store"].region_id.to_numpy()
        read = mine[mine.op_type == "load"].region_id.to_numpy()
        assert (made[:-1] == read[1:]).all()


def test_detaching_in_another_thread_is_refused():
    with TorchTracer() as one:
        attached = one.attach(nn.Linear(2, 2))
        errors = []

        def detach():
            try:
                attached.detach()
            except InvalidStateError as error:
                errors.append(str(error))

        thread = threading.Thread(target=detach)
        thread.start()
        thread.join()
        assert "ends in that thread" in errors[0]


def test_sampling_traces_a_share_of_the_operators_with_the_same_labels():
    model = nn.Linear(8, 8, bias=False)
    x = torch.randn(1, 8)
    with TorchTracer(sample_every=10) as one, torch.no_grad():
        with one.load():
            for _ in range(50):
                model.weight.zero_()
        with one.attach(model):
            for _ in range(5000):
                model(x)
        frame = rows_of(one)
    assert len(frame[frame.phase == "weight_load"]) == 50, "the load is traced in full"
    sampled = frame[frame.phase == "generation"]
    assert 5000 / 10 * 0.8 < sampled.timestamp_ns.nunique() < 5000 / 10 * 1.2
    assert set(sampled[sampled.address == model.weight.data_ptr()].region_type) == {"weight"}
    assert len(sampled) == 3 * sampled.timestamp_ns.nunique(), "an operator is sampled whole"


# Files, and the collector.


def test_the_file_is_a_trace(tmp_path):
    path = tmp_path / "here" / "trace.parquet"
    model = nn.Linear(2, 2)
    with TorchTracer(path, run_id="a-run") as one, torch.no_grad():
        with one.attach(model):
            model(torch.randn(1, 2))
        before = one.reader().read_all()
    table = pq.read_table(path)
    assert [p.name for p in path.parent.iterdir()] == ["trace.parquet"]
    assert table.to_pandas().equals(before.to_pandas())
    assert before.schema.equals(ARROW_SCHEMA)
    schema = pq.read_schema(path)
    assert kind_of(schema) is Kind.ACCESSES
    assert schema.metadata[KIND_KEY] == b"accesses"
    assert set(before["run_id"].to_pylist()) == {"a-run"}
    about = json.loads(schema.metadata[META_KEY])
    assert about["sample_every"] == 1
    assert about["weight_storages"] == 2
    assert one.reader().read_all().equals(table.cast(before.schema))


def test_a_trace_without_rows_is_written_too(tmp_path):
    with TorchTracer(tmp_path / "t.parquet") as one, one.thread():
        pass
    assert pq.read_table(tmp_path / "t.parquet").num_rows == 0


def test_closing_twice_does_nothing_and_an_unused_tracer_has_no_trace():
    one = TorchTracer()
    one.close()
    with pytest.raises(InvalidStateError, match="has written no trace"):
        one.reader()
    with one.thread():
        torch.ones(1)
    one.close()
    one.close()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sample_every": 0}, "sample_every = 0"),
        ({"max_runs": 0}, "max_runs = 0"),
        ({"kv_regions": "page"}, "kv_regions = 'page'"),
    ],
)
def test_invalid_options_are_refused(options, message):
    with pytest.raises(InvalidArgumentError, match=message):
        TorchTracer(**options)


def test_the_model_goes_on_when_the_disk_is_full(tmp_path):
    x = torch.randn(4)
    one = TorchTracer(tmp_path / "t.parquet")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with one.thread(), torch.no_grad():
        for _ in range(BLOCK_ROWS):
            y = x.neg()
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
        try:
            for _ in range(BLOCK_ROWS):
                y = x.neg()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert y.tolist() == (-x).tolist()
    with pytest.raises(OSError, match="File too large"):
        one.close()
    assert 0 < pq.read_metadata(tmp_path / "t.parquet").num_rows < 4 * BLOCK_ROWS


def test_labels_learnt_while_the_disk_is_full_are_written(tmp_path):
    """A region that is found to be a weight while the disk is full is labelled in earlier rows."""
    model = nn.Linear(2, 2, bias=False)
    one = TorchTracer(tmp_path / "t.parquet")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with one.thread(), torch.no_grad():
        model.weight.data.neg()
        one.reader()  # writes the rows so far
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
        try:
            with one.attach(model):
                for _ in range(BLOCK_ROWS):
                    model(torch.ones(1, 2))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    with pytest.raises(OSError, match="File too large"):
        one.close()
    assert os.listdir(tmp_path) == ["t.parquet"]
    (first, *_) = pq.read_table(tmp_path / "t.parquet").to_pylist()
    assert (first["symbol"], first["region_type"]) == ("aten::neg", "weight")


def test_a_forked_child_adds_nothing(tmp_path):
    x = torch.randn(4)
    with TorchTracer(tmp_path / "t.parquet") as one:
        with one.thread():
            x.neg()
            with warnings.catch_warnings():
                # The test run has threads, so Python warns of fork.
                warnings.simplefilter("ignore", DeprecationWarning)
                child = os.fork()
            if child == 0:
                for _ in range(BLOCK_ROWS):
                    x.neg()
                os._exit(0)
            assert os.waitpid(child, 0)[1] == 0
            x.neg()
        assert len(rows_of(one)) == 4


def test_as_a_collector_the_tracer_traces_from_start_to_stop(tmp_path):
    one = TorchTracer()
    one.start([os.getpid()], tmp_path / "raw")
    with torch.no_grad():
        model = nn.Linear(2, 2)
        one.attach(model)
        middle = time.monotonic_ns()
        model(torch.randn(1, 2))
    with pytest.raises(InvalidStateError, match="is running"):
        one.start([os.getpid()], tmp_path)
    meta = one.stop()
    torch.ones(3).neg()  # no longer traced

    boundaries = [
        {"phase": "weight_load", "start_ns": 0, "end_ns": middle},
        {"phase": "generation", "start_ns": middle, "end_ns": time.monotonic_ns()},
    ]
    frame = one.trace("the-run", boundaries).read_all().to_pandas()
    assert set(frame.run_id) == {"the-run"}
    assert (
        frame.phase == np.where(frame.timestamp_ns < middle, *("weight_load", "generation"))
    ).all()
    weights = frame[frame.region_type == "weight"]
    assert set(weights[weights.op_type == "store"].phase) == {"weight_load"}
    assert meta.output_file == str(tmp_path / "raw" / "torch_trace.parquet")
    assert meta.output_file_size_bytes == os.path.getsize(meta.output_file)
    assert (meta.collector_type, meta.used, meta.warnings) == ("torch", True, [])
    assert meta.extra["rows"] == len(frame)
    assert meta.extra["ns_per_operator_at_least"] > 0
    with pytest.raises(InvalidStateError, match="not running"):
        one.stop()


def test_with_trace_load_off_each_weight_gets_one_store(tmp_path):
    model = nn.Linear(2, 2)
    one = TorchTracer(trace_load=False)
    one.start([os.getpid()], tmp_path)
    torch.ones(3).neg()  # before the model is attached: not traced
    one.attach(model)
    one.stop()
    frame = one.trace("a").read_all().to_pandas()
    assert list(frame.symbol) == ["weight_load"] * 2


def test_the_collector_can_be_started_again(tmp_path):
    one = TorchTracer()
    for run in ("first", "second"):
        one.start([os.getpid()], tmp_path / run)
        torch.ones(3).neg()
        one.stop()
        assert len(one.trace(run).read_all()) == 3


def test_other_processes_are_refused(tmp_path):
    with pytest.raises(CollectorUnavailableError, match="traces models in its own process"):
        TorchTracer().start([1], tmp_path)


def test_the_labeller_keeps_the_labels_of_the_tracer():
    model = OldCache()
    with TorchTracer() as one, torch.no_grad():
        with one.attach(model):
            model(torch.ones(1, 5))
        table = one.reader().read_all()
    labelled = TraceLabeller().label_table(table).read_all().to_pandas()
    for column in ("region_type", "region_id"):
        assert list(labelled[column]) == list(table[column].to_pylist())
