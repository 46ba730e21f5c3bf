"""Ends a capture: writes the queued packets and closes the session, however slow the disk is."""

from __future__ import annotations

import time
from collections.abc import Callable

from ..._native import Session
from ..._warn import warn
from ...errors import StrapTimeoutError
from ..calls.call_log import CallLog
from ..tensors.sink import TensorSink
from .capture_counters import CaptureCounters

__all__ = ["Ending"]

# After Ctrl-C the end of a block gives up a writer that made no progress for this long.
_PATIENCE_SECONDS = 0.5
# The end of a block warns after the writer made no progress for this long.
_SILENCE_SECONDS = 10.0


class Ending:
    """The end of a capture.

    Args:
        session: the session of the capture.
        sink: the sink in front of the session.
        log: the calls of the capture.
        counters: the counters of the capture.
        durable: make the stream durable, because a token file that follows is durable too. It is
            not made durable if Ctrl-C ended the block or the wait.

    Attributes:
        interrupted: by Ctrl-C: the rest of the work does not wait for the disk.
        gave_up: packets were lost, because the disk did not answer.
    """

    def __init__(
        self,
        session: Session,
        sink: TensorSink,
        log: CallLog,
        counters: CaptureCounters,
        *,
        durable: bool,
    ) -> None:
        self.interrupted = False
        self.gave_up = False
        self._session = session
        self._sink = sink
        self._log = log
        self._counters = counters
        self._durable = durable

    def drain(self) -> None:
        """Writes the queued packets and closes the session.

        Raises:
            StrapError: the packets cannot be written.
            KeyboardInterrupt: Ctrl-C ended the wait.
        """
        session, in_file, on_disk = self._session, False, False
        if session.closed:  # the interpreter ended before the block did
            return
        try:
            self._sink.close()
            self._wait(session.flush)
            in_file = True
            if self._durable and not self.interrupted:
                self._wait(session.checkpoint)
                self._wait(self._log.sync)
                on_disk = True
            self._wait(self._log.close)
            self._counters.read()
            self._wait(session.close)
        except (StrapTimeoutError, KeyboardInterrupt) as error:
            self.interrupted = True
            self._let_go(in_file, on_disk)
            if self.gave_up or isinstance(error, KeyboardInterrupt):
                raise
        except Exception:
            self._counters.read()
            self._log.abandon()
            if not session.closed:
                session.close()
            raise

    def _let_go(self, in_file: bool, on_disk: bool) -> None:
        """Closes the session after a wait was given up.

        Args:
            in_file: all packets are in the file.
            on_disk: all packets are durable: they survive a power failure.
        """
        session, lost = self._session, 0
        self._log.abandon()
        try:
            if in_file and not session.closed:
                self._counters.read()
                self._wait(session.close)
        except (StrapTimeoutError, KeyboardInterrupt):
            pass  # the disk is still syncing
        if not session.closed:
            self._counters.read()
            lost = session.discard()
        path = session.path
        if lost > 0 or not in_file:
            self.gave_up = True
            warn(f"{lost} packets are not in {path}: its disk did not answer in time")
        elif self._durable and not on_disk:
            warn(
                f"all packets are in {path}, but not on disk yet: if the power fails soon, "
                f"the end is lost; `sync {path} {path}.index` waits for the disk"
            )

    def _wait(self, call: Callable[[float], object]) -> None:
        """Repeats a call until it does not time out.

        Raises:
            StrapTimeoutError: Ctrl-C came before, and the writer makes no progress.
            KeyboardInterrupt: Ctrl-C came during the wait.
        """
        progress, since, told = None, time.monotonic(), False
        while True:
            try:
                call(0.1)
                return
            except StrapTimeoutError:
                s, path = self._counters.read(), self._session.path
                now = time.monotonic()
                if (mark := (s.packets, s.file_bytes)) != progress:
                    progress, since = mark, now
                elif self.interrupted and now - since >= _PATIENCE_SECONDS:
                    raise
                elif now - since >= _SILENCE_SECONDS and not told:
                    told = True
                    warn(
                        f"nothing was written to {path} for {now - since:.0f} s, "
                        f"{s.queued_packets} packets wait; Ctrl-C gives them up"
                        if s.queued_packets > 0
                        else f"all packets are in {path}, but its disk did not confirm that "
                        f"for {now - since:.0f} s; Ctrl-C ends the wait and keeps them"
                    )
