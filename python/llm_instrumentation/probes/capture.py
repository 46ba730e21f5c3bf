"""Probes that run as long as a capture, and write their snapshots beside its stream."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from .._warn import warn
from .block import BlockProbe
from .disks import disk_of
from .intervals import collect
from .jsonl import SnapshotWriter
from .probe import KernelProbe
from .system import SystemProbe
from .throttling import cpu_throttled_s

__all__ = ["CAPTURE", "PROBES", "CaptureProbes", "snapshot_path"]

#: The probes that a capture can have, by name.
PROBES: Mapping[str, Callable[[], KernelProbe]] = {"block": BlockProbe, "system": SystemProbe}
#: The name of the snapshots of the capture's own counters.
CAPTURE = "capture"


def snapshot_path(stream: str | os.PathLike[str], name: str) -> Path:
    """The file of the snapshots of a probe, or of :data:`CAPTURE`: ``STREAM.NAME.jsonl``."""
    return Path(f"{os.fspath(stream)}.{name}.jsonl")


class CaptureProbes:
    """Runs the probes of a capture and writes their snapshots beside its stream.

    The constructor starts the probes. Each interval adds one line to the file of each probe, and
    one line with the capture's counters. Without probes nothing is written.

    Args:
        stream: the capture's stream; the files are beside it.
        names: the probes, of :data:`PROBES`; may be empty.
        interval_s: seconds between snapshots.

    Raises:
        StrapError: a probe does not start; see :meth:`KernelProbe.start`. All files are unchanged.
    """

    def __init__(
        self, stream: str | os.PathLike[str], names: Sequence[str], interval_s: float
    ) -> None:
        self._stream = os.fspath(stream)
        self._interval_s = interval_s
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._closing = ExitStack()
        self._sources: dict[str, Callable[[], dict[str, Any]]] = {}
        self._writers: dict[str, SnapshotWriter] = {}
        with ExitStack() as failed:
            failed.push(self._closing)
            for name in names:
                probe = self._closing.enter_context(PROBES[name]())
                self._sources[name] = probe.snapshot
            failed.pop_all()

    def run(self, counters: Callable[[], dict[str, Any]], *, append: bool) -> None:
        """Starts a thread that takes the snapshots.

        Args:
            counters: returns the counters of the capture, which only grow.
            append: keep the lines that the files have. False removes the files of an earlier
                capture.

        Raises:
            OSError: a file cannot be opened or removed.
        """
        if not append and snapshot_path(self._stream, CAPTURE).exists():
            for name in (CAPTURE, *PROBES):
                snapshot_path(self._stream, name).unlink(missing_ok=True)
        if not self._sources:
            return
        self._sources = {CAPTURE: _Counters(self._stream, counters).snapshot, **self._sources}
        for name in self._sources:
            path = snapshot_path(self._stream, name)
            # One line per interval is little, so each is written at once.
            self._writers[name] = self._closing.enter_context(SnapshotWriter(path, flush_every=1))
        self._thread = threading.Thread(target=self._take, name="strap-probes", daemon=True)
        self._thread.start()

    def stop(self, *, wait: bool = True) -> None:
        """Takes a last snapshot, then removes the probes from the kernel.

        Args:
            wait: wait until the snapshot is written. Pass False if the disk does not answer: the
                thread then finishes when the disk does, or ends with the process.
        """
        self._stop.set()
        if self._thread is None:
            self._close()
        elif wait:
            self._thread.join()

    def _take(self) -> None:
        try:
            for _ in collect(dict, interval_s=self._interval_s, stop=self._stop):
                for name in list(self._writers):
                    self._write(name)
        finally:
            self._close()

    def _write(self, name: str) -> None:
        try:
            self._writers[name].write(self._sources[name]())
        except Exception as error:
            # Drop the writer: it keeps lines that it could not write and tries again for ever.
            with suppress(OSError):
                self._writers.pop(name).close()
            self._complain(f"in {snapshot_path(self._stream, name)}", error)

    def _close(self) -> None:
        try:
            self._closing.close()
        except OSError as error:
            self._complain(f"beside {self._stream}", error)

    def _complain(self, where: str, error: Exception) -> None:
        warn(f"the snapshots {where} end here, the capture goes on: {error}")


class _Counters:
    """Takes snapshots of a capture's counters, its disk and its CPU time, as a probe does."""

    def __init__(self, stream: str, read: Callable[[], dict[str, Any]]) -> None:
        self._read = read
        self._disk = disk_of(stream)
        self._throttled_s = cpu_throttled_s()
        self._began_ns = self._last_ns = time.monotonic_ns()
        self._writer_s: float | None = None

    def snapshot(self) -> dict[str, Any]:
        now, before = time.monotonic_ns(), self._last_ns
        self._last_ns = now
        wall = time.time()
        counters = self._read()
        # After the capture is closed the writer's thread has ended: keep its last known time.
        self._writer_s = _cpu_s(counters["writer_thread"]) or self._writer_s
        return {
            "timestamp": wall,
            "iso_timestamp": datetime.fromtimestamp(wall, timezone.utc).isoformat(),
            "interval_s": (now - before) / 1e9,
            "monotonic_ns": now,
            "began_ns": self._began_ns,  # when the counters began at 0
            "pid": os.getpid(),
            "device_id": None if self._disk is None else self._disk.number,
            "device_name": None if self._disk is None else self._disk.name,
            "cpu_throttled_s": self._throttled(),
            "writer_cpu_s": self._writer_s,
            "counters": counters,
        }

    def _throttled(self) -> float | None:
        now = cpu_throttled_s()
        return None if now is None or self._throttled_s is None else now - self._throttled_s


def _cpu_s(thread: int) -> float | None:
    """Seconds that a thread of this process ran on a CPU or waited for one; None if unknown.

    Source: https://docs.kernel.org/scheduler/sched-stats.html#proc-pid-schedstat
    """
    try:
        on_cpu, waiting, _ = Path(f"/proc/self/task/{thread}/schedstat").read_text().split()
    except (OSError, ValueError):  # it has ended, or the kernel keeps no such numbers
        return None
    return (int(on_cpu) + int(waiting)) / 1e9
