"""The streams of a capture: one, or one for each segment."""

from __future__ import annotations

from collections.abc import Callable

from ..._native import Session
from ...errors import StrapTimeoutError
from ..calls.call_log import CallLog
from ..tensors.sink import TensorSink
from ..tokens import TokenTracker
from .held_calls import HeldCalls

__all__ = ["Streams"]


class Streams:
    """Makes the streams of a capture durable, and begins the next one.

    Args:
        session: the session of the capture.
        sink: the sink in front of the session.
        log: the calls of the capture.
        tracker: counts its tokens; None: they are not tracked.
        held: the calls of the steps in the ring of the session; None: it has no ring.

    Attributes:
        paths: the streams so far.
    """

    def __init__(
        self,
        session: Session,
        sink: TensorSink,
        log: CallLog,
        tracker: TokenTracker | None,
        held: HeldCalls | None,
    ) -> None:
        self.paths = [session.path]
        self._session = session
        self._sink = sink
        self._log = log
        self._tracker = tracker
        self._held = held

    def checkpoint(self) -> int:
        """Makes everything captured so far durable; returns the stream's length in bytes."""
        self._sink.flush()
        length = self._session.checkpoint()
        self._log.sync()  # after it, because a call begins before its tensors
        return length

    def roll(self, path: str) -> str:
        """Lets the tensors to come go to a new stream; returns its id."""
        self._sink.flush()  # copies from devices belong to the steps before
        self._session.roll(path)
        capture_id = self._session.capture_id
        self.paths.append(path)
        self._log.roll(path, capture_id)
        if self._tracker is not None:
            self._tracker.capture_id = capture_id
        return capture_id

    def dump(self, path: str) -> str:
        """Writes what the ring keeps, and all to come until :meth:`end_dump`; returns its id."""
        assert self._held is not None
        self._sink.flush()
        ring = self._session.stats()
        self._session.dump(path)
        self._held.begin(self._log.writer(path, self._session.capture_id), ring)
        self.paths.append(path)
        return self._session.capture_id

    def end_dump(self) -> Callable[[], None]:
        """Lets the ring keep what comes. Returns what waits until the dump is durable."""
        assert self._held is not None
        self._sink.flush()
        self._session.end_dump()
        close = self._held.end()

        def finish() -> None:
            try:
                self._session.checkpoint()
            finally:
                close()

        return finish

    def sealed(self) -> bool:
        """Waits a moment until the streams before are durable; returns whether they are."""
        try:
            self._session.checkpoint(timeout=0.1)
            self._log.sync(0.1)
        except StrapTimeoutError:
            return False
        return True
