"""Keeps the calls of the last steps in memory, and writes those that a dump wants."""

from __future__ import annotations

import threading
from collections.abc import Callable

from ..._native import SessionStats
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
        ring: tells of the ring.

    Attributes:
        lost: the number of calls that could not be recorded.
    """

    def __init__(self, ring: Callable[[], SessionStats]) -> None:
        self._ring = ring
        self._lock = threading.RLock()  # reentrant, because a signal handler may call a model
        # The lock guards all below.
        self._kept: list[tuple[WaitingCall | RefusedTokens, int]] = []  # with their bytes
        self._written = 0  # so many of them, from the first on, are in an earlier dump
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
                self._drop_old(self._ring())

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

    def begin(self, writer: CallWriter, ring: SessionStats) -> None:
        """Writes the calls of the steps in the ring, and all to come until :meth:`end`.

        Args:
            writer: the writer of the dump.
            ring: the ring before the dump.
        """
        with self._lock:
            self._drop_old(ring)
            self._writer = writer
            self._written = len(self._kept)
            for one, size in self._kept:
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

    def _drop_old(self, ring: SessionStats) -> None:
        """Keeps the calls of steps in the ring, and of those whose tensors may still come."""

        def waits(number: int, step: int) -> bool:
            if ring.ring_steps and step >= ring.ring_oldest_step:
                return True
            return number >= self._written and step > ring.ring_gone_step

        kept = [waits(number, one.step) for number, (one, _) in enumerate(self._kept)]
        self._written = sum(kept[: self._written])
        self._kept = [one for one, keep in zip(self._kept, kept, strict=True) if keep]
        self._calls = self._bytes = 0
