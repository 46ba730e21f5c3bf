"""The hot path of the torch tracer: what happens at each operator of one thread.

The recorder looks at each operator once. From then on C (libstrap/hook/trace.c) runs the operator
and appends a row for each tensor to a block of bytes, if three things hold: the positions of the
arguments and results say all that the operator moves, its tensors are contiguous and in host
memory, and this torch and interpreter let C read tensors. Otherwise a Python function made for the
operator does the same (:mod:`.handlers`), and the rows are equal.

A model runs hundreds of operators for each token, so this code decides what the tracer costs;
benchmarks/torch_tracer.py measures it. It keeps no objects that Python's garbage collector would
count, and leaves to the end of the trace all work that can wait.
"""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from ...._native import BLOCK_ROWS, Operators, view_function
from .handlers import Handle, Handler, Pen, Run, handler_of, tensors_in
from .layout import Pieces, pieces_of
from .regions import Regions
from .spool import ROW, ROW_BYTES, Spool

__all__ = ["BLOCK_ROWS", "OperatorRecorder", "Symbols", "view_in_c"]

# A cache line, in bytes. Pieces below it may be single elements, and a row for each would be too
# many, so max_runs limits them.
_A_LINE = 64
_KEYS = itertools.count()  # keys of recorders; ids of threads are used again


class Symbols:
    """Numbers the names of operators, from 0."""

    def __init__(self, spool: Spool) -> None:
        self.names: list[str] = []
        self._spool = spool
        self._lock = threading.RLock()  # reentrant: a finaliser may run an operator at any time

    def number(self, name: str) -> int:
        with self._lock:
            if name not in self.names:
                self._spool.tell(symbols={len(self.names): name})
                self.names.append(name)
            return self.names.index(name)


class OperatorRecorder:
    """Records the operators of the thread that makes it.

    Attributes:
        mode: the ``TorchDispatchMode`` to enter on this thread.
        note: ``note(tensor, time_ns, code)`` records that all of a tensor is read or written.
        note_pieces: records that some of a tensor is; see :class:`.handlers.Pen`.
        put: ``put(time_ns, address, length, word, code)`` appends a row.
        flush: hands the rows of the block to the spool.
        unseen: by operator, the number of tensors that have no address.
        whole: by operator, the number of calls whose chosen elements could not be found out.
    """

    def __init__(
        self,
        regions: Regions,
        spool: Spool,
        symbols: Symbols,
        *,
        max_runs: int,
        sample_every: int,
        elsewhere: Callable[[], OperatorRecorder],
    ) -> None:
        """``elsewhere`` returns the recorder of the thread that calls it."""
        self.thread = threading.get_native_id()
        self.number = symbols.number
        self._regions = regions
        self._spool = spool
        self._elsewhere = elsewhere
        self._sample_every = sample_every
        self._chance = random.Random(0)
        self._passing = 0
        self._sampling = False
        self._rows = 0  # since forget_dead was called
        self._key = next(_KEYS)
        self.unseen: dict[str, int] = {}
        self.whole: dict[str, int] = {}
        self.mode = self._make_mode()
        self._in_c: Operators | None = None
        view = view_in_c()
        if view:
            self._in_c = self._operators(view)
            self.put, self.flush = self._in_c.put, self._in_c.flush
            self.mode.__torch_dispatch__ = self._in_c.dispatch  # type: ignore[method-assign]
        else:
            self.put, self.flush = _block(self._take)
        self.note, self.note_pieces = _notes(regions, symbols, max_runs, self.unseen, self.put)

    @property
    def sampling(self) -> bool:
        """Whether only one operator in ``sample_every`` is recorded now; False: all are."""
        return self._sampling

    @sampling.setter
    def sampling(self, sampling: bool) -> None:
        self._sampling = sampling
        if self._in_c is not None:
            self._in_c.sampling = sampling

    def take_whole(self, symbol: str) -> None:
        """Counts a call whose chosen elements could not be found out."""
        self.whole[symbol] = self.whole.get(symbol, 0) + 1

    def _operators(self, view: int) -> Operators:
        def note(value: Any, now: int, code: int) -> None:
            for tensor in tensors_in(value):
                if tensor is not None:
                    self.note(tensor, now, code)

        return Operators(
            self.mode,
            view=view,
            forgotten=self._regions.forgotten,
            plain=torch.Tensor,
            parameter=nn.Parameter,
            untyped_storage=torch.Tensor.untyped_storage,
            meet=self._regions.meet,
            see_parameter=self._regions.see_parameter,
            note=note,
            dispatch=self.mode.__torch_dispatch__,
            gap=self._gap if self._sample_every > 1 else None,
            take=self._take,
        )

    def _take(self, rows: memoryview) -> None:
        if self.unseen:
            self._spool.tell(unseen={self._key: self.unseen})
        if self.whole:
            self._spool.tell(taken_whole={self._key: self.whole})
        self._spool.write(rows, self.thread)
        self._rows += len(rows) // ROW_BYTES
        if self._rows >= BLOCK_ROWS:
            self._rows = 0
            self._regions.forget_dead()

    def _make_mode(self) -> TorchDispatchMode:
        nothing: dict[str, Any] = {}
        views: dict[int, Run | None] = {}
        runs: dict[int, Handle] = {}
        operators: list[Any] = []  # keeps them alive: no other object gets their id
        owner, here, recorder = threading.get_ident(), threading.get_ident, self
        elsewhere = self._elsewhere
        parameter, see_parameter = nn.Parameter, self._regions.see_parameter
        # PyTorch's C++ code lists Tensor itself among the subclasses of a call, its ``types``.
        plain_types = {torch.Tensor, parameter}

        class Mode(_Mode):
            # If C runs operators, the instance's attribute of this name is C's function. That
            # function calls this one for operators that it has not learnt.
            def __torch_dispatch__(
                self, func: Any, types: Any, args: Any = (), kwargs: Any = None
            ) -> Any:
                if not plain_types.issuperset(types):
                    if all(map(_is_without_memory, types)):
                        return func(*args, **(kwargs or nothing))
                    return NotImplemented  # the subclass then calls operators on the tensors inside
                if here() != owner:  # autograd enters the mode in its own threads too
                    return elsewhere().mode.__torch_dispatch__(func, types, args, kwargs or nothing)
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
                if not recorder._learn_in_c(func, handler):
                    if handler.run is None:
                        views[id(func)] = handler.plain
                    else:
                        runs[id(func)] = recorder._sampled(handler.run, handler.plain)
                return self.__torch_dispatch__(func, types, args, kwargs or nothing)

        return Mode()

    def _learn_in_c(self, func: Any, handler: Handler) -> bool:
        if self._in_c is None:
            return False
        return self._in_c.learn(func, handler.plain, handler.run, **handler.positions._asdict())

    def _sampled(self, run: Handle, plain: Run | None) -> Handle:
        if self._sample_every == 1 or plain is None:
            return run

        def sometimes(args: Any, kwargs: Any) -> Any:
            if self._sampling:
                if self._passing:
                    self._passing -= 1
                    return plain(*args, **kwargs)
                self._passing = self._gap()
            return run(args, kwargs)

        return sometimes

    def _gap(self) -> int:
        """How many operators to skip before the next recorded one.

        The number is random: a fixed one could meet the same operators in each layer.
        """
        return self._chance.randrange(2 * self._sample_every - 1)


