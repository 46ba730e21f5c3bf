"""Keeps the calls of the last steps in memory, and writes those that a dump wants."""

from __future__ import annotations

import threading
from collections.abc import Callable

from ..calls.call_writer import CallWriter
from ..calls.waiting_calls import RefusedTokens, Roll, WaitingCall

__all__ = ["HeldCalls"]

# Calls of steps that have given way are looked for when so many calls, or so many bytes of them,
# were added.
_SOME_CALLS = 1000
_SOME_BYTES = 8 << 20


class HeldCalls:
    """The calls of a capture whose session keeps the last steps in a ring.

    Args:
        oldest: tells the oldest step in the ring; a negative number: the ring is empty.

    Attributes:
        lost: the number of calls that could not be recorded.
    """

    def __init__(self, oldest: Callable[[], int]) -> None:
        self._oldest = oldest
        self._lock = threading.RLock()  # reentrant, because a signal handler may call a model
        # The lock guards all below.
        self._kept: list[tuple[WaitingCall | RefusedTokens, int]] = []  # with their bytes
        self._calls = self._bytes = 0  # added since the last look for old ones
        self._writer: CallWriter | None = None  # of the dump that is being written
        self._lost = 0

    @property
    def lost(self) -> int:
        with self._lock:
            return self._lost + (0 if self._writer is None else self._writer.lost)

    def add(self, call: WaitingCall, size: int) -> None:
        """Takes a call. `size` is its bytes in memory."""
        with self._lock:
            if self._writer is not None:
                self._writer.add(call, size)
            # Kept too: the tensors of its step may come after the end of the dump.
            self._kept.append((call, size))
            self._calls += 1
            self._bytes += size
            if self._calls > _SOME_CALLS or self._bytes > _SOME_BYTES:
                self._drop_old()

    def note(self, note: RefusedTokens | Roll) -> None:
        """Takes what is no call, in its order among the calls."""
        assert not isinstance(note, Roll)  # a capture with a ring has no segments
        with self._lock:
            if self._writer is not None:
                self._writer.note(note)
            self._kept.append((note, 0))

    def lose(self) -> None:
        """Counts a call that could not be taken."""
        with self._lock:
            self._lost += 1

    def begin(self, writer: CallWriter, oldest: int) -> None:
        """Writes the calls from the step `oldest` on, and all to come until :meth:`end`."""
        with self._lock:
            self._writer = writer
            for one, size in self._kept:
                if one.step < oldest:
                    continue
                if isinstance(one, WaitingCall):
                    writer.add(one, size)
                else:
                    writer.note(one)

    def end(self) -> Callable[[], None]:
        """Keeps the next calls. Returns what waits until those of the dump are in its file."""
        with self._lock:
            writer, self._writer = self._writer, None

        def close() -> None:
            if writer is not None:
                writer.close()
                with self._lock:
                    self._lost += writer.lost

        return close

    def sync(self, timeout_s: float | None = None) -> None:
        """As :meth:`CallWriter.sync`, of the dump that is being written."""
        if self._writer is not None:
            self._writer.sync(timeout_s)

    def close(self, timeout_s: float | None = None) -> None:
        """As :meth:`CallWriter.close`, of the dump that is being written."""
        if self._writer is not None:
            self._writer.close(timeout_s)

    def abandon(self) -> None:
        """Drops the calls that are kept, and those of a dump that are not yet written."""
        with self._lock:
            self._kept.clear()
            if self._writer is not None:
                self._writer.abandon()

    def _drop_old(self) -> None:
        oldest = self._oldest()
        self._kept = [(one, size) for one, size in self._kept if one.step >= oldest]
        self._calls = self._bytes = 0
