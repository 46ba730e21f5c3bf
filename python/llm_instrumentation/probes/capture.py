"""Probes that run as long as a capture, and write their snapshots beside its stream."""

from __future__ import annotations

import os
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from .block import BlockProbe
from .collect import collect
from .disks import disk_of
from .jsonl import SnapshotWriter
from .probe import KernelProbe
from .system import SystemProbe
from .throttling import cpu_throttled_s

__all__ = ["CAPTURE", "PROBES", "CaptureProbes", "snapshot_path"]

#: The probes that a capture can have, by name.
PROBES: Mapping[str, Callable[[], KernelProbe]] = {"block": BlockProbe, "system": SystemProbe}
#: The file of the capture's own counters.
CAPTURE = "capture"


def snapshot_path(stream: str | os.PathLike[str], name: str) -> Path:
    """Where the snapshots of a probe, or of :data:`CAPTURE`, stand: ``STREAM.name.jsonl``."""
    return Path(f"{os.fspath(stream)}.{name}.jsonl")


def _cpu_s(thread: int) -> float | None:
    """Seconds that a thread of this process was on a CPU or ready for one; None: not known.

    https://docs.kernel.org/scheduler/sched-stats.html#proc-pid-schedstat
    """
    try:
        on_cpu, waiting, _ = Path(f"/proc/self/task/{thread}/schedstat").read_text().split()
    except (OSError, ValueError):  # it has ended, or the kernel keeps no such numbers
        return None
    return (int(on_cpu) + int(waiting)) / 1e9


class CaptureProbes:
    """Probes in the kernel, from construction to :meth:`stop`.

    Each interval gives a line of each probe, and one of the capture's counters; without any
    probe there are none.

    Args:
        stream: the capture's stream; the files stand beside it.
        names: of :data:`PROBES`; may be empty.
        interval_s: seconds between snapshots.

    Raises:
        StrapError: as :meth:`KernelProbe.start`; no file was touched then.
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
        """Takes snapshots from now on, in a thread.

        Args:
            counters: gives those of the capture, which only grow.
            append: to the files that are there. Without it they are removed, since they tell of
                another capture.

        Raises:
            OSError: a file cannot be opened.
        """
        if not append:
            for name in (CAPTURE, *PROBES):
                snapshot_path(self._stream, name).unlink(missing_ok=True)
        if not self._sources:
            return
        device, throttled = disk_of(self._stream), cpu_throttled_s()
        began = last = time.monotonic_ns()
        writer: float | None = None

        def capture() -> dict[str, Any]:
            nonlocal last
            now, before = time.monotonic_ns(), last
            last = now
            wall = time.time()
            stalled = cpu_throttled_s()
            counted = counters()
            nonlocal writer
            writer = _cpu_s(counted["writer_thread"]) or writer
            return {
                "timestamp": wall,
                "iso_timestamp": datetime.fromtimestamp(wall, timezone.utc).isoformat(),
                "interval_s": (now - before) / 1e9,
                "monotonic_ns": now,
                "began_ns": began,  # where the counters began at 0
                "pid": os.getpid(),
                "device_id": None if device is None else device.number,
                "device_name": None if device is None else device.name,
                "cpu_throttled_s": None
                if stalled is None or throttled is None
                else stalled - throttled,
                "writer_cpu_s": writer,
                "counters": counted,
            }

        self._sources = {CAPTURE: capture, **self._sources}
        for name in self._sources:
            path = snapshot_path(self._stream, name)
            # A line an interval: there is nothing to gain from writing them together.
            self._writers[name] = self._closing.enter_context(SnapshotWriter(path, flush_every=1))
        self._thread = threading.Thread(target=self._take, name="strap-probes", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Takes a last snapshot, and the programs out of the kernel; once is enough."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        try:
            self._closing.close()
        except OSError as error:
            self._complain(error)

    def _take(self) -> None:
        for _ in collect(dict, interval_s=self._interval_s, stop=self._stop):
            for name in list(self._writers):
                try:
                    self._writers[name].write(self._sources[name]())
                except Exception as error:
                    # What it could not write it would try again for ever.
                    with suppress(OSError):
                        self._writers.pop(name).close()
                    self._complain(error)

    def _complain(self, error: Exception) -> None:
        warnings.warn(
            f"the snapshots beside {self._stream} end here, the capture goes on: {error}",
            RuntimeWarning,
            stacklevel=3,
        )
