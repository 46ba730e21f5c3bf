"""The counters of a running capture."""

from __future__ import annotations

import contextlib
import threading
import time

from ..._native import Session
from ...errors import StrapError
from ..calls.call_log import CallLog
from ..calls.step_numbers import StepNumbers
from ..hooking.attached import AttachedHooks
from ..stats import CaptureStats

__all__ = ["CaptureCounters"]


class CaptureCounters:
    """Reads the counters of a capture.

    Args:
        session: the session of the capture.
        numbers: the numbers of its steps.
        hooks: its hooks.
        log: its calls.

    Attributes:
        last: the counters when they were last read.
    """

    def __init__(
        self, session: Session, numbers: StepNumbers, hooks: AttachedHooks, log: CallLog
    ) -> None:
        self.last = CaptureStats(session.path)
        self._session = session
        self._numbers = numbers
        self._first_step = numbers.count
        self._hooks = hooks
        self._log = log
        self._began = time.monotonic()
        self._lock = threading.RLock()  # reentrant, because a signal handler may read, too

    def read(self) -> CaptureStats:
        """The present counters, or the final ones after the capture has finished."""
        if not self._session.closed:
            # Another thread may close the session now; the previous counters then remain. The
            # lock keeps a thread from replacing newer counters by older ones.
            with self._lock, contextlib.suppress(StrapError):
                self.last = CaptureStats.of(
                    self._session.path,
                    self._session.stats(),
                    steps=self._numbers.count - self._first_step,
                    skipped_steps=self._numbers.skipped,
                    seconds=time.monotonic() - self._began,
                    silent=self._hooks.silent(),
                    lost_calls=self._log.lost,
                )
        return self.last

    def poll(self) -> CaptureStats | None:
        """The present counters; None: the capture is closed."""
        return None if self._session.closed else self.read()
