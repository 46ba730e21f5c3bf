"""Of tensors that are read or written in part, the torch tracer records the bytes of that part."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from llm_instrumentation.mrm.collector.torch.layout import pieces_of
from torch import nn
from torch_traces import moves, traced, whole


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
