"""Draws the counters of the probes' files beside a capture: queue, waits, and the machine."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import CorruptError
from ..probes.capture import CAPTURE, snapshot_path
from ..probes.jsonl import read_snapshots
from ._perfetto import PerfettoTrace, Track

__all__ = ["Counters", "read_counters"]

# Of the capture's counters: name, the counter, its factor, and the unit.
_LEVELS = (
    ("Queue", "queued_bytes", "B"),
    ("Queued packets", "queued_packets", "packets"),
    ("Staging memory", "memory_bytes", "B"),
    ("Stalls", "stalls", "stalls"),
    ("Dropped", "dropped", "tensors"),
)
_GROWTHS = (
    ("Written", "file_bytes", 1.0, "B/s"),
    ("Waiting for room", "stall_seconds", 100.0, "%"),
    ("Leaving CPUs to compression", "yield_seconds", 100.0, "%"),
    ("In write calls", "write_seconds", 100.0, "%"),
)
# Of the capturing process: name, field, factor and unit.
_PROCESS = (
    ("On CPUs", "on_cpu_ns", 1e-9, "CPUs"),
    ("Waiting for a CPU", "runqueue_ns", 1e-9, "CPUs"),
    ("Minor faults", "minor_faults", 1.0, "1/s"),
    ("Major faults", "major_faults", 1.0, "1/s"),
    ("Switches", "switches", 1.0, "1/s"),
)

#: The group and the name of a counter, and its unit.
_Key = tuple[str, str, str]


class Counters:
    """The counters of the snapshots beside a capture.

    Attributes:
        samples: the number of values.
        clock: a time in ns of CLOCK_MONOTONIC, and the time of the day at it in ns since 1970; None
            without snapshots of the capture.
        clock_set_ns: by how much the time of the day was set during the capture.
    """

    def __init__(self) -> None:
        self.samples = 0
        self.clock: tuple[int, int] | None = None
        self.clock_set_ns = 0
        self.process: int | None = None
        self._values: dict[_Key, tuple[list[int], list[float]]] = {}
        self._ends: dict[_Key, int] = {}  # of rates: when the last interval ended

    def level(self, key: _Key, time_ns: int, value: float) -> None:
        """Adds a value that was read at a time."""
        times, values = self._values.setdefault(key, ([], []))
        times.append(time_ns)
        values.append(float(value))

    def rate(self, key: _Key, end_ns: int, seconds: float, value: float) -> None:
        """Adds a value of an interval."""
        self.level(key, max(0, end_ns - round(seconds * 1e9)), value)
        self._ends[key] = end_ns

    def draw(self, trace: PerfettoTrace, capture: Track) -> None:
        """Draws the counters: those of the capture on tracks below its own."""
        tracks: dict[str, Track] = {}
        machine: Track | None = None
        for key, (times, values) in self._values.items():
            group, name, unit = key
            if key in self._ends:  # nothing is known after the last interval
                times.append(self._ends[key])
                values.append(0.0)
            if not group:
                parent = capture
            elif group in tracks:
                parent = tracks[group]
            else:
                machine = machine or trace.track("Machine")
                parent = tracks[group] = trace.track(group, machine)
            track = trace.track(name, parent, unit=unit)
            trace.counter(track, np.array(times, np.int64), np.array(values))
            self.samples += len(times)


def read_counters(stream: str | os.PathLike[str]) -> Counters:
    """Reads the snapshots beside a stream; files that do not exist are left out.

    Raises:
        CorruptError: a file holds something other than the snapshots of a capture.
    """
    counters = Counters()
    for name, add in ((CAPTURE, _Capture()), ("block", _add_block), ("system", _add_system)):
        path = snapshot_path(stream, name)
        if not path.exists():
            continue
        for number, line in enumerate(_lines(path), 1):
            try:
                add(counters, line, _time(line), _seconds(line))
            except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
                raise CorruptError(
                    f"{path}: snapshot {number} is none of a capture: {error!r}"
                ) from error
    return counters


def _lines(path: Path) -> Iterator[Mapping[str, Any]]:
    return read_snapshots(path)


def _time(line: Mapping[str, Any]) -> int:
    time = line["monotonic_ns"]
    if not isinstance(time, int) or not 0 <= time < 2**63:
        raise ValueError(f"monotonic_ns = {time!r} is no time")
    return time


def _seconds(line: Mapping[str, Any]) -> float:
    seconds = float(line["interval_s"])
    if not 0 < seconds < 1e9:
        raise ValueError(f"interval_s = {seconds} is no interval")
    return seconds


_Add = Callable[[Counters, Mapping[str, Any], int, float], None]


class _Capture:
    """Adds the capture's own counters, which count from 0 again when a capture is resumed."""

    def __init__(self) -> None:
        self._before: tuple[int, Mapping[str, Any]] | None = None
        self._shifts: list[int] = []

    def __call__(
        self, counters: Counters, line: Mapping[str, Any], end: int, seconds: float
    ) -> None:
        now, began = line["counters"], line["began_ns"]
        before = self._before[1] if self._before and self._before[0] == began else {}
        for name, counter, unit in _LEVELS:
            counters.level(("", name, unit), end, now[counter])
        for name, counter, factor, unit in _GROWTHS:
            grown = now[counter] - before.get(counter, 0)
            counters.rate(("", name, unit), end, seconds, grown * factor / seconds)
        self._before = began, now
        counters.process = line["pid"]
        # The probe reads the time of the day just after CLOCK_MONOTONIC. If it was interrupted in
        # between, the difference is too large, so the smallest is the best.
        self._shifts.append(round(line["timestamp"] * 1e9) - end)
        best = min(self._shifts)
        counters.clock, counters.clock_set_ns = (end, end + best), max(self._shifts) - best


def _add_block(counters: Counters, line: Mapping[str, Any], end: int, seconds: float) -> None:
    for row in line["operations"]:
        if row["operation"] not in ("read", "write"):
            continue
        group, what = f"Disk {row['device_name']}", row["operation"].capitalize()
        done = row["completed"]
        mean_us = row["latency_ns"] / done / 1e3 if done else 0.0
        counters.rate((group, what, "B/s"), end, seconds, row["bytes"] / seconds)
        counters.rate((group, f"{what} requests", "1/s"), end, seconds, done / seconds)
        counters.rate((group, f"{what} latency", "us"), end, seconds, mean_us)
    for row in line["inflight"]:
        counters.level((f"Disk {row['device_name']}", "In flight", "requests"), end, row["count"])


def _add_system(counters: Counters, line: Mapping[str, Any], end: int, seconds: float) -> None:
    for resource, stalled in sorted(line["stalled_us"].items()):
        for share, microseconds in stalled.items():
            key = ("Pressure", f"{resource}, {share}", "%")
            counters.rate(key, end, seconds, microseconds / 1e4 / seconds)
    if counters.process is None:
        return
    process = line["processes"].get(str(counters.process), {})
    for name, field, factor, unit in _PROCESS:
        value = process.get(field, 0) * factor / seconds
        counters.rate((f"Process {counters.process}", name, unit), end, seconds, value)
