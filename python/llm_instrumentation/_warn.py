"""Warnings that point to the line of the program that they are about."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import warnings
from types import FrameType

__all__ = ["warn"]

_OURS = os.path.dirname(os.path.abspath(__file__)) + os.sep
_BETWEEN = {contextlib.__file__, threading.__file__}


def warn(message: str) -> None:
    """Issues a RuntimeWarning at the first frame that is the program's.

    Frames of this package, of contextlib, of threading and of torch are not: the end of a block is
    called by contextlib, and a hook by torch. Where the program has no frame, as in a thread of
    our own, the warning points to the caller.
    """
    level, frame = 2, sys._getframe(1)
    at: FrameType | None = frame
    while at is not None and not _of_the_program(at):
        at, level = at.f_back, level + 1
    warnings.warn(message, RuntimeWarning, stacklevel=2 if at is None else level)


def _of_the_program(frame: FrameType) -> bool:
    file = frame.f_code.co_filename
    package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
    return not (file.startswith(_OURS) or file in _BETWEEN or package == "torch")
