"""Counts thermal throttling: how often the processor slowed down because it was hot.

Linux counts the throttling events of each processor in
``/sys/devices/system/cpu/cpuN/thermal_throttle/core_throttle_count``. Virtual machines and some
processors have no such files. There ``available`` is False and all counts are 0.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

from ..._extras import extra

with extra("mrm", "A thermal monitor"):
    import psutil

from ...errors import InvalidArgumentError

_CPUS = Path("/sys/devices/system/cpu")
_COUNTERS = "cpu[0-9]*/thermal_throttle/core_throttle_count"


@dataclass
class ThermalSnapshot:
    """The throttling counter of each processor, by the path of its file."""

    counts: dict[str, int] = field(default_factory=dict)

    @classmethod
    def capture(cls) -> ThermalSnapshot:
        """Reads the counters; a counter that cannot be read is left out."""
        counts = {}
        for path in sorted(_CPUS.glob(_COUNTERS)):
            try:
                counts[str(path)] = int(path.read_text())
            except (OSError, ValueError):  # the processor is offline, or the file holds no number
                continue
        return cls(counts)

    @property
    def available(self) -> bool:
        """Whether any counter could be read."""
        return bool(self.counts)

    def events_since(self, earlier: ThermalSnapshot) -> int:
        """The number of events of all processors since ``earlier``.

        A counter that went backwards, or that ``earlier`` lacks, adds 0.
        """
        return sum(
            max(0, count - earlier.counts.get(path, count)) for path, count in self.counts.items()
        )


@dataclass
class ThermalSample:
    """The throttling of a run up to one moment."""

    t_s: float  #: seconds since ``begin``
    events: int  #: throttling events since ``begin``
    temperature_c: float | None  #: degrees Celsius of the hottest sensor; None without a sensor


class ThermalMonitor:
    """Counts throttling between ``begin`` and ``end``.

        monitor = ThermalMonitor()
        monitor.begin()
        ...
        events = monitor.end()

    Args:
        interval_s: a thread adds a sample to ``samples`` at this interval, in seconds, which shows
            when throttling happened. None takes no samples.

    Raises:
        InvalidArgumentError: ``interval_s`` is not above 0.
    """

    def __init__(self, interval_s: float | None = None) -> None:
        if interval_s is not None and not interval_s > 0:
            raise InvalidArgumentError(f"interval_s = {interval_s}: must be above 0 seconds")
        self.samples: list[ThermalSample] = []
        self._interval_s = interval_s
        self._before = ThermalSnapshot()
        self._begun_s = 0.0
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def available(self) -> bool:
        """Whether the machine counted throttling when ``begin`` was called."""
        return self._before.available

    def begin(self) -> None:
        """Reads the counters before the run. A second call starts again from there."""
        self._stop()
        self.samples = []
        self._before = ThermalSnapshot.capture()
        self._begun_s = time.monotonic()
        if self._interval_s is not None:
            self._ended.clear()
            self._thread = threading.Thread(
                target=self._watch, args=(self._interval_s,), name="thermal-monitor", daemon=True
            )
            self._thread.start()

    def end(self) -> int:
        """Stops, and returns the number of events since ``begin``; 0 if nothing counts them."""
        self._stop()
        return ThermalSnapshot.capture().events_since(self._before)

    def _stop(self) -> None:
        thread, self._thread = self._thread, None
        if thread is not None:
            self._ended.set()
            thread.join()

    def _watch(self, interval_s: float) -> None:
        while not self._ended.wait(interval_s):
            now = time.monotonic() - self._begun_s
            events = ThermalSnapshot.capture().events_since(self._before)
            self.samples.append(ThermalSample(now, events, _hottest()))


def _hottest() -> float | None:
    if not hasattr(psutil, "sensors_temperatures"):
        return None
    sensors = psutil.sensors_temperatures()
    readings = [reading.current for group in sensors.values() for reading in group]
    return max(readings, default=None)
