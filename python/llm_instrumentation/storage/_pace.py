"""Bounds the rate at which bytes are sent, over all files of an upload."""

from __future__ import annotations

import threading
import time

from ..errors import InvalidStateError

__all__ = ["Pace"]


class Pace:
    """Lets bytes through at a rate, until it is stopped. Thread-safe.

    Args:
        bytes_per_second: the rate; None: as fast as they come.

    Attributes:
        passed: bytes that were let through.
    """

    def __init__(self, bytes_per_second: float | None) -> None:
        self._rate = bytes_per_second
        self._lock = threading.Lock()
        self._free = time.monotonic()  # when the next byte may go
        self._stopped = threading.Event()
        self.passed = 0

    def stop(self) -> None:
        """Ends the waits: `wait_for` raises from now on."""
        self._stopped.set()

    def wait_for(self, count: int) -> None:
        """Waits until so many more bytes may go.

        Raises:
            InvalidStateError: it was stopped.
        """
        with self._lock:
            self.passed += count
            at = max(self._free, time.monotonic())
            self._free = at if self._rate is None else at + count / self._rate
        if self._stopped.wait(max(0.0, at - time.monotonic())):
            raise InvalidStateError("the upload was stopped: run it again, and it goes on")
