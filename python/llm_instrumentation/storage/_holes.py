"""Gives the disk blocks of a range of a file back to the file system."""

from __future__ import annotations

import ctypes
import functools
import os
from typing import Any

from ..errors import StrapIOError

__all__ = ["punch_hole"]

_KEEP_SIZE, _PUNCH_HOLE = 1, 2  # of linux/falloc.h


@functools.cache
def _fallocate() -> Any:
    function = ctypes.CDLL(None, use_errno=True).fallocate64
    function.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
    return function


def punch_hole(descriptor: int, offset: int, length: int, path: str) -> None:
    """Makes a range of a file zeros that take no room on the disk.

    Raises:
        StrapIOError: the file system has no holes.
    """
    if _fallocate()(descriptor, _KEEP_SIZE | _PUNCH_HOLE, offset, length):
        number = ctypes.get_errno()
        raise StrapIOError(
            number,
            f"cannot free a part of {path} ({os.strerror(number)}): choose a cache folder on a "
            "local file system, by STRAP_CACHE_FOLDER",
        )
