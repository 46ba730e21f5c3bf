"""The running step of each thread of a capture, and the rules by which steps begin and end."""

from __future__ import annotations

import functools
import inspect
import sys
import threading
from array import array
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, Protocol

import torch
from torch import nn

from ..._native import ForwardHooks
from .compiled import called_by, original_code
from .entries import Entries
from .model_code import ModelCode
from .running import Running
from .step_numbers import StepNumbers

__all__ = ["Place", "StepObserver", "Steps"]

# The code of the frame that every call of a module has. Other frames of its file surround it.
_CALL = nn.Module._call_impl.__code__
# Of a module that was compiled in place, the frame around it is the only one with the module.
_CALLS = (_CALL, nn.Module._wrapped_call_impl.__code__)
# Returns the number of this thread's backward pass, -1 outside of any.
_backward_pass: Callable[[], int] = getattr(torch._C, "_current_graph_task_id", lambda: -1)


class Place:
    """The state of one thread: its step, and the number of calls of each module in it.

    Attributes:
        step: number of the step; -1 outside of any step.
        token: tokens recorded when the step began; -1 outside of any step, or if tokens are not
            tracked.
        request: the capture's number of the request that the step serves; 0: none.
        calls: calls of each module in the step, or since the last step.
        entered: calls of each module that began, by the module's index; only with captured inputs.
        mine: the capture's scope includes the running code.
        again: a backward pass recomputes outputs, outside of any step.
        skipped: the step is left out.
        given: what the observer's `begins` returned for the running outermost call.
    """

    __slots__ = (
        "again", "called", "calls", "entered", "frames", "given", "late", "method", "mine", "never",
        "request", "skipped", "step", "token",
    )  # fmt: skip

    def __init__(self, modules: int) -> None:
        # PyTorch's two innermost frames around the forward of the outermost call. Which of the two
        # calls the hooks depends on the release, and on whether the forward raised. Empty outside
        # of any step.
        self.frames: tuple[FrameType | None, ...] = ()
        # An outermost call that was found only when it was running. No hook may report its end.
        self.late: Running | None = None
        # The method that made the last outermost calls, and the ids of the modules that it called.
        self.method: Running | None = None
        self.called: set[int] = set()
        self.step = self.token = -1
        self.request = 0
        self.calls = array("q", [0] * modules)  # never moves, because hooks in C count in it
        self.entered: dict[int, int] = {}
        self.never = array("q", self.calls)  # zeros, copied to `calls` when a step begins
        self.mine = True
        self.again = self.skipped = False
        self.given: Any = None


def _arguments(frame: FrameType) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a method, but for `self`. It may have given them other values.

    They are by name, but for those of a method that names no positional ones.
    """
    code, values = frame.f_code, frame.f_locals
    named = code.co_varnames[1 : code.co_argcount + code.co_kwonlyargcount]
    found = {name: values[name] for name in named if name in values}
    place = code.co_argcount + code.co_kwonlyargcount
    args: tuple[Any, ...] = ()
    if code.co_flags & inspect.CO_VARARGS:
        if code.co_argcount == 1:
            args = values.get(code.co_varnames[place], ())
        place += 1
    if code.co_flags & inspect.CO_VARKEYWORDS:
        found = {**values.get(code.co_varnames[place], {}), **found}
    return args, found


class _Places(threading.local):
    """Each thread's Place. It is one attribute of a ``local``, because access to one is slow."""

    def __init__(self, modules: int) -> None:
        self.own = Place(modules)


def _height(frame: FrameType | None) -> int | None:
    """The number of frames between the caller and `frame`; None: it is not on this stack."""
    at, height = sys._getframe(1), 0
    while at is not frame:
        if at.f_back is None:
            return None
        at, height = at.f_back, height + 1
    return height


def _handles_exception(frame: FrameType) -> bool:
    """Whether `frame` made the present call while it handled an exception of its own.

    An exception that an outer frame handles does not count: a model may be called after an error.
    """
    error = sys.exc_info()[1]
    traceback = None if error is None else error.__traceback__
    return traceback is not None and traceback.tb_frame is frame


class StepObserver(Protocol):
    """Is told of the outermost calls of a capture."""

    def token(self) -> int:
        """The number of tokens so far; -1: tokens are not tracked."""

    def request(self) -> int:
        """The number of the request that the caller serves; 0: none."""

    def begins(
        self, module: nn.Module, args: Any, kwargs: Any, step: int | None, late: bool
    ) -> Any:
        """An outermost call that belongs to the capture begins.

        Args:
            module: the called module.
            args: the arguments of the call.
            kwargs: the keyword arguments of the call.
            step: the number of the step; None: it is left out.
            late: the call began earlier.

        Returns:
            an object for :meth:`ends`; None: :meth:`ends` need not be called.
        """

    def ends(self, given: Any, output: Any, error: BaseException | None) -> None:
        """An outermost call has ended.

        Args:
            given: the object that :meth:`begins` returned.
            output: the result of the call; None: it is unknown.
            error: what the call raised; None: it raised nothing, or that is unknown.
        """