class _Mode(TorchDispatchMode):
    supports_higher_order_operators = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # A model runs eagerly under this mode anyway. Dynamo's guard would cost as much as
        # recording does.
        return False


def view_in_c() -> int:
    """The address of the function with which C reads tensors; 0 if all has to run in Python.

    It is 0 if this torch or this interpreter does not have what C needs.
    """
    return view_function(torch.Tensor)


def _is_without_memory(kind: type) -> bool:
    """Whether a type is one of fake or functional tensors, which have no data of their own."""
    return kind.__module__.startswith("torch._subclasses.")


def _block(
    take: Callable[[memoryview], None],
) -> tuple[Callable[..., None], Callable[[], None]]:
    """Returns ``put`` and ``flush`` of a block of rows.

    They are closures because Python reads local variables fastest.
    """
    block, spare = bytearray(ROW_BYTES * BLOCK_ROWS), bytearray(ROW_BYTES * BLOCK_ROWS)
    at = 0
    pack, size = ROW.pack_into, len(block)

    def put(now: int, address: int, length: int, word: int, code: int) -> None:
        nonlocal at
        if at >= size:
            flush()
        here = at
        at = here + ROW_BYTES
        pack(block, here, now, address, length, word, code)

    def flush() -> None:
        nonlocal at, block, spare
        # If a finaliser runs an operator during take, its rows go into the other block.
        end, at, block, spare = at, 0, spare, block
        take(memoryview(spare)[:end])

    return put, flush


def _notes(
    regions: Regions,
    symbols: Symbols,
    max_runs: int,
    unseen: dict[str, int],
    put: Callable[..., None],
) -> tuple[Callable[..., None], Callable[..., None]]:
    """Returns ``note`` and ``note_pieces``, closures for the same reason as in :func:`_block`."""
    word_of, add, see_parameter = regions.words.get, regions.add, regions.see_parameter
    plain, parameter = torch.Tensor, nn.Parameter

    def note(tensor: Any, now: int, code: int) -> None:
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
                pieces: Pieces = ((0, tensor.nbytes),)
            else:
                pieces = pieces_of(tensor.shape, tensor.stride(), tensor.itemsize, max_runs)
        except (NotImplementedError, RuntimeError, TypeError):
            # Sparse and opaque tensors have no address.
            miss(code)
            return
        for offset, length in pieces:
            put(now, address + offset, length, word, code)

    def miss(code: int) -> None:
        name = symbols.names[code >> 1]
        unseen[name] = unseen.get(name, 0) + 1

    def note_pieces(tensor: Any, pieces: Pieces | None, now: int, code: int) -> None:
        if pieces is None or _is_without_memory(type(tensor)):
            note(tensor, now, code)
            return
        if len(pieces) > max_runs and any(length < _A_LINE for _, length in pieces):
            (first, _), (last, length) = pieces[0], pieces[-1]
            pieces = ((first, last + length - first),)
        word, address = regions.meet(tensor), tensor.data_ptr()
        if type(tensor) is parameter:
            see_parameter(tensor)
        for offset, length in pieces:
            put(now, address + offset, length, word, code)

    return note, note_pieces
