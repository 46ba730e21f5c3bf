"""The torch tracer's hot path in C, from hook.so. libstrap/hook/trace.c says what it does."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Any

from ..errors import UnsupportedError
from .hooks import library

__all__ = ["NativeForm", "OperatorSite", "Operators"]

# The same numbers as in trace.c.
BLOCK_ROWS = 1 << 13  # rows of a block, which fits into a core's cache
_ROW_BYTES = 40
_MOST_POSITIONS = 8  # of arguments that an operator reads, that it writes, and of new results
_SLOTS = 1 << 10  # of the hash table of operators
_STORAGES = 1 << 12  # that C remembers


class NativeForm(IntEnum):
    """How C runs an operator: enum form of trace.c."""

    VIEW = 0  # it moves no data
    MOVES = 1  # it reads and writes the tensors at the positions of its site
    MOVES_IF_CONTIGUOUS = 2  # as MOVES if its first argument is contiguous, else in Python
    MOVES_IF_COPIED = 3  # as MOVES unless its result is a view of its first argument
    IN_PYTHON = 4  # Python runs and records it


_Positions = ctypes.c_int32 * _MOST_POSITIONS


class OperatorSite(ctypes.Structure):
    """struct site of trace.c: how to run one operator."""

    _fields_ = [
        ("func", ctypes.py_object),
        ("op", ctypes.py_object),
        ("run", ctypes.py_object),
        ("load", ctypes.c_int64),
        ("store", ctypes.c_int64),
        ("form", ctypes.c_int32),
        ("reads", ctypes.c_int32),
        ("writes", ctypes.c_int32),
        ("results", ctypes.c_int32),
        ("read", _Positions),
        ("written", _Positions),
        ("result", _Positions),
        ("several", ctypes.c_int32),
    ]


class _Met(ctypes.Structure):
    """struct met of trace.c."""

    _fields_ = [
        ("storage", ctypes.c_void_p),
        ("word", ctypes.c_int64),
        ("is_weight", ctypes.c_int64),
    ]


class _Tracer(ctypes.Structure):
    """struct tracer of trace.c."""

    _fields_ = [
        ("view", ctypes.c_void_p),
        ("forgotten", ctypes.POINTER(ctypes.c_int64)),
        ("plain", ctypes.py_object),
        ("parameter", ctypes.py_object),
        ("tuple", ctypes.py_object),
        ("list", ctypes.py_object),
        ("integer", ctypes.py_object),
        ("real", ctypes.py_object),
        ("none", ctypes.py_object),
        ("no_keywords", ctypes.py_object),
        ("untyped_storage", ctypes.py_object),
        ("cdata", ctypes.py_object),
        ("meet", ctypes.py_object),
        ("see_parameter", ctypes.py_object),
        ("note", ctypes.py_object),
        ("dispatch", ctypes.py_object),
        ("gap", ctypes.py_object),
        ("full", ctypes.py_object),
        ("samples", ctypes.c_int64),
        ("sampling", ctypes.c_int64),
        ("sites", ctypes.POINTER(OperatorSite) * _SLOTS),
        ("next", ctypes.c_void_p),
        ("mode", ctypes.c_void_p),
        ("thread", ctypes.c_void_p),
        ("passing", ctypes.c_int64),
        ("known", ctypes.c_int64),
        ("block", ctypes.c_int64),
        ("at", ctypes.c_int64),
        ("met", _Met * _STORAGES),
        ("rows", ctypes.c_uint8 * (_ROW_BYTES * BLOCK_ROWS) * 2),
    ]


class Operators:
    """Runs the operators of the thread that creates it, and records them in blocks of rows.

    Attributes:
        dispatch: replaces the ``__torch_dispatch__`` of the dispatch mode.
        put: ``put(time_ns, address, length, word, code)`` appends a row. `length` is in bytes.
    """

    def __init__(
        self,
        mode: object,
        *,
        view: int,
        forgotten: ctypes.c_int64,
        plain: type,
        parameter: type,
        untyped_storage: Callable[[Any], Any],
        meet: Callable[[Any], int],
        see_parameter: Callable[[Any], bool],
        note: Callable[[Any, int, int], None],
        dispatch: Callable[..., Any],
        gap: Callable[[], int] | None,
        take: Callable[[memoryview], None],
    ) -> None:
        """Registers the thread's recorder in C.

        Args:
            mode: the dispatch mode. It must keep this object alive while it runs ``dispatch``.
            view: address from :func:`view_function`.
            forgotten: a counter. Its owner raises it before the memory of a storage can become
                that of another one. C then forgets all storages that it remembers.
            plain: torch.Tensor.
            parameter: torch.nn.Parameter.
            untyped_storage: returns a tensor's storage. Its ``_cdata`` identifies the storage.
            meet: returns the word of a tensor's storage; negative for a storage without memory.
            see_parameter: records that a parameter's storage holds a weight, and returns True. It
                returns False if it did not record it, for example while weights are loaded.
            note: ``note(value, time_ns, code)`` records an argument or result that C cannot read.
            dispatch: ``__torch_dispatch__`` in Python. It runs operators that were not learnt,
                operators on subclasses of tensors, and those of other threads.
            gap: returns how many operators to leave out before the next one is recorded. None
                records all.
            take: receives the rows of a full block. C reuses the block when `take` returns.

        Raises:
            UnsupportedError: this interpreter has no recorder in C.
        """
        found = library()
        if found is None:
            raise UnsupportedError("this interpreter records no operators in C")
        self._library = found
        self._sites: list[OperatorSite] = []  # kept alive, because C holds their addresses

        def full(block: int, rows: int) -> None:
            take(memoryview(self._shared.rows[block]).cast("B")[: rows * _ROW_BYTES])

        self._shared = _Tracer(
            view=view,
            forgotten=ctypes.pointer(forgotten),
            plain=plain,
            parameter=parameter,
            tuple=tuple,
            list=list,
            integer=int,
            real=float,
            none=None,
            no_keywords={},
            untyped_storage=untyped_storage,
            cdata="_cdata",
            meet=meet,
            see_parameter=see_parameter,
            note=note,
            dispatch=dispatch,
            gap=gap,
            full=full,
            samples=gap is not None,
        )
        found.tracer_begin(ctypes.addressof(self._shared), mode)
        self.dispatch: Callable[..., Any] = found.tracer_dispatch(mode)
        self.put: Callable[..., None] = found.tracer_put(mode)

    def __del__(self) -> None:
        if hasattr(self, "_shared"):
            self._library.tracer_end(ctypes.addressof(self._shared))

    @property
    def sampling(self) -> bool:
        """Whether operators may be left out now. Without `gap` it has no effect."""
        return bool(self._shared.sampling)

    @sampling.setter
    def sampling(self, sampling: bool) -> None:
        self._shared.sampling = sampling

    def learn(
        self,
        func: object,
        op: Callable[..., Any] | None,
        run: Callable[[Any, Any], Any] | None,
        *,
        form: NativeForm,
        codes: tuple[int, int] = (0, 0),
        reads: Sequence[int] = (),
        writes: Sequence[int] = (),
        results: Sequence[int] = (),
        several: bool = False,
    ) -> bool:
        """Lets ``dispatch`` run an operator in C from now on.

        Args:
            func: the operator, as ``dispatch`` receives it.
            op: runs the operator and records nothing. None: the operator is never left out.
            run: ``run(args, kwargs)`` runs and records the operator in Python. None for a view.
            form: how C runs it.
            codes: the code of the rows of its loads, and of those of its stores.
            reads: positions of the arguments that the operator reads.
            writes: positions of the arguments that it writes.
            results: positions of the results that are in new memory.
            several: the operator returns a tuple of results.

        Returns:
            False if C has no room for another operator.
        """
        if len(self._sites) == _SLOTS // 2:
            return False
        if max(len(reads), len(writes), len(results)) > _MOST_POSITIONS:
            form = NativeForm.IN_PYTHON
        if form is NativeForm.IN_PYTHON:
            reads = writes = results = ()
        load, store = codes
        site = OperatorSite(
            func, op, run, load, store, form, len(reads), len(writes), len(results),
            _Positions(*reads), _Positions(*writes), _Positions(*results), several,
        )  # fmt: skip
        self._library.tracer_learn(ctypes.addressof(self._shared), ctypes.addressof(site))
        self._sites.append(site)
        return True

    def flush(self) -> None:
        """Passes the rows of the unfinished block to `take`."""
        self._library.tracer_flush(ctypes.addressof(self._shared))