class Steps:
    """The steps of one capture.

    A step is an outermost call into the models. Calls that one method of a module makes side by
    side are one step, as in CLIP's ``get_text_features``, which calls a part and then another. A
    call of a model itself, or of a part that the method called before, begins the next step.

    Hooks around the models and their children see most steps begin. If a call enters the model at
    another module, its step begins with the first output captured in it, and that module is
    watched from then on. A step also begins with the first call of a module inside a ``forward``
    that was called as a method, past the hooks of its module: ``model.forward(ids)``. Each call of
    a compiled function or method that runs parts of a model, outside of any step, is a step.

    Args:
        models: the models whose modules are hooked.
        modules: the number of captured modules.
        observer: is told of each outermost call.
        first: the number of the first step.
        every: steps whose number is a multiple of this are captured, others are skipped.
        mine: reports whether a call that begins now belongs to the capture; None: all do.

    Attributes:
        entries: the modules through which calls enter the models. Their hooks call :meth:`enter`
            and :meth:`leave`.
        numbers: the numbers of the steps.
        seen_to_end: a captured step has ended without an exception.
        in_c: the hooks in C; they receive each step. Set it before the first step.
    """

    def __init__(
        self,
        models: Sequence[nn.Module],
        modules: int,
        observer: StepObserver,
        *,
        first: int = 0,
        every: int = 1,
        mine: Callable[[], bool] | None = None,
    ) -> None:
        self.entries = Entries(models, self.enter, self.leave)
        self.numbers = StepNumbers(first, every)
        self.seen_to_end = False
        self.in_c: ForwardHooks | None = None
        self._known = ModelCode(models)
        self._modules = modules
        self._observer = observer
        self._mine = mine
        self._places = _Places(modules)
        # Frames between a module's call and the outermost call, by the module's id. Replicas have
        # hooks too and may be many, so the dict is bounded.
        self._heights: dict[int, int] = {}

    def here(self) -> Place:
        """This thread's place, for an output that a module returns now."""
        place = self._places.own
        if not place.frames:
            self._find(place)
        return place

    def enter(self, module: nn.Module, args: Any, kwargs: Any = None) -> None:
        """The forward pre-hook of watched modules: a call begins.

        PyTorch notes in a second step that a hook takes keyword arguments. A thread that runs the
        hook between both gives none: another thread is adding the hook, or removing it.
        """
        if kwargs is None:
            return
        place = self._places.own
        if place.frames:
            # PyTorch calls no forward hook if the forward raised something outside of Exception,
            # such as KeyboardInterrupt. So check that the outermost call is still on the stack.
            # Its distance from a module rarely changes. One look at that distance takes 0.4 us
            # less than a search; capturing a small output takes 5 us.
            try:
                if sys._getframe(self._heights[id(module)]) is place.frames[0]:
                    return
            except (KeyError, ValueError):
                pass
            height = _height(place.frames[0])
            if height is not None:
                if len(self._heights) > 2 * len(self._known.members):
                    self._heights.clear()
                self._heights[id(module)] = height
                return
            place.frames = ()
            if self.in_c is not None:
                self.in_c.leave()
        caller = called_by(sys._getframe(1))
        if place.late is not None:
            if place.late.is_in(caller):
                return
            place.late = None
        if _backward_pass() != -1:
            return
        if (direct := self._called_directly(caller)) is not None:
            parent, frame = direct
            late = all(child is not module for child in parent.children())
            self._enter_directly(place, parent, frame, late)
            return
        place.frames = caller, caller and caller.f_back
        self._begin(place, module, caller)
        self._tell(place, module, args, kwargs)

    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        """The forward hook of watched modules: a call ends, perhaps with an exception."""
        place = self._places.own
        caller = called_by(sys._getframe(1))
        if caller is not None and caller in place.frames:
            place.frames = ()
            error = sys.exc_info()[1] if _handles_exception(caller) else None
            self.seen_to_end |= place.mine and error is None
            if place.given is not None:
                given, place.given = place.given, None
                self._observer.ends(given, output, error)
            if self.in_c is not None:
                self.in_c.leave()

    def forget(self) -> None:
        """Drops the state that interrupted calls have left. Call it when the capture has ended."""
        self._places = _Places(self._modules)
        self._heights.clear()

    def _begin(self, place: Place, module: nn.Module | None, frame: FrameType | None) -> None:
        place.again = False
        place.mine = self._mine is None or self._mine()
        if not place.mine:
            self._outside(place)
            place.method = None
            if self.in_c is not None:
                self.in_c.leave()  # ends a step that an interrupted call may have left open
            return
        if not self._goes_on(place, module, frame):
            place.step, place.skipped = self.numbers.next()
            place.token = self._observer.token()
            place.request = self._observer.request()
            place.calls[:] = place.never
            place.entered.clear()
        if place.skipped:
            place.mine = False
        # Hooks in C learn a step's end from leave() only, and no hook reports that of a late call.
        if self.in_c is None or place.late is not None:
            return
        if place.skipped:
            self.in_c.skip()
        else:
            self.in_c.enter(place.calls, place.step, place.token, place.request)

    def _called_directly(self, frame: FrameType | None) -> tuple[nn.Module, FrameType] | None:
        """The outermost ``forward`` of a module of the models that runs, with its frame."""
        found = None
        while frame is not None:
            if id(original_code(frame.f_code)) in self._known.forwards:
                module = frame.f_locals.get(frame.f_code.co_varnames[0])
                if isinstance(module, nn.Module) and id(module) in self._known.members:
                    found = module, frame
            frame = frame.f_back
        return found

    def _enter_directly(
        self, place: Place, module: nn.Module, frame: FrameType, late: bool
    ) -> None:
        """Begins the step of a module whose ``forward`` runs, and was called as a method."""

        def ended(given: Any) -> None:
            self._observer.ends(given, None, None)

        place.late = Running(frame)
        self._begin(place, module, frame.f_back)
        self._tell(place, module, *_arguments(frame), late)
        if place.given is not None:
            place.late.then(functools.partial(ended, place.given))
            place.given = None

    def _enter_compiled(self, place: Place, frame: FrameType | None) -> None:
        """Begins the step of a compiled function or method that runs parts of a model.

        The calls of the parts are no frames of their own, so all of them are one step.

        Args:
            frame: the outermost compiled code that runs; None: the user called a hook directly.
        """
        if frame is None:
            self._outside(place)
            return
        if place.method is not None and place.method.is_in(frame):
            place.late = Running(frame)  # it has called parts that are not compiled
            return
        names = frame.f_code.co_varnames[: frame.f_code.co_argcount]
        module = frame.f_locals.get(names[0]) if names else None
        if isinstance(module, nn.Module) and id(module) in self._known.members:
            self._enter_directly(place, module, frame, late=True)
            return
        place.late = Running(frame)
        self._begin(place, None, frame)  # what a function was given is not known

    def _tell(
        self, place: Place, module: nn.Module, args: Any, kwargs: Any, late: bool = False
    ) -> None:
        """Reports what an outermost call was given."""
        place.given = None  # perhaps that of an interrupted call
        if place.step >= 0:
            step = None if place.skipped else place.step
            place.given = self._observer.begins(module, args, kwargs, step, late)

    @staticmethod
    def _outside(place: Place) -> None:
        place.step = place.token = -1
        place.request = 0

    def _goes_on(self, place: Place, module: nn.Module | None, frame: FrameType | None) -> bool:
        """Whether this call continues a step: the same method made the last outermost call."""
        while (frame := called_by(frame)) and frame.f_code.co_filename == _CALL.co_filename:
            frame = frame.f_back
        if (
            frame is None
            or module is None
            or id(module) in self._known.roots
            or original_code(frame.f_code) not in self._known.methods
        ):
            place.method = None
            return False
        if (
            place.method is not None
            and place.method.is_in(frame)
            and id(module) not in place.called
            and place.request == self._observer.request()
        ):
            place.called.add(id(module))
            return True
        place.method, place.called = Running(frame), {id(module)}
        return False

    def _find(self, place: Place) -> None:
        """Begins the step of the running call, if it entered the model at an unwatched module."""
        if place.late is not None and place.late.is_in(sys._getframe(1)):
            return
        place.frames, place.late = (), None
        place.mine = self._mine is None or self._mine()
        place.again = _backward_pass() != -1
        if place.again:
            place.mine = place.mine and not self.numbers.leaves_out
            self._outside(place)
            return
        frame: FrameType | None = sys._getframe(1)
        outermost, entered, compiled = None, None, None
        while frame is not None:
            code = original_code(frame.f_code)
            if code in _CALLS or id(code) in self._known.forwards:
                module = frame.f_locals.get(frame.f_code.co_varnames[0])
                if id(module) in self._known.members:
                    outermost, entered = frame, module
            elif code is not frame.f_code:
                compiled = frame
            frame = frame.f_back
        if outermost is None or entered is None:
            self._enter_compiled(place, compiled)
            return
        if original_code(outermost.f_code) not in _CALLS:
            self._enter_directly(place, entered, outermost, late=True)
            return
        self.entries.watch(entered)
        place.late = Running(outermost)
        self._begin(place, entered, outermost)
        found = outermost.f_locals
        self._tell(place, entered, found.get("args", ()), found.get("kwargs", {}), late=True)
        place.given = None  # no hook reports the end of this call
