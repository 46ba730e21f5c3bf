"""Which step of a capture each thread is in, and whose."""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
import threading
import weakref
from array import array
from collections.abc import Callable, Iterable, Iterator
from types import CodeType, FrameType
from typing import Any

import torch
from torch import nn

from .._native import ForwardHooks

__all__ = ["Place", "Steps"]

# The frame of every call of a module; others of the same file stand around it.
_CALL = nn.Module._call_impl.__code__
# Generators and coroutines: others may call the model before they go on.
_RESTS = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
# The backward pass that this thread is in, -1 outside of any.
_backward_pass: Callable[[], int] = getattr(torch._C, "_current_graph_task_id", lambda: -1)


class Place:
    """Where one thread stands: its step, and how often each module ran in it.

    Attributes:
        step: -1 outside of any step, and so is token.
        token: tokens recorded when the step began, -1 where nobody counts them.
        request: the capture's number of the request that it serves, 0: none.
        calls: how often each module ran in the step, or since the last one.
        entered: how many calls of each module began, by its index; only with captured inputs.
        mine: whether what runs here belongs to the capture, by its scope.
        again: whether it is what a backward pass computes again, outside of any step.
        skipped: the step is left out.
    """

    __slots__ = (
        "again", "called", "calls", "entered", "frames", "late", "method", "mine", "never",
        "request", "skipped", "step", "token",
    )  # fmt: skip

    def __init__(self, modules: int) -> None:
        # PyTorch's two innermost around the forward of the outermost call: which one calls hooks
        # depends on its release, and on whether the forward raised. Empty outside of any step.
        self.frames: tuple[FrameType | None, ...] = ()
        self.late: _Running | None = None  # a call found within it, whose end nobody may tell of
        self.method: _Running | None = None  # which made the last outermost calls, and
        self.called: set[int] = set()  # the ids of those modules
        self.step = self.token = -1
        self.request = 0
        self.calls = array("q", [0] * modules)  # stays in its place, for hooks in C count in it
        self.entered: dict[int, int] = {}
        self.never = array("q", self.calls)  # zeros, to begin a step with
        self.mine = True
        self.again = self.skipped = False


class _Mark:
    """What a frame has as its local trace function. Who traces may call it: it does nothing."""

    __slots__ = ("__weakref__",)

    def __call__(self, frame: FrameType, event: str, argument: Any) -> _Mark:
        return self


class _Running:
    """A call of a function, known for as long as it runs.

    To keep its frame would keep what the function and all its callers hold. So the frame keeps a
    mark, which goes with it; its address may be another's then.
    """

    __slots__ = ("_address", "_mark")

    def __init__(self, frame: FrameType) -> None:
        mark = frame.f_trace
        if not isinstance(mark, _Mark):
            mark = _Mark()
            if frame.f_trace is None:  # else a debugger's: then it is known for this moment only
                frame.f_trace = mark
        self._address, self._mark = id(frame), weakref.ref(mark)

    def is_in(self, frame: FrameType | None) -> bool:
        """Whether it is the call of a frame, or one that led to it."""
        if self._mark() is None:
            return False
        while frame is not None and id(frame) != self._address:
            frame = frame.f_back
        return frame is not None


class _Places(threading.local):
    """Each thread's own. An attribute of a ``local`` takes longer than one of what it holds."""

    def __init__(self, modules: int) -> None:
        self.own = Place(modules)


def _height(frame: FrameType | None) -> int | None:
    """How many calls above the caller a frame is; None: it is not on this thread's stack."""
    at, height = sys._getframe(1), 0
    while at is not frame:
        if at.f_back is None:
            return None
        at, height = at.f_back, height + 1
    return height


def _handles_exception(frame: FrameType) -> bool:
    """Whether a frame that called the caller does so while it handles an exception.

    An exception that is handled further out, where a model is called after an error, is not its.
    """
    error = sys.exc_info()[1]
    traceback = None if error is None else error.__traceback__
    return traceback is not None and traceback.tb_frame is frame


