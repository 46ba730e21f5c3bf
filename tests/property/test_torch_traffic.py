"""The torch tracer records exactly the bytes that operators read and write.

Hypothesis draws sequences of operators. For each operator the test lists the elements that it
reads and writes by definition, and compares their bytes with the traced rows. With
``--hypothesis-profile long --timeout 0`` the test runs for some minutes.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from llm_instrumentation.mrm.collector import TorchTracer
from llm_instrumentation.mrm.collector.torch import recorder
from torch import Tensor

aten = torch.ops.aten

Place = tuple[int, ...]
Bytes = Counter[tuple[str, int, int]]  # load or store, address, number of the storage


def places(shape: Iterable[int]) -> Iterator[Place]:
    return itertools.product(*(range(size) for size in shape))


def every(tensor: Tensor) -> set[Place]:
    return set(places(tensor.shape))


def broadcast(tensor: Tensor, place: Place) -> Place:
    """The place in ``tensor`` that a place of the broadcast result is read from."""
    own = place[len(place) - tensor.dim() :]
    return tuple(0 if size == 1 else at for at, size in zip(own, tensor.shape, strict=True))


def in_order(tensor: Tensor, number: int) -> Place:
    """The place of an element by its number in row-major order."""
    return list(places(tensor.shape))[number]


class Step:
    """Runs one operator under the tracer and holds the bytes that it should read and write."""

    def __init__(self, tracer: TorchTracer, storages: Storages) -> None:
        self._tracer, self._storages = tracer, storages
        self.moved: Bytes = Counter()
        self.made: list[Tensor] = []
        self.began = self.ended = 0

    def run(self, operator: Callable[[], Any]) -> Any:
        with self._tracer.thread(), torch.no_grad():
            self.began = time.monotonic_ns()
            out = operator()
            self.ended = time.monotonic_ns()
        return out

    def _move(self, op: str, tensor: Tensor, chosen: Iterable[Place] | None) -> None:
        storage = self._storages.number(tensor)
        touched = {
            tensor.data_ptr()
            + sum(at * stride for at, stride in zip(place, tensor.stride(), strict=True))
            * tensor.itemsize
            + byte
            for place in (every(tensor) if chosen is None else set(chosen))
            for byte in range(tensor.itemsize)
        }
        self.moved.update((op, address, storage) for address in touched)

    def reads(self, tensor: Tensor, chosen: Iterable[Place] | None = None) -> None:
        self._move("load", tensor, chosen)

    def writes(self, tensor: Tensor, chosen: Iterable[Place] | None = None) -> None:
        self._move("store", tensor, chosen)

    def gives(self, tensor: Tensor, chosen: Iterable[Place] | None = None) -> None:
        """The operator writes these elements of a new tensor, which later operators may use."""
        self.writes(tensor, chosen)
        self.made.append(tensor)


class Storages:
    """Gives each storage a number.

    A weak reference keeps the address of a dead storage, so no new storage gets the same number.
    """

    def __init__(self) -> None:
        self._numbers: dict[int, int] = {}

    def number(self, tensor: Tensor) -> int:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._numbers:
            self._numbers[storage._weak_ref()] = len(self._numbers)
        return self._numbers[storage._cdata]

    def close(self) -> None:
        for name in self._numbers:
            torch.UntypedStorage._free_weak_ref(name)


class Program:
    """The tensors of a random program, and the operators that Hypothesis chooses from."""

    def __init__(self, data: st.DataObject) -> None:
        self.draw = data.draw
        self.tensors: list[Tensor] = []

    # Draw arguments.

    def number(self, least: int, most: int) -> int:
        return self.draw(st.integers(least, most))

    def any(self) -> Tensor:
        return self.draw(st.sampled_from(self.tensors)) if self.tensors else self.fresh()

    def shape(self, dims: int | None = None) -> list[int]:
        dims = self.number(0, 3) if dims is None else dims
        return self.draw(st.lists(st.integers(1, 4), min_size=dims, max_size=dims))

    def fresh(self, *shape: int) -> Tensor:
        """A tensor of zeros; it may be a part of a larger tensor, and transposed."""
        size = list(shape) or self.shape()
        larger = [one + self.number(0, 1) for one in size]
        if len(size) > 1 and self.draw(st.booleans()):
            whole = torch.zeros(*reversed(larger)).permute(*reversed(range(len(larger))))
        else:
            whole = torch.zeros(larger)
        for dim, (wanted, has) in enumerate(zip(size, larger, strict=True)):
            whole = whole.narrow(dim, self.number(0, has - wanted), wanted)
        return whole

    def index(self, size: int, *shape: int, least: int | None = None) -> Tensor:
        count = torch.Size(shape).numel()
        low = -size if least is None else least
        values = self.draw(st.lists(st.integers(low, size - 1), min_size=count, max_size=count))
        kind = torch.int64 if least == 0 else self.draw(st.sampled_from([torch.int64, torch.int32]))
        return torch.tensor(values, dtype=kind).reshape(shape)

    def mask(self, *shape: int) -> Tensor:
        count = torch.Size(shape).numel()
        values = self.draw(st.lists(st.booleans(), min_size=count, max_size=count))
        return torch.tensor(values, dtype=torch.bool).reshape(shape)

    def writable(self) -> Tensor:
        """A floating-point tensor in which no two elements share memory."""
        found = [one for one in self.tensors if one.is_floating_point() and _is_apart(one)]
        return self.draw(st.sampled_from(found)) if found else self.fresh()

    # Operators that make views, and the freeing of tensors.

    def look(self, step: Step) -> None:
        x = self.any()
        how = self.draw(st.sampled_from(["expand", "narrow", "permute", "unfold", "view"]))
        if how == "expand":
            y = step.run(lambda: x.unsqueeze(0).expand(3, *x.shape))
        elif x.dim() == 0:
            y = step.run(lambda: x.view(1))
        elif how == "narrow":
            first = self.number(0, x.shape[-1] - 1)
            y = step.run(lambda: x[..., first:])
        elif how == "permute":
            y = step.run(lambda: x.permute(*reversed(range(x.dim()))))
        elif how == "unfold":
            y = step.run(lambda: x.unfold(0, min(2, x.shape[0]), 1))
        else:
            y = step.run(lambda: x.unsqueeze(-1))
        if y.dim() <= 3:
            self.tensors.append(y)

    def free(self, step: Step) -> None:
        if self.tensors:
            self.tensors.pop(self.number(0, len(self.tensors) - 1))

    # Operators that read all of each argument.

    def elementwise(self, step: Step) -> None:
        x = self.any()
        kind = self.draw(st.sampled_from(["neg", "add", "clone", "mul_", "copy_", "zero_", "sum"]))
        if kind in ("mul_", "copy_", "zero_"):
            x = self.writable()
            if kind == "copy_":
                source = self.fresh(*x.shape) if x.dim() else torch.ones(())
                step.run(lambda: x.copy_(source))
                step.reads(source)
            elif kind == "mul_":
                step.run(lambda: x.mul_(1))
                step.reads(x)
            else:
                step.run(x.zero_)
            step.writes(x)
            return
        step.reads(x)
        if kind == "add":
            step.reads(x)
            step.gives(step.run(lambda: x + x))
        else:
            operator = {"neg": torch.neg, "clone": torch.clone, "sum": torch.sum}[kind]
            step.gives(step.run(lambda: operator(x)))

    def reshape(self, step: Step) -> None:
        x = self.any()
        flat = step.run(lambda: x.reshape(-1))
        if flat.data_ptr() != x.data_ptr() or flat.untyped_storage()._cdata != (
            x.untyped_storage()._cdata
        ):
            step.reads(x)
            step.gives(flat)

    def cat(self, step: Step) -> None:
        x = self.fresh(*self.shape(2))
        step.gives(step.run(lambda: torch.cat([x, x])))
        step.reads(x)
        step.reads(x)

    # Operators that read chosen elements.

    def embedding(self, step: Step) -> None:
        table = self.fresh(4, 3)
        index = self.index(4, *self.shape(self.number(0, 2)), least=0)
        step.gives(step.run(lambda: torch.nn.functional.embedding(index, table)))
        step.reads(index)
        step.reads(table, ((int(row), at) for row in index.flatten() for at in range(3)))

    def embedding_bag(self, step: Step) -> None:
        table, index = self.fresh(4, 3).contiguous(), self.index(4, 5, least=0)
        offsets = torch.tensor([0, self.number(0, 5)])
        padding = self.number(-1, 3)
        out = step.run(
            lambda: aten._embedding_bag_forward_only(
                table, index, offsets, False, 0, False, None, False, padding
            )
        )
        step.reads(index)
        step.reads(offsets)
        rows = {int(row) for row in index} - {padding}
        step.reads(table, ((row, at) for row in rows for at in range(3)))
        for one in out:
            step.gives(one)

    def index_rows(self, step: Step) -> None:
        x = self.fresh(3, 4, 2)
        dim = self.number(0, 2)
        at = self.index(x.shape[dim], *self.shape(self.number(1, 2)))
        where: list[Any] = [slice(None)] * dim
        step.gives(step.run(lambda: x[(*where, at)]))
        step.reads(at)
        rows = {int(one) % x.shape[dim] for one in at.flatten()}
        step.reads(x, (place for place in every(x) if place[dim] in rows))

    def index_elements(self, step: Step) -> None:
        x = self.fresh(3, 4, 2)
        rows, columns = self.index(3, 2, 1), self.index(4, 3)
        step.gives(step.run(lambda: aten.index(x, [rows, columns])))
        step.reads(rows)
        step.reads(columns)
        chosen = itertools.product(rows.flatten().tolist(), columns.tolist())
        step.reads(x, ((i % 3, j % 4, k) for i, j in chosen for k in range(2)))

    def index_mask(self, step: Step) -> None:
        x, mask = self.fresh(3, 2, 4), self.mask(3, 2)
        step.gives(step.run(lambda: aten.index(x, [mask])))
        step.reads(mask)
        step.reads(x, (place for place in every(x) if mask[place[:2]]))

    def index_select(self, step: Step) -> None:
        x, dim = self.fresh(3, 4), self.number(0, 1)
        at = self.index(x.shape[dim], self.number(0, 4), least=0)
        step.gives(step.run(lambda: x.index_select(dim, at)))
        step.reads(at)
        step.reads(x, (place for place in every(x) if place[dim] in at.tolist()))

    def gather(self, step: Step) -> None:
        x, dim = self.fresh(3, 4), self.number(-2, 1)
        at = self.index(x.shape[dim], self.number(1, 3), self.number(1, 4), least=0)
        step.gives(step.run(lambda: x.gather(dim, at)))
        step.reads(at)
        step.reads(x, _by_index(at, dim))

    def take(self, step: Step) -> None:
        x = self.fresh(3, 4)
        at = self.index(12, 3).long()
        step.gives(step.run(lambda: x.take(at)))
        step.reads(at)
        step.reads(x, (in_order(x, int(one) % 12) for one in at))

    def masked_select(self, step: Step) -> None:
        x, mask = self.fresh(3, 1), self.mask(2, 1, 4)
        step.gives(step.run(lambda: x.masked_select(mask)))
        step.reads(mask)
        step.reads(
            x, (broadcast(x, one) for one in places((2, 3, 4)) if mask[broadcast(mask, one)])
        )

    def nll_loss(self, step: Step) -> None:
        x, target = self.fresh(3, 4), self.index(4, 3, least=0)
        weight = self.fresh(4).contiguous() if self.draw(st.booleans()) else None
        ignored = self.number(0, 3)
        out, total = step.run(lambda: aten.nll_loss_forward(x, target, weight, 1, ignored))
        kept = [(row, int(to)) for row, to in enumerate(target) if to != ignored]
        step.reads(x, kept)
        step.reads(target)
        if weight is not None:
            step.reads(weight, ((to,) for _, to in kept))
        step.gives(out)
        step.gives(total)

    def grouped_mm(self, step: Step) -> None:
        """The groups divide the rows, the columns or the summed dimension."""
        how = self.draw(st.sampled_from(["rows", "columns", "sum"]))
        sizes = self.draw(st.lists(st.integers(0, 3), min_size=3, max_size=3))
        ends = torch.tensor(list(itertools.accumulate(sizes)), dtype=torch.int32)
        used, end, extra = {g for g in range(3) if sizes[g]}, sum(sizes), 1
        count = -(-(end + extra) // 4) * 4  # the operator wants strides in multiples of 16 bytes
        if how == "rows":
            a, b = torch.ones(end + extra, 4), torch.ones(3, 4, 8)
        elif how == "columns":
            a, b = torch.ones(3, 4, 8), torch.ones(8, count)
        else:
            a, b = torch.ones(4, count), torch.ones(count, 8)
        out = step.run(lambda: torch._grouped_mm(a, b, ends))
        step.reads(ends)
        if how == "rows":
            step.reads(a, ((i, j) for i, j in every(a) if i < end))
            step.reads(b, (place for place in every(b) if place[0] in used))
            step.gives(out, ((i, j) for i, j in every(out) if i < end))
        elif how == "columns":
            step.reads(a, (place for place in every(a) if place[0] in used))
            step.reads(b, ((i, j) for i, j in every(b) if j < end))
            step.gives(out, ((i, j) for i, j in every(out) if j < end))
        else:
            step.reads(a, ((i, j) for i, j in every(a) if j < end))
            step.reads(b, ((i, j) for i, j in every(b) if i < end))
            step.gives(out)

    # Operators that write chosen elements.

    def rows_written(self, step: Step) -> None:
        x, dim = self.fresh(3, 4), self.number(0, 1)
        size = x.shape[dim]
        rows = self.draw(st.lists(st.integers(0, size - 1), max_size=3, unique=True))
        at = torch.tensor(rows, dtype=torch.int64)
        chosen = [place for place in every(x) if place[dim] in rows]
        kind = self.draw(st.sampled_from(["copy", "add", "reduce", "fill", "fill by tensor"]))
        if kind.startswith("fill"):
            value = torch.ones(()) if kind == "fill by tensor" else 1.0
            step.run(lambda: x.index_fill_(dim, at, value))
            if isinstance(value, Tensor):
                step.reads(value)
        else:
            source = torch.ones(*(len(rows) if one == dim else x.shape[one] for one in (0, 1)))
            if kind == "copy":
                step.run(lambda: x.index_copy_(dim, at, source))
            elif kind == "add":
                step.run(lambda: x.index_add_(dim, at, source))
            else:
                step.run(lambda: x.index_reduce_(dim, at, source, "amax"))
            step.reads(source)
            if kind != "copy":
                step.reads(x, chosen)
        step.reads(at)
        step.writes(x, chosen)
        self.tensors.append(x)

    def index_put(self, step: Step) -> None:
        x, rows, columns = self.fresh(3, 4), self.index(3, 2), self.index(4, 2)
        adds = self.draw(st.booleans())
        value = torch.ones(2) if self.draw(st.booleans()) else torch.ones(())
        step.run(lambda: aten.index_put_(x, [rows, columns], value, adds))
        chosen = [(int(i) % 3, int(j) % 4) for i, j in zip(rows, columns, strict=True)]
        for one in (rows, columns, value):
            step.reads(one)
        if adds:
            step.reads(x, chosen)
        step.writes(x, chosen)
        self.tensors.append(x)

    def slots(self, step: Step) -> None:
        """Writes the slots of a static KV cache."""
        x, at = self.fresh(2, 4, 3), self.index(4, 2)
        new = torch.ones(2, 2, 3)
        step.run(lambda: aten.index_put_(x, [None, at], new))
        step.reads(new)
        step.reads(at)
        step.writes(x, (place for place in every(x) if place[1] in {int(one) % 4 for one in at}))

    def scatter(self, step: Step) -> None:
        x, dim = self.fresh(3, 4), self.number(-2, 1)
        at = self.index(x.shape[dim], self.number(1, 3), self.number(1, 4), least=0)
        source = self.fresh(3, 4)
        kind = self.draw(st.sampled_from(["copy", "value", "add", "reduce", "old reduce"]))
        if kind == "value":
            step.run(lambda: x.scatter_(dim, at, 1.0))
        elif kind == "copy":
            step.run(lambda: x.scatter_(dim, at, source))
        elif kind == "add":
            step.run(lambda: x.scatter_add_(dim, at, source))
        elif kind == "reduce":
            step.run(lambda: x.scatter_reduce_(dim, at, source, "amax"))
        else:
            step.run(lambda: x.scatter_(dim, at, source, reduce="multiply"))
        step.reads(at)
        chosen = set(_by_index(at, dim))
        if kind != "value":
            step.reads(source, every(at))
        if kind not in ("value", "copy"):
            step.reads(x, chosen)
        step.writes(x, chosen)
        self.tensors.append(x)

    def put(self, step: Step) -> None:
        x, at, adds = self.fresh(3, 4), self.index(12, 3).long(), self.draw(st.booleans())
        source = torch.ones(3)
        step.run(lambda: x.put_(at, source, adds))
        chosen = [in_order(x, int(one) % 12) for one in at]
        step.reads(at)
        step.reads(source)
        if adds:
            step.reads(x, chosen)
        step.writes(x, chosen)

    def masked(self, step: Step) -> None:
        x, mask = self.fresh(3, 4), self.draw(st.sampled_from([(3, 4), (3, 1), (4,), ()]))
        holds = self.mask(*mask)
        chosen = [place for place in every(x) if holds[broadcast(holds, place)]]
        step.reads(holds)
        step.writes(x, chosen)
        kind = self.draw(st.sampled_from(["fill", "fill by tensor", "scatter"]))
        if kind == "fill":
            step.run(lambda: x.masked_fill_(holds, 2.0))
        elif kind == "fill by tensor":
            value = torch.ones(())
            step.run(lambda: x.masked_fill_(holds, value))
            step.reads(value)
        else:
            source = self.fresh(4, 3)
            step.run(lambda: x.masked_scatter_(holds, source))
            step.reads(source, (in_order(source, one) for one in range(len(chosen))))
        self.tensors.append(x)

    OPERATORS = (
        look, free, elementwise, reshape, cat, embedding, embedding_bag, index_rows,
        index_elements, index_mask, index_select, gather, take, masked_select, nll_loss,
        grouped_mm, rows_written, index_put, slots, scatter, put, masked,
    )  # fmt: skip


def _by_index(index: Tensor, dim: int) -> Iterator[Place]:
    for place in places(index.shape):
        chosen = list(place)
        chosen[dim] = int(index[place])
        yield tuple(chosen)


def _is_apart(tensor: Tensor) -> bool:
    offsets = [
        sum(at * stride for at, stride in zip(place, tensor.stride(), strict=True))
        for place in places(tensor.shape)
    ]
    return len(set(offsets)) == len(offsets)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@settings(deadline=None, max_examples=40)
@given(data=st.data())
def test_traced_bytes_on_a_device(data: st.DataObject) -> None:
    with torch.device("cuda"):
        expect_traced_bytes(data, in_c=True, leave_out=(Program.grouped_mm,))  # its sizes are odd


@pytest.mark.parametrize("in_c", [True, False], ids=["C", "Python"])
@settings(deadline=None)
@given(data=st.data())
def test_traced_bytes_equal_the_bytes_that_operators_touch(in_c: bool, data: st.DataObject) -> None:
    if in_c and not recorder.view_in_c():
        pytest.skip("this torch or interpreter does not show tensors to C")
    expect_traced_bytes(data, in_c)


def expect_traced_bytes(
    data: st.DataObject, in_c: bool, leave_out: tuple[Callable[..., None], ...] = ()
) -> None:
    operators = [one for one in Program.OPERATORS if one not in leave_out]
    steps: list[tuple[str, Step]] = []
    storages = Storages()
    with pytest.MonkeyPatch.context() as patch, TorchTracer(max_runs=10_000) as tracer:
        if not in_c:
            patch.setattr(recorder, "view_in_c", lambda: 0)
        program = Program(data)
        with tracer.thread():
            pass  # starts the tracer, also if no operator runs
        for _ in range(data.draw(st.integers(1, 8))):
            operator = data.draw(st.sampled_from(operators))
            step = Step(tracer, storages)
            operator(program, step)
            program.tensors += [one for one in step.made if one.numel()]
            step.made.clear()
            steps.append((operator.__name__, step))
        rows = tracer.reader().read_all().to_pandas()
    storages.close()
    regions: dict[int, int] = {}
    for name, step in steps:
        own = rows[rows.timestamp_ns.between(step.began, step.ended)]
        storage_at = {address: storage for _, address, storage in step.moved}
        found: Bytes = Counter()
        for row in own.itertuples():
            storage = storage_at.get(row.address, -1)
            assert regions.setdefault(row.region_id, storage) == storage, name
            touched = range(row.address, row.address + row.length_bytes)
            found.update((row.op_type, address, storage) for address in touched)
        assert found == step.moved, name
    assert len(set(regions.values())) == len(regions)
