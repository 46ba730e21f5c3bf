"""Makes, for each operator, a function that runs it and records what it moved.

The functions run at every call of an operator (:mod:`.recorder`), so there is one for each sort of
operator that does only what this sort needs.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

import torch
from torch.utils._pytree import tree_leaves

from ...._native import NativeForm
from .choices import CHOICES
from .layout import Pieces, UntoldError
from .ops import Form, Traffic, traffic_of

__all__ = ["Handle", "Handler", "Pen", "Positions", "Run", "handler_of", "tensors_in"]

Run = Callable[..., Any]

#: Runs a call. It takes the positional and keyword arguments as two objects, not unpacked.
Handle = Callable[[Any, Any], Any]

_clock = time.monotonic_ns

# Types that stand in place of a tensor: ``x + 1`` calls ``add.Tensor`` with an int.
_NUMBERS = frozenset({int, float, bool, complex})


class Pen(Protocol):
    """What handlers record with.

    A ``code`` is twice the operator's number, plus 1 for a store.
    """

    #: Returns the number of an operator's name.
    number: Callable[[str], int]

    #: ``note(tensor, time_ns, code)`` records that all of a tensor is read or written.
    note: Callable[[Any, int, int], None]

    #: ``note_pieces(tensor, pieces, time_ns, code)`` records some of a tensor; None: all of it.
    note_pieces: Callable[[Any, Pieces | None, int, int], None]

    #: ``take_whole(symbol)`` counts a call whose chosen elements could not be found out.
    take_whole: Callable[[str], None]

    #: The dispatch mode. Inside a handler it is off: enter it to have further operators recorded.
    mode: AbstractContextManager[Any]


class Positions(NamedTuple):
    """What an operator moves, by the positions of its arguments; see :class:`Traffic`."""

    form: NativeForm
    codes: tuple[int, int] = (0, 0)  #: the codes of loads and of stores
    reads: Sequence[int] = ()
    writes: Sequence[int] = ()
    results: Sequence[int] = ()  #: results that are new memory
    several: bool = False  #: the operator returns a tuple of results


class Handler(NamedTuple):
    """How to run an operator.

    Attributes:
        run: runs it and records what it moves; None if it moves nothing.
        plain: runs it and records nothing; None if the operators that it is made of have to be
            recorded.
        positions: what C needs to do the same as ``run``.
    """

    run: Handle | None
    plain: Run | None
    positions: Positions = Positions(NativeForm.IN_PYTHON)


def handler_of(operator: Any, pen: Pen) -> Handler:
    """The handler of ``operator``, an ``OpOverload`` or a higher-order operator."""
    if not isinstance(operator, torch._ops.OpOverload):
        return Handler(_opaque(operator, pen), operator)
    traffic = traffic_of(operator)
    plain: Run = operator._op  # without the Python frame of the overload's own __call__
    if traffic.form is Form.VIEW:
        return Handler(None, plain, Positions(NativeForm.VIEW))
    if traffic.form is Form.COMPOSITE:
        return Handler(_composite(operator, pen), None)
    if traffic.form is Form.LINEAR:
        positions = _positions(NativeForm.MOVES_IF_CONTIGUOUS, traffic, pen)
        return Handler(_linear(operator, traffic, pen), plain, positions)
    if traffic.form is Form.MAY_ALIAS:
        codes = _codes(traffic, pen)
        positions = Positions(NativeForm.MOVES_IF_COPIED, codes, reads=[0], results=[0])
        return Handler(_may_alias(plain, traffic, pen), plain, positions)
    if traffic.form is Form.CHOOSES:
        return Handler(_chooses(plain, traffic, pen), plain)
    positions = _positions(NativeForm.MOVES, traffic, pen)
    return Handler(_moves(plain, traffic, pen), plain, positions)


def _positions(form: NativeForm, traffic: Traffic, pen: Pen) -> Positions:
    """The positions of all tensors that move; IN_PYTHON if a tensor is keyword-only."""
    places = [one.position for one in traffic.arguments]
    if any(place is None for place in places):
        return Positions(NativeForm.IN_PYTHON)
    return Positions(
        form,
        _codes(traffic, pen),
        [one.position for one in traffic.arguments if one.read and one.position is not None],
        [one.position for one in traffic.arguments if one.written and one.position is not None],
        [place for place, new in enumerate(traffic.new_results) if new],
        several=len(traffic.new_results) != 1,
    )


def _codes(traffic: Traffic, pen: Pen) -> tuple[int, int]:
    number = pen.number(traffic.symbol)
    return 2 * number, 2 * number + 1


def _moves(op: Run, traffic: Traffic, pen: Pen) -> Handle:
    arguments = traffic.arguments
    if traffic.one_new_tensor:
        if all(a.read and not (a.written or a.optional or a.many) for a in arguments):
            if [a.position for a in arguments] == [0]:
                return _one_to_one(op, traffic, pen)
            if [a.position for a in arguments] == [0, 1]:
                return _two_to_one(op, traffic, pen)
        if [(a.position, a.many, a.optional) for a in arguments] == [(0, True, False)]:
            return _many_to_one(op, traffic, pen)
    return _any_to_any(op, traffic, pen)


def _one_to_one(op: Run, traffic: Traffic, pen: Pen) -> Handle:
    note, (load, store) = pen.note, _codes(traffic, pen)

    def run(args: Any, kwargs: Any) -> Any:
        now = _clock()
        out = op(*args, **kwargs)
        note(args[0], now, load)
        note(out, now, store)
        return out

    return run


def _two_to_one(op: Run, traffic: Traffic, pen: Pen) -> Handle:
    note, (load, store) = pen.note, _codes(traffic, pen)

    def run(args: Any, kwargs: Any) -> Any:
        now = _clock()
        out = op(*args, **kwargs)
        for tensor in args[:2]:
            if type(tensor) not in _NUMBERS:
                note(tensor, now, load)
        note(out, now, store)
        return out

    return run


def _many_to_one(op: Run, traffic: Traffic, pen: Pen) -> Handle:
    note, (load, store) = pen.note, _codes(traffic, pen)

    def run(args: Any, kwargs: Any) -> Any:
        now = _clock()
        out = op(*args, **kwargs)
        for tensor in args[0]:
            note(tensor, now, load)
        note(out, now, store)
        return out

    return run


def _any_to_any(op: Run, traffic: Traffic, pen: Pen) -> Handle:
    note, (load, store) = pen.note, _codes(traffic, pen)
    reads = [(a.position, a.name) for a in traffic.arguments if a.read]
    writes = [(a.position, a.name) for a in traffic.arguments if a.written]
    new_results = [place for place, new in enumerate(traffic.new_results) if new]
    single = len(traffic.new_results) == 1

    def run(args: Any, kwargs: Any) -> Any:
        now = _clock()
        out = op(*args, **kwargs)
        for wanted, code in ((reads, load), (writes, store)):
            for position, name in wanted:
                if position is None:
                    value = kwargs.get(name)
                else:
                    value = args[position] if position < len(args) else None
                for tensor in tensors_in(value):
                    if tensor is not None:
                        note(tensor, now, code)
        results = (out,) if single else out
        for place in new_results:
            for tensor in tensors_in(results[place]):
                note(tensor, now, store)
        return out

    return run


def tensors_in(value: Any) -> Iterable[Any]:
    """The tensors of an argument or result: the tensor itself, the items of a list, or none."""
    if isinstance(value, torch.Tensor):
        return (value,)
    return value if isinstance(value, (list, tuple)) else ()


def _may_alias(op: Run, traffic: Traffic, pen: Pen) -> Handle:
    note, (load, store) = pen.note, _codes(traffic, pen)

    def run(args: Any, kwargs: Any) -> Any:
        now = _clock()
        out = op(*args, **kwargs)
        if _is_copy(args[0], out):
            note(args[0], now, load)
            note(out, now, store)
        return out

    return run


def _is_copy(given: torch.Tensor, out: torch.Tensor) -> bool:
    if given is out:
        return False
    if given.layout is not torch.strided or out.layout is not torch.strided:
        return True
    return given.data_ptr() != out.data_ptr()


def _composite(operator: Any, pen: Pen) -> Handle:
    def run(args: Any, kwargs: Any) -> Any:
        with pen.mode:
            return operator.decompose(*args, **kwargs)

    return run


def _linear(operator: Any, traffic: Traffic, pen: Pen) -> Handle:
    one_kernel, several = _moves(operator._op, traffic, pen), _composite(operator, pen)

    def run(args: Any, kwargs: Any) -> Any:
        given = args[0]
        simple = given.layout is torch.strided and given.is_contiguous()
        return (one_kernel if simple else several)(args, kwargs)

    return run


_KEYWORDS = ("include_self",)  # keywords that functions of CHOICES take
# What a function of CHOICES may raise: for arguments that do not fit each other, which the operator
# itself refuses, and for tensors without memory.
_UNTOLD = (
    UntoldError,
    IndexError,
    MemoryError,
    NotImplementedError,
    RuntimeError,
    TypeError,
    ValueError,
)


def _chooses(op: Run, traffic: Traffic, pen: Pen) -> Handle:
    """Records chosen elements; all elements if the choice cannot be found out."""
    note, note_pieces, (load, store) = pen.note, pen.note_pieces, _codes(traffic, pen)
    choose = CHOICES.get(traffic.symbol) or CHOICES[traffic.name]
    whole = _any_to_any(op, traffic, pen)
    outs = [a.name for a in traffic.arguments if a.written and a.position is None]
    new_results = [place for place, new in enumerate(traffic.new_results) if new]
    single = len(traffic.new_results) == 1

    def run(args: Any, kwargs: Any) -> Any:
        choice = None
        with contextlib.suppress(*_UNTOLD):
            choice = choose(args, **{one: kwargs[one] for one in _KEYWORDS if one in kwargs})
        if choice is None:
            out = whole(args, kwargs)
            pen.take_whole(traffic.symbol)
            return out
        now = _clock()
        out = op(*args, **kwargs)
        for move in choice.moves:
            if move.read:
                note_pieces(move.tensor, move.pieces, now, load)
        for move in choice.moves:
            if move.written:
                note_pieces(move.tensor, move.pieces, now, store)
        results = (out,) if single else out
        for place in new_results:
            filled = None if choice.filled is None else choice.filled(results[place])
            note_pieces(results[place], filled, now, store)
        for name in outs:
            note(kwargs[name], now, store)
        return out

    return run


def _opaque(operator: Any, pen: Pen) -> Handle:
    """Records all tensors that go into a higher-order operator, and new ones that come out."""
    number = pen.number(str(operator))

    def run(args: Any, kwargs: Any) -> Any:
        now = _clock()
        out = operator(*args, **kwargs)
        given = [one for one in tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)]
        known = {id(one) for one in given}
        for tensor in given:
            pen.note(tensor, now, 2 * number)
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and id(tensor) not in known:
                pen.note(tensor, now, 2 * number + 1)
        return out

    return run