class Steps:
    """The steps of one capture.

    A step is an outermost call into the models. The calls that a method of a module makes beside
    each other, as CLIP's ``get_text_features`` calls a part and then another, are one step; a call
    of a model itself, or of a part that it called before, begins the next one.

    Hooks around the models and their children see nearly all steps begin. The step of a call that
    comes in elsewhere begins with the first output that is captured in it, and that module is
    watched from then on.

    Args:
        models: whose modules are hooked.
        modules: how many are captured.
        first: the number of the first step.
        every: the steps whose numbers it divides are captured, and others skipped.
        token: gives the number of tokens so far.
        request: gives the number of the request that runs here.
        mine: whether a call that begins now, here, belongs to the capture; None: all do.
        watch: adds a module to those that :meth:`enter` and :meth:`leave` are called for.

    Attributes:
        count: steps begun so far, those before `first` included.
        skipped: steps that were left out so far.
        paused: leave out the steps that begin while it is True.
        seen_to_end: a captured step has ended without an exception.
        in_c: the hooks in C, which are told of steps; set before the first one.
    """

    def __init__(
        self,
        models: Iterable[nn.Module],
        modules: int,
        *,
        first: int,
        every: int,
        token: Callable[[], int],
        request: Callable[[], int],
        mine: Callable[[], bool] | None,
        watch: Callable[[nn.Module], None],
    ) -> None:
        self.count = first
        self.skipped = 0
        self.paused = False
        self._blocks = 0  # of `left_out`, that are open
        self._skips = False  # whether the last step that began is left out
        self.seen_to_end = False
        self.in_c: ForwardHooks | None = None
        self._roots = {id(model) for model in models}
        self._members = {id(module) for model in models for module in model.modules()}
        self._kinds = {type(module) for model in models for module in model.modules()}
        self._modules = modules
        self._every = every
        self._token = token
        self._request = request
        self._mine = mine
        self._watch = watch
        self._places = _Places(modules)
        # Of the outermost call above those inside it, by the id of the module: replicas have hooks
        # too, and are many.
        self._heights: dict[int, int] = {}
        self._lock = threading.Lock()

    def here(self) -> Place:
        """This thread's place, of what a module returned now."""
        place = self._places.own
        if not place.frames:
            self._find(place)
        return place

    def enter(self, module: nn.Module, args: Any) -> None:
        """A call of a module begins: the pre-hook of those that are watched."""
        place = self._places.own
        if place.frames:
            # PyTorch calls no hook after a forward that raised KeyboardInterrupt or anything else
            # outside of Exception. So look whether the outermost call is still on the stack. Its
            # height above a module rarely changes, and one look there takes 0.4 us less than a
            # search, of 5 us that the capture of a small output takes.
            try:
                if sys._getframe(self._heights[id(module)]) is place.frames[0]:
                    return
            except (KeyError, ValueError):
                pass
            height = _height(place.frames[0])
            if height is not None:
                if len(self._heights) > 2 * len(self._members):
                    self._heights.clear()
                self._heights[id(module)] = height
                return
            place.frames = ()
            if self.in_c is not None:
                self.in_c.leave()
        caller = sys._getframe(1)
        if place.late is not None:
            if place.late.is_in(caller):
                return
            place.late = None
        if _backward_pass() == -1:
            place.frames = caller, caller.f_back
            self._begin(place, module, caller)

    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        """A call ends, with an exception too: the forward hook of those that are watched."""
        place = self._places.own
        caller = sys._getframe(1)
        if caller in place.frames:
            place.frames = ()
            self.seen_to_end |= place.mine and not _handles_exception(caller)
            if self.in_c is not None:
                self.in_c.leave()

    @property
    def _pauses(self) -> bool:
        return self.paused or self._blocks > 0

    @property
    def leaves_out(self) -> bool:
        """Whether to leave out tensors of no step: in a pause, and after a step was left out.

        Recomputed outputs and gradients of leaves do not tell their step. Most come soon after it.
        """
        return self._pauses or self._skips

    @contextlib.contextmanager
    def left_out(self) -> Iterator[None]:
        """Leaves out the steps that begin in the block. Blocks may overlap."""
        with self._lock:
            self._blocks += 1
        try:
            yield
        finally:
            with self._lock:
                self._blocks -= 1

    def forget(self) -> None:
        """Lets go of what interrupted calls have left, once the capture has ended."""
        self._places = _Places(self._modules)
        self._heights.clear()

    def _begin(self, place: Place, module: nn.Module, frame: FrameType) -> None:
        place.again = False
        place.mine = self._mine is None or self._mine()
        if not place.mine:
            self._outside(place)
            place.method = None
            if self.in_c is not None:
                self.in_c.leave()  # what an interrupted call of this thread may have left
            return
        if not self._goes_on(place, module, frame):
            with self._lock:
                place.step = self.count
                self.count += 1
                place.skipped = self._pauses or place.step % self._every != 0
                self.skipped += place.skipped
                self._skips = place.skipped
            place.token = self._token()
            place.request = self._request()
            place.calls[:] = place.never
            place.entered.clear()
        if place.skipped:
            place.mine = False
        if self.in_c is None or place.late is not None:  # hooks in C do not ask when one ends
            return
        if place.skipped:
            self.in_c.skip()
        else:
            self.in_c.enter(place.calls, place.step, place.token, place.request)

    @staticmethod
    def _outside(place: Place) -> None:
        place.step = place.token = -1
        place.request = 0

    def _goes_on(self, place: Place, module: nn.Module, frame: FrameType | None) -> bool:
        """Whether the method that made the last outermost call makes this one beside it."""
        while frame is not None and frame.f_code.co_filename == _CALL.co_filename:
            frame = frame.f_back
        if frame is None or id(module) in self._roots or frame.f_code not in self._methods:
            place.method = None
            return False
        if (
            place.method is not None
            and place.method.is_in(frame)
            and id(module) not in place.called
            and place.request == self._request()
        ):
            place.called.add(id(module))
            return True
        place.method, place.called = _Running(frame), {id(module)}
        return False

    @functools.cached_property
    def _methods(self) -> set[CodeType]:
        """The code of the methods of all modules, but of those that may rest in between."""
        found = set()
        for kind in {base for own in self._kinds for base in own.__mro__} - {nn.Module, object}:
            for value in vars(kind).values():
                code = getattr(inspect.unwrap(value), "__code__", None) if callable(value) else None
                if isinstance(code, CodeType) and not code.co_flags & _RESTS:
                    found.add(code)
        return found

    def _find(self, place: Place) -> None:
        """Begins the step of the call that we are in, if there is one of which we do not know."""
        if place.late is not None and place.late.is_in(sys._getframe(1)):
            return
        place.frames, place.late = (), None
        place.mine = self._mine is None or self._mine()
        place.again = _backward_pass() != -1
        if place.again:
            place.mine = place.mine and not self.leaves_out
            self._outside(place)
            return
        frame: FrameType | None = sys._getframe(1)
        outermost, entered = None, None
        while frame is not None:
            if frame.f_code is _CALL:
                module = frame.f_locals["self"]
                if id(module) in self._members:
                    outermost, entered = frame, module
            frame = frame.f_back
        if outermost is None or entered is None:  # the hook was called by hand
            self._outside(place)
            return
        self._watch(entered)
        place.late = _Running(outermost)
        self._begin(place, entered, outermost)
