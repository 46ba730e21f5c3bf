"""Watches a running capture: the progress line, and the room left on the disk."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable

from ..._notebook import in_notebook
from ..._pages import units
from ..._warn import warn
from ...progress.notebook import NotebookLine
from ...progress.terminal import BottomLine, Lines
from ..stats import CaptureStats

__all__ = ["Monitor"]

_INTERVAL = 0.5
# Warn when the file system will be full within this time at the present rate.
_HORIZON_SECONDS = 60.0


class Monitor:
    """A thread that reads the counters twice a second until it is stopped.

    Args:
        path: the stream.
        read: reads the counters; None: the capture has ended.
        progress: show the progress line; None: on a terminal and in a notebook.
        compiling: for how many seconds torch has been compiling the model; 0: it is not. None: it
            never does.
    """

    def __init__(
        self,
        path: str,
        read: Callable[[], CaptureStats | None],
        progress: bool | None,
        compiling: Callable[[], float] | None,
    ) -> None:
        self._path = path
        self._read = read
        self._compiling = compiling
        self._progress = sys.stderr.isatty() or in_notebook() if progress is None else progress
        self._stop = threading.Event()
        self._warned = False
        self._last: CaptureStats | None = None
        self.draining = False  # the capture ends: the line shows how long the writing will take
        self._thread = threading.Thread(target=self._run, name="strap-monitor", daemon=True)
        self._thread.start()

    def stop(self, last: CaptureStats) -> None:
        """Ends the thread. A notebook keeps a line with the capture's last counters."""
        self._last = last
        self._stop.set()
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        if not self._progress:
            self._watch(lambda stats: None)
            return
        before = CaptureStats(self._path)
        line = _line()

        def show(stats: CaptureStats) -> None:
            nonlocal before
            drained = (before.queued_bytes - stats.queued_bytes) / _INTERVAL
            text = _describe(stats, drained if self.draining else None)
            if self._compiling is not None and (seconds := self._compiling()) > 0:
                text += f", torch compiles the model for the capture: {seconds:.0f} s"
            line.show(text)
            before = stats

        try:
            self._watch(show)
        finally:
            if isinstance(line, NotebookLine):
                line.close(_describe(self._last or before))
            else:
                line.close()

    def _watch(self, show: Callable[[CaptureStats], None]) -> None:
        began, first = time.monotonic(), None
        while not self._stop.wait(_INTERVAL):
            stats = self._read()
            if stats is None:
                return
            show(stats)
            if first is None:
                first = stats.stored_bytes
            elif not self._warned:
                self._check_disk((stats.stored_bytes - first) / (time.monotonic() - began))

    def _check_disk(self, rate: float) -> None:
        if rate <= 0:
            return
        try:
            fs = os.statvfs(self._path)
        except OSError:  # the file was moved away: nothing to watch
            return
        free = fs.f_bavail * fs.f_frsize
        if free < rate * _HORIZON_SECONDS:
            self._warned = True
            warn(
                f"the file system of {self._path} has {units.size(free)} left: at "
                f"{units.size(rate)}/s that lasts {free / rate:.0f} s. A full disk ends the "
                "capture and keeps what is written"
            )


def _line() -> NotebookLine | BottomLine | Lines:
    if in_notebook():
        return NotebookLine()
    return BottomLine(sys.stderr.fileno()) if sys.stderr.isatty() else Lines(sys.stderr)


def _describe(s: CaptureStats, drained: float | None = None) -> str:
    """The progress line.

    Args:
        drained: the rate at which the queue is written at the capture's end, in bytes per second;
            None: the capture goes on.
    """
    text = (
        f"{s.packets:,} packets, {units.size(s.raw_bytes)} -> {units.size(s.stored_bytes)} "
        f"({s.ratio:.2f}x), queue {units.size(s.queued_bytes)}"
    )
    if drained is not None:
        text += " to write"
        if drained > 0:
            text += f", {s.queued_bytes / drained:.0f} s left"
    if s.stalls:
        text += f", {s.stalls:,} stalls ({s.stall_seconds:.1f} s)"
    if s.dropped:
        text += f", {s.dropped:,} dropped"
    if s.failed:
        text += f", {s.failed:,} not captured"
    return text
