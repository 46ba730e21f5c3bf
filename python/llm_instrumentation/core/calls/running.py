"""Recognises a call of a function while it runs."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any

__all__ = ["Running"]


class _Mark:
    """Marks a frame as its local trace function. A tracer may call it; it does nothing."""

    __slots__ = ("__weakref__",)

    def __call__(self, frame: FrameType, event: str, argument: Any) -> _Mark:
        return self


class Running:
    """Recognises a call of a function while it runs.

    To keep the frame would keep alive everything that the function and its callers hold. So the
    frame holds a mark and this object a weak reference to it. When the mark is gone, the frame has
    ended, and its address may belong to another frame.
    """

    __slots__ = ("_address", "_mark")

    def __init__(self, frame: FrameType) -> None:
        mark = frame.f_trace
        if not isinstance(mark, _Mark):
            mark = _Mark()
            if frame.f_trace is None:  # otherwise a debugger's: the mark then ends at once
                frame.f_trace = mark
        self._address, self._mark = id(frame), weakref.ref(mark)

    def then(self, ended: Callable[[], object]) -> None:
        """Calls a function when this call has ended."""
        mark = self._mark()
        if mark is not None:
            weakref.finalize(mark, ended).atexit = False

    def is_in(self, frame: FrameType | None) -> bool:
        """Whether `frame` belongs to this call, or to a call that this call made."""
        if self._mark() is None:
            return False
        while frame is not None and id(frame) != self._address:
            frame = frame.f_back
        return frame is not None
