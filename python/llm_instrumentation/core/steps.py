"""Which step of a capture each thread is in, and whose."""

from __future__ import annotations

import sys
import threading
from array import array
from collections.abc import Callable, Iterable
from types import CodeType, FrameType
from typing import Any

import torch
from torch import nn

from .._native import ForwardHooks

__all__ = ["Place", "Steps"]

# The frame of every call of a module; others of the same file stand around it.
_CALL = nn.Module._call_impl.__code__
# The backward pass that this thread is in, -1 outside of any.
_backward_pass: Callable[[], int] = getattr(torch._C, "_current_graph_task_id", lambda: -1)


class Place:
    """Where one thread stands: its step, and how often each module ran in it.

    Attributes:
        step: -1 outside of any step, and so is token.
        token: tokens recorded when the step began, -1 where nobody counts them.
        request: the capture's number of the request that it serves, 0: none.
        calls: how often each module ran in the step, or since the last one.
        mine: whether what runs here belongs to the capture, by its scope.
        again: whether it is what a backward pass computes again, outside of any step.
    """

    __slots__ = (
        "again", "called", "calls", "frames", "late", "method", "mine", "never", "request", "step",
        "token",
    )  # fmt: skip

    def __init__(self, modules: int) -> None:
        # PyTorch's two innermost around the forward of the outermost call: which one calls hooks
        # depends on its release, and on whether the forward raised. Empty outside of any step.
        self.frames: tuple[FrameType | None, ...] = ()
        self.late = False  # found within its call, whose end nobody may tell of
        self.method: tuple[int, CodeType] | None = None  # what made the outermost calls, and
        self.called: set[int] = set()  # the ids of those modules
        self.step = self.token = -1
        self.request = 0
        self.calls = array("q", [0] * modules)  # stays in its place, for hooks in C count in it
        self.never = array("q", self.calls)
        self.mine = True
        self.again = False


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


class Steps:
    """The steps of one capture.

    A step is an outermost call into the models. The calls that a method of a module makes beside
    each other, as CLIP's ``get_text_features`` calls a part and then another, are one step; a
    module's call of itself, or of a part that it called before, begins the next one.

    Hooks around the models and their children see nearly all steps begin. The step of a call that
    comes in elsewhere begins with the first output that is captured in it, and that module is
    watched from then on.

    Args:
        models: whose modules are hooked.
        modules: how many are captured.
        first: the number of the first step.
        token: gives the number of tokens so far.
        request: gives the number of the request that runs here.
        mine: whether a call that begins now, here, belongs to the capture; None: all do.
        watch: adds a module to those that :meth:`enter` and :meth:`leave` are called for.

    Attributes:
        count: steps begun so far, those before `first` included.
        seen_to_end: whether one came to its end.
        in_c: the hooks in C, which are told of steps; set before the first one.
    """

    def __init__(
        self,
        models: Iterable[nn.Module],
        modules: int,
        *,
        first: int,
        token: Callable[[], int],
        request: Callable[[], int],
        mine: Callable[[], bool] | None,
        watch: Callable[[nn.Module], None],
    ) -> None:
        self.count = first
        self.seen_to_end = False
        self.in_c: ForwardHooks | None = None
        self._roots = {id(model) for model in models}
        self._members = {id(module) for model in models for module in model.modules()}
        self._modules = modules
        self._token = token
        self._request = request
        self._mine = mine
        self._watch = watch
        self._places = _Places(modules)
        self._heights: dict[nn.Module, int] = {}  # of the outermost call above those inside it
        self._lock = threading.Lock()

    def here(self) -> Place:
        """This thread's place, of what a module returned now."""
        place = self._places.own
        if not place.frames or place.late:
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
                if sys._getframe(self._heights[module]) is place.frames[0]:
                    return
            except (KeyError, ValueError):
                pass
            height = _height(place.frames[0])
            if height is not None:
                self._heights[module] = height
                return
            place.frames = ()
        if _backward_pass() == -1:
            caller = sys._getframe(1)
            self._begin(place, module, (caller, caller.f_back))

    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        """A call ends, with an exception too: the forward hook of those that are watched."""
        place = self._places.own
        if sys._getframe(1) in place.frames:
            place.frames = ()
            self.seen_to_end |= place.mine
            if self.in_c is not None:
                self.in_c.leave()

    def forget(self) -> None:
        """Lets go of what interrupted calls have left, once the capture has ended."""
        self._places = _Places(self._modules)
        self._heights.clear()

    def _begin(
        self,
        place: Place,
        module: nn.Module,
        frames: tuple[FrameType, FrameType | None],
        *,
        late: bool = False,
    ) -> None:
        place.frames, place.late, place.again = frames, late, False
        place.mine = self._mine is None or self._mine()
        if not place.mine:
            self._outside(place)
            if self.in_c is not None:
                self.in_c.leave()  # what an interrupted call of this thread may have left
            return
        if not self._goes_on(place, module, frames[0]):
            with self._lock:
                place.step = self.count
                self.count += 1
            place.token = self._token()
            place.request = self._request()
            place.calls[:] = place.never
        if self.in_c is not None and not late:  # hooks in C do not ask whether a step has ended
            self.in_c.enter(place.calls, place.step, place.token, place.request)

    @staticmethod
    def _outside(place: Place) -> None:
        place.step = place.token = -1
        place.request = 0

    def _goes_on(self, place: Place, module: nn.Module, frame: FrameType | None) -> bool:
        """Whether the method that made the last outermost call makes this one beside it."""
        if id(module) in self._roots:
            place.method = None
            return False
        while frame is not None and frame.f_code.co_filename == _CALL.co_filename:
            frame = frame.f_back
        if frame is None or frame.f_code.co_varnames[:1] != ("self",):
            place.method = None
            return False
        # The frame itself would keep what the method holds.
        method = id(frame), frame.f_code
        if method == place.method and id(module) not in place.called:
            owner = frame.f_locals.get("self")
            if owner is not module and id(owner) in self._members:
                place.called.add(id(module))
                return True
        place.method, place.called = method, {id(module)}
        return False

    def _find(self, place: Place) -> None:
        """Begins the step of the call that we are in, if there is one of which we do not know."""
        if place.frames and _height(place.frames[0]) is not None:
            return
        place.frames, place.late, place.mine = (), False, True
        place.again = _backward_pass() != -1
        if place.again:
            self._outside(place)
            return
        frame: FrameType | None = sys._getframe(1)
        below, outermost, entered = frame, None, None
        while frame is not None:
            if frame.f_code is _CALL:
                module = frame.f_locals["self"]
                if id(module) in self._members:
                    outermost, entered = (frame, below), module
            below, frame = frame, frame.f_back
        if outermost is None or entered is None:  # the hook was called by hand
            self._outside(place)
            return
        self._watch(entered)
        self._begin(place, entered, outermost, late=True)
