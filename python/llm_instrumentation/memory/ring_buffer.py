"""A bounded first-in, first-out byte buffer between threads, for programs of your own.

Captures do not use it: libstrap keeps their tensors in its own staging memory.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

__all__ = ["RingBuffer"]


class RingBuffer:
    """A byte ring of fixed size that any number of threads may fill and empty.

    Each `put` is in the ring as a whole or not at all. Threads that wait are served in the order
    in which they came, so that a large `put` is not overtaken by smaller ones for ever. Captures do
    not use this class; it hands bytes from one thread of your program to another.
    """

    def __init__(self, size: int) -> None:
        """
        Args:
            size: capacity in bytes.

        Raises:
            ValueError: size is not positive.
        """
        if size <= 0:
            raise ValueError(f"Buffer size must be positive, not {size!r}")
        self._ring = bytearray(size)
        self._read_at = 0
        self._held = 0
        self._lock = threading.Lock()
        self._putters = _Line(self._lock)
        self._getters = _Line(self._lock)

    def put(self, data: bytes | bytearray | memoryview, timeout: float = 0.1) -> bool:
        """Appends `data`, waiting for room.

        Args:
            data: bytes, or any contiguous buffer; it is copied.
            timeout: seconds to wait at most; 0 does not wait.

        Returns:
            whether it is in the ring; False after the timeout, with nothing written.

        Raises:
            ValueError: data is larger than the ring, or timeout is no number from 0.
        """
        view = memoryview(data).cast("B")
        size = len(view)
        if size > self.capacity:
            raise ValueError(
                f"Data size exceeds buffer capacity: {size} bytes into {self.capacity}"
            )
        with self._lock:
            if not self._putters.wait_turn(lambda: self.capacity - self._held >= size, timeout):
                return False
            write_at = (self._read_at + self._held) % self.capacity
            before_end = min(size, self.capacity - write_at)
            self._ring[write_at : write_at + before_end] = view[:before_end]
            self._ring[: size - before_end] = view[before_end:]
            self._held += size
            self._putters.leave()
            self._getters.wake_first()
            return True

    def get(self, max_bytes: int, timeout: float = 0.1) -> bytes:
        """Takes the oldest bytes out, waiting until there are any.

        Args:
            max_bytes: how many at most.
            timeout: seconds to wait at most; 0 does not wait.

        Returns:
            1 to max_bytes bytes; none after the timeout, or when max_bytes is 0.

        Raises:
            ValueError: max_bytes is negative, or timeout is no number from 0.
        """
        if max_bytes < 0:
            raise ValueError(f"max_bytes must be 0 or more, not {max_bytes!r}")
        with self._lock:
            if not self._getters.wait_turn(lambda: self._held > 0 or max_bytes == 0, timeout):
                return b""
            size = min(max_bytes, self._held)
            before_end = min(size, self.capacity - self._read_at)
            view = memoryview(self._ring)
            data = b"".join(
                (view[self._read_at : self._read_at + before_end], view[: size - before_end])
            )
            self._read_at = (self._read_at + size) % self.capacity
            self._held -= size
            self._getters.leave()
            self._putters.wake_first()
            return data

    def __len__(self) -> int:
        """Bytes in the ring now."""
        with self._lock:
            return self._held

    @property
    def capacity(self) -> int:
        """Bytes that the ring holds at most."""
        return len(self._ring)

    @property
    def free_space(self) -> int:
        """Bytes that a `put` of now would find."""
        with self._lock:
            return self.capacity - self._held


class _Line:
    """Threads waiting in order of arrival; only the first may go on. Used with the lock held."""

    def __init__(self, lock: threading.Lock) -> None:
        self._lock = lock
        self._waiting: deque[threading.Condition] = deque()

    def wait_turn(self, ready: Callable[[], bool], timeout: float) -> bool:
        """Waits until the caller is first and `ready()`; then the caller must call `leave`.

        False after the timeout, and the caller is out of the line.
        """
        if not timeout >= 0:  # also refuses NaN
            raise ValueError(f"timeout must be 0 or more seconds, not {timeout!r}")
        deadline = time.monotonic() + timeout
        me = threading.Condition(self._lock)
        self._waiting.append(me)
        try:
            while self._waiting[0] is not me or not ready():
                left = deadline - time.monotonic()
                if left <= 0:
                    self._remove(me)
                    return False
                me.wait(min(left, threading.TIMEOUT_MAX))
        except BaseException:  # an interrupt: the line must go on without this thread
            self._remove(me)
            raise
        return True

    def leave(self) -> None:
        """Takes the first out, whose work is done; there may be something left for the next."""
        self._waiting.popleft()
        self.wake_first()

    def wake_first(self) -> None:
        """Lets the first look again."""
        if self._waiting:
            self._waiting[0].notify()

    def _remove(self, member: threading.Condition) -> None:
        self._waiting.remove(member)
        self.wake_first()
