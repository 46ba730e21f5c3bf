"""Measures the load of the machine before a run. A busy machine makes the run's figures inexact."""

from __future__ import annotations

import time
from dataclasses import dataclass

from ..._extras import extra

with extra("mrm", "A baseline"):
    import psutil

from ...errors import InvalidArgumentError

_MIB = 2**20


@dataclass
class BaselineSnapshot:
    """The load of the whole machine. Megabytes are 2^20 bytes."""

    cpu_pct: float  #: mean use of all cores, 0 to 100
    cpu_pct_max: float  #: the busiest sample
    mem_total_mb: float
    mem_available_mb: float
    mem_used_pct: float
    load_avg_1m: float | None  #: None if the system does not tell it
    timestamp_s: float  #: ``time.monotonic()`` at the end


def capture_baseline(duration_s: float = 2.0, poll_interval_s: float = 0.2) -> BaselineSnapshot:
    """Measures the use of the processor for ``duration_s`` seconds, then the memory in use.

    The time is divided into equal intervals of about ``poll_interval_s`` seconds, at least one, and
    each gives a sample. psutil's first call begins the first interval; its value is ignored.

    Raises:
        InvalidArgumentError: a time is not above 0.
    """
    for name, value in (("duration_s", duration_s), ("poll_interval_s", poll_interval_s)):
        if not value > 0:
            raise InvalidArgumentError(f"{name} = {value}: must be above 0 seconds")
    count = max(1, round(duration_s / poll_interval_s))
    psutil.cpu_percent()  # begins the first interval
    samples = []
    for _ in range(count):
        time.sleep(duration_s / count)
        samples.append(psutil.cpu_percent())

    memory = psutil.virtual_memory()
    return BaselineSnapshot(
        cpu_pct=sum(samples) / count,
        cpu_pct_max=max(samples),
        mem_total_mb=memory.total / _MIB,
        mem_available_mb=memory.available / _MIB,
        mem_used_pct=memory.percent,
        load_avg_1m=_load(),
        timestamp_s=time.monotonic(),
    )


def _load() -> float | None:
    try:
        return psutil.getloadavg()[0]
    except (AttributeError, OSError):  # this system has no load average
        return None
