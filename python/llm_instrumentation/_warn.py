"""Issues warnings that point to the line of the user's program."""

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
    """Issues a RuntimeWarning that points to the innermost frame of the user's program.

    Frames of this package, contextlib, threading and torch are skipped, because contextlib calls
    the end of a block and torch calls hooks. If the program has no frame, as in a thread of this
    package, the warning points to the caller of this function.
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
