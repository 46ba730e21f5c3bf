"""A bounded first-in, first-out byte buffer between threads, for programs of your own.

Captures do not use it: libstrap has its own staging memory.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

__all__ = ["RingBuffer"]


class RingBuffer:
    """A ring of bytes of fixed size that any number of threads may fill and empty.

    A `put` adds all of its bytes or none. Waiting threads are served in the order in which they
    came, so smaller calls cannot overtake a large `put` for ever. `len()` is the number of bytes in
    the ring. Captures do not use this class.
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
        """Appends `data`. Waits for room.

        Args:
            data: any contiguous buffer; it is copied.
            timeout: seconds to wait at most; 0 does not wait.

        Returns:
            True if the data is in the ring; False after the timeout, and nothing was added.

        Raises:
            ValueError: data is larger than the ring, or timeout is negative or NaN.
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
        """Removes the oldest bytes and returns them. Waits until the ring has any.

        Args:
            max_bytes: number of bytes to take at most.
            timeout: seconds to wait at most; 0 does not wait.

        Returns:
            1 to max_bytes bytes; b"" after the timeout, or if max_bytes is 0.

        Raises:
            ValueError: max_bytes is negative, or timeout is negative or NaN.
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
        """The number of bytes in the ring now."""
        with self._lock:
            return self._held

    @property
    def capacity(self) -> int:
        """The number of bytes that the ring can hold."""
        return len(self._ring)

    @property
    def free_space(self) -> int:
        """The number of free bytes now."""
        with self._lock:
            return self.capacity - self._held


class _Line:
    """A line of waiting threads. Only the first may go on. Call its methods with the lock held."""

    def __init__(self, lock: threading.Lock) -> None:
        self._lock = lock
        self._waiting: deque[threading.Condition] = deque()

    def wait_turn(self, ready: Callable[[], bool], timeout: float) -> bool:
        """Waits until the caller is first in the line and `ready()` is true.

        After True the caller must call `leave`. After False, at the timeout, it is out of the line.
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
        except BaseException:  # such as Ctrl-C: the line must go on without this thread
            self._remove(me)
            raise
        return True

    def leave(self) -> None:
        """Removes the first thread, which has done its work, and wakes the next one."""
        self._waiting.popleft()
        self.wake_first()

    def wake_first(self) -> None:
        """Wakes the first thread, which then checks `ready` again."""
        if self._waiting:
            self._waiting[0].notify()

    def _remove(self, member: threading.Condition) -> None:
        self._waiting.remove(member)
        self.wake_first()
