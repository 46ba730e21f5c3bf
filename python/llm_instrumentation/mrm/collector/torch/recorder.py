"""The hot path of the torch tracer: what happens at each operator of one thread.

An operator is looked at once; from then on a function made for it (:mod:`.handlers`) runs
it and packs a row a tensor into a block of bytes. Nothing is kept that Python's garbage
collector would count, and nothing is computed that can be computed later. With hundreds of
operators a token this is where the tracer's cost is made: benchmarks/torch_tracer.py measures it.
"""

from __future__ import annotations

import random
import struct
import threading
from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from .handlers import Handle, Pen, Run, handler_of
from .layout import runs_of
from .regions import Regions
from .spool import ROW, ROW_BYTES, Spool

__all__ = ["BLOCK_ROWS", "Recorder", "Symbols"]

BLOCK_ROWS = 1 << 13  # small enough for a core's cache
_MANY_LAYOUTS = 1 << 12


class Symbols:
    """Numbers for the operators' names, from 0."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self._lock = threading.Lock()

    def number(self, name: str) -> int:
        with self._lock:
            if name not in self.names:
                self.names.append(name)
            return self.names.index(name)


class Recorder:
    """Records the operators of the thread that makes it.

    Attributes:
        mode: the ``TorchDispatchMode`` to be entered on this thread.
        put: ``put(time_ns, address, length, word, code)`` appends a row.
        flush: hands the rows that are held to the spool.
        unseen: how many tensors kept their memory to themselves, by operator.
        sampling: record one operator in ``sample_every``; otherwise all.
    """

    def __init__(
        self,
        regions: Regions,
        spool: Spool,
        symbols: Symbols,
        *,
        max_runs: int,
        sample_every: int,
        elsewhere: Callable[[], Recorder],
    ) -> None:
        """``elsewhere`` gives the recorder of whatever thread calls it."""
        self.thread = threading.get_native_id()
        self.number = symbols.number
        self._regions = regions
        self.unseen: dict[str, int] = {}
        self.sampling = False
        self.note, self.note_rows, self.put, self.flush = _pen(
            regions, spool, symbols, max_runs, self.thread, self.unseen
        )
        self._sample_every = sample_every
        self._chance = random.Random(0)
        self._passing = 0
        self.mode = self._make_mode(elsewhere)

    def _make_mode(self, elsewhere: Callable[[], Recorder]) -> TorchDispatchMode:
        nothing: dict[str, Any] = {}
        views: dict[int, Run | None] = {}
        runs: dict[int, Handle] = {}
        operators: list[Any] = []  # while they are here their ids are theirs
        owner, here, recorder = threading.get_ident(), threading.get_ident, self
        parameter, see_parameter = nn.Parameter, self._regions.see_parameter

        class Mode(_Mode):
            def __torch_dispatch__(
                self, func: Any, types: Any, args: Any = (), kwargs: Any = None
            ) -> Any:
                if types:
                    if all(map(_is_without_memory, types)):
                        return func(*args, **(kwargs or nothing))
                    return NotImplemented  # subclasses say what they are made of
                if here() != owner:  # autograd brings the mode to threads of its own
                    return elsewhere().mode.__torch_dispatch__(func, types, args, kwargs)
                run = runs.get(id(func))
                if run is not None:
                    return run(args, kwargs or nothing)
                view = views.get(id(func))
                if view is not None:
                    if args and type(args[0]) is parameter:
                        see_parameter(args[0])
                    return view(*args, **kwargs) if kwargs else view(*args)
                operators.append(func)
                handler = handler_of(func, cast("Pen", recorder))
                if handler.run is None:
                    views[id(func)] = handler.plain
                else:
                    runs[id(func)] = recorder._sampled(handler.run, handler.plain)
                return self.__torch_dispatch__(func, types, args, kwargs)

        return Mode()

    def _sampled(self, run: Handle, plain: Run | None) -> Handle:
        if self._sample_every == 1 or plain is None:
            return run

        def sometimes(args: Any, kwargs: Any) -> Any:
            if self.sampling:
                if self._passing:
                    self._passing -= 1
                    return plain(*args, **kwargs)
                # Even gaps would meet the same operators of each layer again and again.
                self._passing = self._chance.randrange(2 * self._sample_every - 1)
            return run(args, kwargs)

        return sometimes


class _Mode(TorchDispatchMode):
    supports_higher_order_operators = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Compiled code runs eagerly under this mode; the guard against it would cost as much
        # as recording does.
        return False


def _is_without_memory(kind: type) -> bool:
    """Whether these are fake or functional tensors, which stand for others."""
    return kind.__module__.startswith("torch._subclasses.")


def _pen(
    regions: Regions,
    spool: Spool,
    symbols: Symbols,
    max_runs: int,
    thread: int,
    unseen: dict[str, int],
) -> tuple[Callable[..., None], Callable[..., None], Callable[..., None], Callable[[], None]]:
    """Closures over one block of rows: locals of a function are the fastest state there is."""
    block, spare = bytearray(ROW_BYTES * BLOCK_ROWS), bytearray(ROW_BYTES * BLOCK_ROWS)
    at = 0
    pack, full = ROW.pack_into, struct.error
    word_of, add, see_parameter = regions.words.get, regions.add, regions.see_parameter
    plain, parameter = torch.Tensor, nn.Parameter
    layouts: dict[tuple[Any, ...], tuple[tuple[int, ...], int]] = {}

    def note(tensor: Any, now: int, code: int) -> None:
        nonlocal at
        here = -1
        kind = type(tensor)
        if kind is not plain and _is_without_memory(kind):
            miss(code)
            return
        try:
            storage = tensor.untyped_storage()
            word = word_of(storage._cdata)
            if word is None:
                word = add(storage, tensor)
            if kind is parameter:
                see_parameter(tensor)
            address = tensor.data_ptr()
            if tensor.is_contiguous():
                here = at
                at = here + ROW_BYTES
                pack(block, here, now, address, tensor.nbytes, word, code)
                return
            offsets, length = layout(tensor.shape, tensor.stride(), tensor.itemsize)
        except full:
            at = here
            flush()
            note(tensor, now, code)
            return
        except (NotImplementedError, RuntimeError, TypeError):
            # Sparse and opaque tensors have no address.
            miss(code)
            return
        for offset in offsets:
            put(now, address + offset, length, word, code)

    def miss(code: int) -> None:
        name = symbols.names[code >> 1]
        unseen[name] = unseen.get(name, 0) + 1

    def put(now: int, address: int, length: int, word: int, code: int) -> None:
        nonlocal at
        if at >= len(block):
            flush()
        here = at
        at = here + ROW_BYTES
        pack(block, here, now, address, length, word, code)

    def note_rows(
        tensor: Any, dim: int, chosen: Iterable[tuple[int, int]], now: int, code: int
    ) -> None:
        word = regions.meet(tensor)
        base, step = tensor.data_ptr(), tensor.stride(dim) * tensor.itemsize
        shape, strides = list(tensor.shape), tensor.stride()
        for first, count in chosen:
            shape[dim] = count
            offsets, length = layout(tuple(shape), strides, tensor.itemsize)
            for offset in offsets:
                put(now, base + first * step + offset, length, word, code)

    def layout(
        shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int
    ) -> tuple[tuple[int, ...], int]:
        key = (shape, strides, itemsize)
        found = layouts.get(key)
        if found is None:
            if len(layouts) >= _MANY_LAYOUTS:
                layouts.clear()
            found = layouts[key] = runs_of(shape, strides, itemsize, max_runs)
        return found

    def flush() -> None:
        nonlocal at, block, spare
        # A finaliser that runs an operator meanwhile writes into the other block.
        end, at, block, spare = at, 0, spare, block
        spool.write(memoryview(spare)[:end], thread)
        regions.forget_dead()

    return note, note_rows, put, flush
