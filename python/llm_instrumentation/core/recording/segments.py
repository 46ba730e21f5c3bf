"""Lets a running capture go on in new segments, and removes old ones."""

from __future__ import annotations

import os
import threading
import time
from typing import Protocol

from ..config import InstrumentationConfig
from ..files.run_records import Shard
from ..tensors.capture_state import CaptureState
from .capture_counters import CaptureCounters
from .streams import Streams

__all__ = ["Segments"]

_INTERVAL = 0.05


class Rank(Protocol):
    """The files of this process in the run folder."""

    def next_path(self) -> str:
        """The stream of the next segment."""

    def rolled(self, capture_id: str) -> None:
        """Tells that the next segment has begun."""

    def sealed(self) -> None:
        """Tells that the segment before the last is durable and closed."""

    def kept(self) -> list[tuple[Shard, int]]:
        """The sealed segments that are there, the oldest first, and the bytes of their files."""

    def expire(self, shard: Shard, reason: str) -> None:
        """Removes a sealed segment."""


class Segments:
    """A thread that looks how long the segment is, and a step that begins the next one.

    The thread asks for a new segment. The next step of a model calls :meth:`step`, so a segment
    begins with a step. Then the thread waits until the segment before is sealed, and writes that
    down.

    Args:
        config: says how long segments are, and which are kept.
        rank: the files of this process.
        counters: the counters of the capture.
        streams: begins the next stream.
        state: receives an error; no more segments are begun then.
    """

    def __init__(
        self,
        config: InstrumentationConfig,
        rank: Rank,
        counters: CaptureCounters,
        streams: Streams,
        state: CaptureState,
    ) -> None:
        self._config = config
        self._rank = rank
        self._counters = counters
        self._streams = streams
        self._state = state
        self._pid = os.getpid()
        self._began = time.monotonic()
        self._ends: dict[str, float] = {}  # when each sealed segment ended, by path
        self._lock = threading.Lock()
        self._begun: str | None = None  # the id of a segment that the thread has not seen yet
        self._rolled = threading.Event()
        self._stop = threading.Event()
        #: A new segment is wanted. Read without the lock, in each step.
        self.wanted = False
        self._thread = threading.Thread(target=self._run, name="strap-segments", daemon=True)
        self._thread.start()

    def step(self) -> None:
        """Begins the segment that is wanted. A step calls it before anything of it is captured."""
        if os.getpid() != self._pid:  # a fork captures nothing
            return
        with self._lock:
            if not self.wanted:  # another thread's step was first
                return
            self.wanted = False
            try:
                self._begun = self._streams.roll(self._rank.next_path())
            except Exception as error:  # the model goes on
                self._state.fail(error)
                self._stop.set()
            self._rolled.set()

    def stop(self) -> None:
        """Ends the thread, before the capture is closed. No further segment begins."""
        with self._lock:
            self.wanted = False
            self._stop.set()
            self._rolled.set()
        if self._thread is not threading.current_thread():
            self._thread.join()

    # ---- the thread -----------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._stop.wait(_INTERVAL):
                self._expire()
                if not self._full():
                    continue
                self.wanted = True
                self._rolled.wait()
                self._rolled.clear()
                self._note()
            self._note()  # a segment that began just before the end
        except Exception as error:
            self._state.fail(error)

    def _full(self) -> bool:
        """Whether the segment is long enough."""
        config, stats = self._config, self._counters.poll()
        if stats is None or not stats.file_bytes:  # a segment without packets is no use
            return False
        if config.segment_s is not None and time.monotonic() - self._began >= config.segment_s:
            return True
        if config.segment_gb is None:
            return False
        waiting = stats.queued_bytes / max(stats.ratio, 1.0)
        return stats.file_bytes + waiting >= config.segment_gb * 1e9

    def _note(self) -> None:
        """Writes down that a segment has begun, and that the one before is sealed."""
        with self._lock:
            begun, self._begun = self._begun, None
        if begun is None:
            return
        self._began = time.monotonic()
        self._rank.rolled(begun)
        while not self._stop.is_set():
            if self._streams.sealed():
                self._rank.sealed()
                return

    def _expire(self) -> None:
        """Removes the segments that are not to be kept."""
        config = self._config
        if config.keep_gb is None and config.keep_s is None:
            return
        kept, now = self._rank.kept(), time.monotonic()
        size = sum(one for _, one in kept)
        for shard, its in kept:
            ended = self._ends.setdefault(shard.path, now)
            if config.keep_gb is not None and size > config.keep_gb * 1e9:
                self._rank.expire(shard, f"keep_gb = {config.keep_gb:g}")
            elif config.keep_s is not None and now - ended > config.keep_s:
                self._rank.expire(shard, f"keep_s = {config.keep_s:g}")
            else:
                continue
            size -= its
            del self._ends[shard.path]
