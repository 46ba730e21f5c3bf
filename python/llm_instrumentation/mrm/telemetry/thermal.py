"""Whether the processor slowed down because it was hot.

Linux counts throttling events of each processor in
``/sys/devices/system/cpu/cpuN/thermal_throttle/core_throttle_count``. Virtual machines and
some processors have no such files: then there is nothing to tell, and ``available`` says so.
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
    """The counter of each processor, by its file."""

    counts: dict[str, int] = field(default_factory=dict)

    @classmethod
    def capture(cls) -> ThermalSnapshot:
        """Reads the counters; those that cannot be read are left out."""
        counts = {}
        for path in sorted(_CPUS.glob(_COUNTERS)):
            try:
                counts[str(path)] = int(path.read_text())
            except (OSError, ValueError):  # the processor went offline, or says nothing
                continue
        return cls(counts)

    @property
    def available(self) -> bool:
        """Whether this machine counts throttling at all."""
        return bool(self.counts)

    def events_since(self, earlier: ThermalSnapshot) -> int:
        """Events of all processors since ``earlier``.

        A counter that went backwards, or that ``earlier`` lacks, counts as none.
        """
        return sum(
            max(0, count - earlier.counts.get(path, count)) for path, count in self.counts.items()
        )


@dataclass
class ThermalSample:
    """How far a run had throttled at a moment."""

    t_s: float  #: seconds since ``begin``
    events: int  #: since ``begin``
    temperature_c: float | None  #: the hottest sensor; None without one


class ThermalMonitor:
    """Counts throttling between ``begin`` and ``end``.

        monitor = ThermalMonitor()
        monitor.begin()
        ...
        events = monitor.end()

    Args:
        interval_s: also keep a sample each so many seconds in ``samples``, to tell when
            throttling happened; None keeps none.
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
        """Takes the counters before the run; a second call begins anew."""
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
        """The events since ``begin``; 0 too where the machine does not count them."""
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
