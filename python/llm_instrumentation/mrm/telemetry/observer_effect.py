"""Computes the observer effect: how much processor and memory tracing takes."""

from __future__ import annotations

import itertools
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from ...errors import InvalidArgumentError

_CONTENTION_BYTES = 10 * 2**20


class ResourceSample(Protocol):
    """The fields of a process monitor's sample that :func:`compute_observer_effect` reads."""

    @property
    def t_s(self) -> float: ...
    @property
    def pid(self) -> int: ...
    @property
    def cpu_pct(self) -> float: ...
    @property
    def rss_mb(self) -> float: ...
    @property
    def write_bytes(self) -> int: ...


def compute_observer_effect(
    observer_samples: Sequence[ResourceSample],
    target_samples: Sequence[ResourceSample],
    thermal_throttle_events: int = 0,
    baseline_cpu_pct: float = 0.0,
    trace_bytes: int = 0,
) -> dict[str, Any]:
    """The ``observer_effect_summary`` of metadata.json.

    Samples of several processes with the same ``t_s`` are added up to one. A sample that follows
    the sample before it very soon, as the last one may, is not used for the processor: the kernel
    counts in steps of 10 ms, so over 2 ms the use can read as 0 or 500 %.

    Args:
        observer_samples: samples of the tracing processes, in the order of time.
        target_samples: samples of the processes that run the model, in the order of time.
        thermal_throttle_events: as :class:`ThermalMonitor` counts them.
        baseline_cpu_pct: as :func:`capture_baseline` measures it.
        trace_bytes: how many of the observers' written bytes are the trace itself. These bytes are
            expected, so they do not count as contention.

    Returns:
        A dict of

        - ``observer_cpu_overhead_pct_max`` and ``_mean``; 100 is a whole core,
        - ``observer_memory_overhead_mb_peak``, in the unit of ``rss_mb``,
        - ``observer_memory_overhead_frac``: its part of the target's peak; 0 without a target,
        - ``target_rss_mb_peak``,
        - ``thermal_throttle_events`` and ``baseline_cpu_pct``, as given,
        - ``observer_bytes_written``, without the trace,
        - ``io_contention_detected``: whether these bytes are more than 10 MiB,
        - ``n_observer_samples`` and ``n_target_samples``.

    Raises:
        InvalidArgumentError: ``trace_bytes`` is negative.
    """
    if trace_bytes < 0:
        raise InvalidArgumentError(f"trace_bytes = {trace_bytes}: must not be negative")
    observer = list(_moments(observer_samples))
    target = list(_moments(target_samples))
    cpu = [sum(sample.cpu_pct for sample in moment) for moment in _of_full_length(observer)] or [
        0.0
    ]
    observer_peak = _rss_peak(observer)
    target_peak = _rss_peak(target)
    written = max(0, _bytes_written(observer_samples) - trace_bytes)
    return {
        "observer_cpu_overhead_pct_max": max(cpu),
        "observer_cpu_overhead_pct_mean": sum(cpu) / len(cpu),
        "observer_memory_overhead_mb_peak": observer_peak,
        "observer_memory_overhead_frac": observer_peak / target_peak if target_peak > 0 else 0.0,
        "target_rss_mb_peak": target_peak,
        "thermal_throttle_events": thermal_throttle_events,
        "baseline_cpu_pct": baseline_cpu_pct,
        "observer_bytes_written": written,
        "io_contention_detected": written > _CONTENTION_BYTES,
        "n_observer_samples": len(observer_samples),
        "n_target_samples": len(target_samples),
    }


def _moments(samples: Iterable[ResourceSample]) -> Iterable[list[ResourceSample]]:
    """Groups of samples that were taken together: one ``t_s``, different ``pid``."""
    moment: list[ResourceSample] = []
    for sample in samples:
        if moment and (
            sample.t_s != moment[0].t_s or any(sample.pid == other.pid for other in moment)
        ):
            yield moment
            moment = []
        moment.append(sample)
    if moment:
        yield moment


def _of_full_length(moments: list[list[ResourceSample]]) -> list[list[ResourceSample]]:
    """The moments whose distance from the moment before is at least half the median distance."""
    gaps = [later[0].t_s - earlier[0].t_s for earlier, later in itertools.pairwise(moments)]
    if len(gaps) < 2:
        return moments
    least = statistics.median(gaps) / 2
    return moments[:1] + [one for one, gap in zip(moments[1:], gaps, strict=True) if gap >= least]


def _rss_peak(moments: Iterable[list[ResourceSample]]) -> float:
    return max((sum(sample.rss_mb for sample in moment) for moment in moments), default=0.0)


def _bytes_written(samples: Iterable[ResourceSample]) -> int:
    """How many bytes all processes wrote, each between its first and its last sample."""
    counters: dict[int, list[int]] = defaultdict(list)
    for sample in samples:
        counters[sample.pid].append(sample.write_bytes)
    # If a counter goes backwards, another process has got the same id.
    return sum(
        max(0, later - earlier)
        for values in counters.values()
        for earlier, later in itertools.pairwise(values)
    )
