"""A file that is read and written past the page cache."""

from __future__ import annotations

import errno
import fcntl
import os
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt

__all__ = ["BLOCK", "DirectFile"]

BLOCK = 4096  # places and sizes are multiples of it

_DIRECT = getattr(os, "O_DIRECT", 0)
_TIMED_BYTES = 96 << 20  # before the rate of the disk is known
_LEAST_RATE = 500e6  # bytes a second

Bytes = npt.NDArray[np.uint8]


class DirectFile:
    """A file that is read and written past the page cache, or through it where that is refused.

    A disk with less than 500 MB/s is read through the page cache, where a later read of the same
    bytes may find them. Memory that is read or written begins at a page. Any number of threads can
    write, one can read.

    Args:
        path: the file.
        write: create it if need be, and open it for writes too.
    """

    def __init__(self, path: Path, *, write: bool = False) -> None:
        flags = os.O_CLOEXEC | (os.O_RDWR | os.O_CREAT if write else os.O_RDONLY)
        try:
            self._file = os.open(path, flags | _DIRECT, 0o666)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            self._file = os.open(path, flags, 0o666)
        self._direct = bool(fcntl.fcntl(self._file, fcntl.F_GETFL) & _DIRECT)
        self._read_bytes, self._read_seconds = 0, 0.0

    def _use_cache(self) -> None:
        flags = fcntl.fcntl(self._file, fcntl.F_GETFL)
        fcntl.fcntl(self._file, fcntl.F_SETFL, flags & ~_DIRECT)
        self._direct = False

    def resize(self, size: int) -> None:
        """Gives the file a size, and the disk's room for it."""
        if hasattr(os, "posix_fallocate") and size:
            os.posix_fallocate(self._file, 0, size)
        else:
            os.ftruncate(self._file, size)

    def write(self, data: Bytes, at: int) -> None:
        """Writes bytes to a place."""
        if not self._all(lambda left, at: os.pwrite(self._file, left, at), data, at):
            raise OSError(errno.EIO, "the disk takes no bytes")

    def read(self, into: Bytes, at: int) -> bool:
        """Fills memory from a place. False if the file ends before."""
        began = time.monotonic()
        if not self._all(lambda left, at: os.preadv(self._file, [left], at), into, at):
            return False
        self._read_bytes += len(into)
        self._read_seconds += time.monotonic() - began
        timed = self._direct and self._read_bytes >= _TIMED_BYTES
        if timed and self._read_bytes < _LEAST_RATE * self._read_seconds:
            self._use_cache()
        return True

    def _all(self, move: Callable[[memoryview, int], int], data: Bytes, at: int) -> bool:
        """Moves bytes from or to a place. False if a move of none ends it before."""
        left = data.data
        while len(left):
            direct = self._direct
            try:
                done = move(left, at)
            except OSError as error:
                # Blocks are larger here. Another thread may have found that out too.
                if error.errno != errno.EINVAL or not direct:
                    raise
                self._use_cache()
                continue
            if done == 0:
                return False
            left, at = left[done:], at + done
        return True

    def sync(self) -> None:
        """Makes durable what was written."""
        os.fsync(self._file)

    def close(self) -> None:
        os.close(self._file)
