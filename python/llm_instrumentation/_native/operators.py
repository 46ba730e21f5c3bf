"""The torch tracer's hot path in C: hook.so, and libstrap/hook/trace.c, which says what it does."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Any

from ..errors import UnsupportedError
from .hooks import library

__all__ = ["NativeForm", "Operators", "Site"]

BLOCK_ROWS = 1 << 13  # small enough for a core's cache
_ROW_BYTES = 40
_MOST_POSITIONS = 8
_SLOTS = 1 << 10
_STORAGES = 1 << 12


class NativeForm(IntEnum):
    """How C runs an operator: enum form of trace.c."""

    VIEW = 0
    MOVES = 1
    MOVES_IF_CONTIGUOUS = 2
    MOVES_IF_COPIED = 3
    IN_PYTHON = 4


_Positions = ctypes.c_int32 * _MOST_POSITIONS


class Site(ctypes.Structure):
    """struct site of trace.c: how to run an operator."""

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
        ("sites", ctypes.POINTER(Site) * _SLOTS),
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
    """Runs the operators of the thread that makes it, and holds a block of their rows.

    Attributes:
        dispatch: in place of a mode's ``__torch_dispatch__``.
        put: ``put(time_ns, address, length, word, code)`` appends a row.
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
        """Needs :meth:`available`.

        Args:
            mode: the dispatch mode; it is to have this as long as it runs ``dispatch``.
            view: see :func:`view_function`.
            forgotten: grows before storages that were met may be given out again.
            plain: the type of tensors.
            parameter: the type of parameters.
            untyped_storage: gives a tensor's storage, which has ``_cdata``.
            meet: gives the word of a tensor's storage.
            see_parameter: whether a parameter's storage is a weight from now on.
            note: notes an argument or result that C does not read, at a time, with a code.
            dispatch: runs an operator that was not learnt, is of subclasses or of another thread.
            gap: how many operators pass unrecorded before the next; None: all are recorded.
            take: gets the rows of a block, which is used again when it returns.
        """
        found = library()
        if found is None:
            raise UnsupportedError("this interpreter records no operators in C")
        self._library = found
        self._sites: list[Site] = []  # C has their addresses

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

    @staticmethod
    def available() -> bool:
        """Whether this interpreter can run operators in C.

        Raises:
            UnsupportedError: it could, but hook.so is missing or does not load.
        """
        return library() is not None

    @property
    def sampling(self) -> bool:
        """Whether some operators pass now, where a gap was given."""
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
        """Has ``dispatch`` run an operator from now on; False where it has learnt its fill.

        Args:
            func: the operator, as ``dispatch`` gets it.
            op: runs it.
            run: runs and notes it in Python, given its arguments and its keywords.
            form: how C runs it.
            codes: of the rows that are loads, and stores.
            reads: positions of the arguments that are read.
            writes: positions of those that are written.
            results: which results are new memory.
            several: there is a tuple of results.
        """
        if len(self._sites) == _SLOTS // 2:
            return False
        if max(len(reads), len(writes), len(results)) > _MOST_POSITIONS:
            form = NativeForm.IN_PYTHON
        if form is NativeForm.IN_PYTHON:
            reads = writes = results = ()
        load, store = codes
        site = Site(
            func, op, run, load, store, form, len(reads), len(writes), len(results),
            _Positions(*reads), _Positions(*writes), _Positions(*results), several,
        )  # fmt: skip
        self._library.tracer_learn(ctypes.addressof(self._shared), ctypes.addressof(site))
        self._sites.append(site)
        return True

    def flush(self) -> None:
        """Hands over the rows that are held."""
        self._library.tracer_flush(ctypes.addressof(self._shared))
