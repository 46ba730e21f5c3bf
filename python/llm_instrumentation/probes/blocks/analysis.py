"""Computes latencies, queue depths and anomalous windows from snapshots of block devices.

A window is the interval of one snapshot. Latencies come from histograms whose buckets are powers of
two. So a latency is known to a factor of 2, and a latency below 2 us to 2 us.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ..._extras import extra
from ...errors import CorruptError, InvalidArgumentError
from ..kinds import described, kind_of

if TYPE_CHECKING:
    import pandas as pd

__all__ = [
    "ANOMALY_RULE",
    "MIN_WINDOWS",
    "BlockTrace",
    "Device",
    "Metrics",
    "anomalous",
    "bucket_edges_us",
    "bucket_slot",
    "matched",
    "mean_us",
    "parse_metrics",
    "parse_trace",
    "percentiles_us",
    "ranks",
    "slot_counts",
    "spearman",
    "utc_text",
]

Floats: TypeAlias = NDArray[np.float64]
Ints: TypeAlias = NDArray[np.int64]
Bools: TypeAlias = NDArray[np.bool_]

#: With fewer windows there are no anomalies and no correlations: too little is known.
MIN_WINDOWS = 8
ANOMALY_RULE = (
    "p99 above median + 3 sigma and above twice the median of the device's windows, "
    "sigma = 1.4826 MAD"
)
#: Metrics of the whole machine: the resources with pressure, and sums over all processes.
_RESOURCES = ("io", "cpu", "memory")
_WORK = ("off-CPU time", "page faults", "run-queue wait", "switches")
_A_YEAR_S = 366 * 86400.0
_LAST_DATE_S = 253_370_764_800.0  # the beginning of the year 9999


@dataclass(frozen=True)
class Device:
    """One device over the windows of a trace, in the order of time.

    Attributes:
        name: the kernel's name of the device.
        ends: (windows,) float64, times of the snapshots in seconds since 1970.
        intervals: (windows,) float64, lengths in seconds.
        counts: (windows, slots) int64, requests that completed, by the power of two of their
            latency in us; see :func:`bucket_edges_us`.
        depths: (windows,) int64, requests in flight when the snapshot was taken.
    """

    name: str
    ends: Floats
    intervals: Floats
    counts: Ints
    depths: Ints

    @property
    def requests(self) -> Ints:
        """(windows,) int64, requests that completed."""
        return np.asarray(self.counts.sum(axis=1), np.int64)


@dataclass(frozen=True)
class BlockTrace:
    """The content of a file of snapshots.

    Attributes:
        windows: number of snapshots.
        devices: sorted by name; all have the same windows.
        losses: requests that were not followed, or not to their end, by reason.
    """

    windows: int
    devices: list[Device]
    losses: dict[str, int]


@dataclass(frozen=True)
class Metrics:
    """The content of a file of system metrics.

    Attributes:
        processes: a frame with the index ``pid`` and the columns ``off_cpu_ns`` and
            ``page_faults``, sums over all lines. The process longest off the CPU comes first.
        ends: (lines,) float64, seconds since 1970.
        series: (lines,) float64 for each metric of the whole machine, by name; NaN if unknown.
            Pressure is the percentage of time in which some task waited; its name tells the
            kernel's field. Times of processes are in seconds per second, counts per second.
    """

    processes: pd.DataFrame
    ends: Floats
    series: dict[str, Floats]


@dataclass
class _Window:
    end: float
    interval: float
    counts: dict[str, dict[int, int]] = field(default_factory=dict)
    depths: dict[str, int] = field(default_factory=dict)


# ---- snapshots ----


def parse_trace(snapshots: Iterable[Mapping[str, Any]]) -> BlockTrace:
    """Parses snapshots of block devices, of this package or of llm_instrumentation 1.3.1.

    A device that a snapshot does not name counts as a device without requests.

    Raises:
        CorruptError: a snapshot lacks a field or has a wrong value. The message names the field and
            the number of the snapshot, counted from 1.
    """
    windows: list[_Window] = []
    losses: dict[str, int] = {}
    for number, snapshot in enumerate(snapshots, 1):
        try:
            _expect("block", snapshot)
            windows.append(_window(snapshot))
            for name, count in snapshot.get("losses", {}).items():
                losses[name] = losses.get(name, 0) + _count(count)
        except (ArithmeticError, AttributeError, KeyError, TypeError, ValueError) as error:
            raise CorruptError(f"snapshot {number}: {_reason(error)}") from error
    windows.sort(key=lambda window: window.end)
    names = sorted({name for window in windows for name in (*window.counts, *window.depths)})
    return BlockTrace(len(windows), [_device(name, windows) for name in names], losses)


def _window(snapshot: Mapping[str, Any]) -> _Window:
    window = _Window(_time(snapshot), _interval(snapshot))
    for device in snapshot["latency_histogram"]:
        counts = window.counts.setdefault(_name(device), {})
        for bucket in device["buckets"]:
            slot = bucket_slot(bucket["bucket_low"])
            counts[slot] = counts.get(slot, 0) + _count(bucket["count"])
    for device in snapshot["inflight"]:
        name = _name(device)
        window.depths[name] = window.depths.get(name, 0) + _count(device["count"])
    return window


def _device(name: str, windows: Sequence[_Window]) -> Device:
    found = [window.counts.get(name, {}) for window in windows]
    slots = 1 + max((slot for counts in found for slot in counts), default=0)
    table = np.zeros((len(windows), slots), np.int64)
    for row, counts in zip(table, found, strict=True):
        for slot, count in counts.items():
            row[slot] = count
    return Device(
        name,
        ends=np.array([window.end for window in windows]),
        intervals=np.array([window.interval for window in windows]),
        counts=table,
        depths=np.array([window.depths.get(name, 0) for window in windows], np.int64),
    )


def _time(line: Mapping[str, Any]) -> float:
    time = float(line["timestamp"])
    if not 0 <= time < _LAST_DATE_S:
        raise ValueError(f"timestamp = {time} is no time")
    return time


def _interval(line: Mapping[str, Any]) -> float:
    interval = float(line["interval_s"])
    if not 0 < interval < _A_YEAR_S:
        raise ValueError(f"interval_s = {interval} is no interval")
    return interval


def _name(device: Mapping[str, Any]) -> str:
    name = device["device_name"]
    if not isinstance(name, str) or not name:
        raise ValueError(f"device_name = {name!r} is no name")
    return name


def _count(value: Any) -> int:
    if not isinstance(value, int) or not 0 <= value < 2**53:
        raise ValueError(f"{value!r} is no count")
    return value


def bucket_slot(low_us: Any) -> int:
    """The slot of a bucket: n for the bucket from 2^n us, 0 for the first, which is from 0.

    It does not use the bucket's own ``slot``, because older files count from 1.

    Raises:
        ValueError: the lower bound is no power of two.
    """
    slot = max(_count(low_us).bit_length() - 1, 0)
    if low_us not in (0, 1 << slot):
        raise ValueError(f"bucket_low = {low_us} is no power of two")
    return slot


def _expect(kind: str, line: Mapping[str, Any]) -> None:
    if kind_of(line) not in (kind, None):  # for None the error about a missing field says more
        raise ValueError(f"it is of {described(line)}")


def slot_counts(buckets: Iterable[Mapping[str, Any]]) -> Ints:
    """(64,) int64, the counts of each slot, summed over the buckets of one or more histograms."""
    counts = np.zeros(64, np.int64)
    for bucket in buckets:
        counts[bucket_slot(bucket["bucket_low"])] += bucket["count"]
    return counts


def _reason(error: Exception) -> str:
    return f"no field {error}" if isinstance(error, KeyError) else str(error)


# ---- latencies ----


def bucket_edges_us(slots: int) -> Floats:
    """(slots + 1,) float64, the edges of the buckets in us: 0, 2, 4, 8 ..."""
    edges = np.ldexp(np.ones(slots + 1, np.float64), np.arange(slots + 1))
    edges[0] = 0.0
    return edges


def mean_us(counts: Ints) -> Floats:
    """The mean latency in us, if each request took the middle of its bucket.

    Args:
        counts: (..., slots) requests.

    Returns:
        (...) float64, between 3/4 and 3/2 of the true mean if no request took less than 2 us. NaN
        if there are no requests.
    """
    edges = bucket_edges_us(counts.shape[-1])
    total = counts.sum(axis=-1)
    sums = counts @ ((edges[:-1] + edges[1:]) / 2)
    return np.asarray(np.where(total > 0, sums / np.maximum(total, 1), np.nan), np.float64)


def percentiles_us(counts: Ints, percentiles: Sequence[float]) -> Floats:
    """Percentiles of latency in us, by the nearest-rank method.

    The rank gives the bucket. The result is interpolated within the bucket, as if its requests were
    spread evenly. It is wrong by less than a factor of 2, and below 2 us by less than 2 us.

    Args:
        counts: (..., slots) requests.
        percentiles: each from 0 to 100.

    Returns:
        (..., percentiles) float64; NaN if there are no requests.

    Raises:
        InvalidArgumentError: a percentile is out of its range.
    """
    for percentile in percentiles:
        if not 0 <= percentile <= 100:
            raise InvalidArgumentError(f"percentile {percentile:g}: give 0 to 100")
    edges = bucket_edges_us(counts.shape[-1])
    upto = counts.cumsum(axis=-1)[..., np.newaxis, :]
    total = upto[..., -1]
    # Rounding errors may put 99.9 * n / 100 just above the whole number that it should be.
    exact = np.round(np.asarray(percentiles, np.float64) * total / 100, 9)
    rank = np.maximum(np.ceil(exact), 1)
    slot = np.minimum((upto < rank[..., np.newaxis]).sum(axis=-1), counts.shape[-1] - 1)
    inside = np.take_along_axis(counts, slot, axis=-1)
    before = np.take_along_axis(upto[..., 0, :], slot, axis=-1) - inside
    share = (rank - before - 0.5) / np.maximum(inside, 1)
    value = edges[slot] + share * (edges[slot + 1] - edges[slot])
    return np.asarray(np.where(total > 0, value, np.nan), np.float64)


def anomalous(counts: Ints) -> Bools:
    """Which windows are anomalous by :data:`ANOMALY_RULE`.

    The rule asks for twice the median because the buckets cannot show a smaller difference.

    Args:
        counts: (windows, slots) requests.

    Returns:
        (windows,) bool; all False if fewer than :data:`MIN_WINDOWS` windows have requests.
    """
    p99 = percentiles_us(counts, [99])[:, 0]
    known = p99[np.isfinite(p99)]
    if len(known) < MIN_WINDOWS:
        return np.zeros(len(p99), np.bool_)
    median = float(np.median(known))
    sigma = 1.4826 * float(np.median(np.abs(known - median)))
    return np.asarray(p99 > max(median + 3 * sigma, 2 * median), np.bool_)


# ---- system metrics ----


def parse_metrics(lines: Iterable[Mapping[str, Any]]) -> Metrics:
    """Parses system metrics: sums over time for each process, and series over all processes.

    Pressure is the growth of ``some.total`` since the line before, divided by the time in between.
    If no line has a total, it is the kernel's avg10. Pressure is NaN after a gap, if the total fell
    (the machine restarted), and if the kernel measures no pressure.

    Raises:
        CorruptError: a line lacks a field or has a wrong value. The message names the field and the
            number of the line, counted from 1.
    """
    rows: list[tuple[float, ...]] = []
    sums: dict[str, dict[int, int]] = {"off_cpu_ns": {}, "page_faults": {}}
    for number, line in enumerate(lines, 1):
        try:
            _expect("system", line)
            rows.append((_time(line), _interval(line), *_stalls(line), *_sums(line)))
            for name, by_pid in sums.items():
                for pid, count in line[name].items():
                    by_pid[int(pid)] = by_pid.get(int(pid), 0) + _count(count)
        except (ArithmeticError, AttributeError, KeyError, TypeError, ValueError) as error:
            raise CorruptError(f"system metrics, line {number}: {_reason(error)}") from error
    rows.sort()
    pressures = len(_RESOURCES)
    columns = np.array(rows, np.float64).reshape(-1, 2 + 2 * pressures + len(_WORK)).T
    ends, intervals, stalls, work = np.split(columns, [1, 2, 2 + 2 * pressures])
    totals, avg10s = stalls[:pressures], stalls[pressures:]
    known = bool(np.isfinite(totals).any())
    pressure = [_growth(ends[0], intervals[0], one) for one in totals] if known else avg10s
    source = "some, growth of total" if known else "some, avg10"
    names = [f"{resource} pressure ({source})" for resource in _RESOURCES]
    series = dict(zip((*names, *_WORK), (*pressure, *work), strict=True))
    return Metrics(_processes(sums), ends[0], series)


def _stalls(line: Mapping[str, Any]) -> Iterator[float]:
    """The total of each resource, then the avg10 of each; NaN for each that the line lacks."""
    pressure = line.get("pressure") or {}
    for key in ("total", "avg10"):
        for resource in _RESOURCES:
            some = (pressure.get(resource) or {}).get("some") or {}
            yield float(some.get(key, math.nan))


def _sums(line: Mapping[str, Any]) -> Iterator[float]:
    """The metrics of :data:`_WORK`, per second; NaN for each that the line lacks."""
    interval = _interval(line)
    yield sum(line["off_cpu_ns"].values()) / 1e9 / interval
    yield sum(line["page_faults"].values()) / interval
    processes = line.get("processes")
    for name, scale in (("runqueue_ns", 1e9), ("switches", 1)):
        if processes is None:
            yield math.nan
        else:
            yield sum(_count(one[name]) for one in processes.values()) / scale / interval


def _growth(ends: Floats, intervals: Floats, totals_us: Floats) -> Floats:
    """(lines,) float64, growth of a total as a percentage of the time since the line before."""
    time = np.diff(ends, prepend=np.nan)
    grown = np.diff(totals_us, prepend=np.nan)
    known = (time > 0) & (time < 1.5 * intervals) & (grown >= 0)
    return np.asarray(np.where(known, grown / np.where(known, time, 1) / 1e6 * 100, np.nan))


def _processes(sums: Mapping[str, Mapping[int, int]]) -> pd.DataFrame:
    with extra("report", "A table of processes"):
        import pandas as pd

    pids = sorted({pid for by_pid in sums.values() for pid in by_pid})
    table = pd.DataFrame(
        {name: [by_pid.get(pid, 0) for pid in pids] for name, by_pid in sums.items()},
        index=pd.Index(pids, name="pid"),
        dtype="int64",
    )
    ordered: pd.DataFrame = table.sort_values(
        ["off_cpu_ns", "page_faults"], ascending=False, kind="stable"
    )
    return ordered


def matched(device: Device, metrics: Metrics, name: str) -> tuple[Floats, Floats]:
    """The mean latency in us and the metric `name` of the windows that have both.

    A window is paired with the line nearest to its end, if the line is at most half an interval
    away. If several windows have the same nearest line, only the nearest window is paired.

    Returns:
        Two arrays (pairs,) float64.
    """
    known = np.isfinite(metrics.series[name])
    ends, values = metrics.ends[known], metrics.series[name][known]
    latency = mean_us(device.counts)
    nearest: dict[int, tuple[float, int]] = {}
    for window in np.flatnonzero(np.isfinite(latency)).tolist() if len(ends) else ():
        after = int(np.searchsorted(ends, device.ends[window]))
        near = [line for line in (after - 1, after) if 0 <= line < len(ends)]
        away, line = min((abs(float(ends[line] - device.ends[window])), line) for line in near)
        if away <= device.intervals[window] / 2:
            nearest[line] = min(nearest.get(line, (away, window)), (away, window))
    lines = sorted(nearest)
    return latency[[nearest[line][1] for line in lines]], values[lines]


def ranks(values: Floats) -> Floats:
    """(n,) float64, the ranks from 1 on; equal values get the mean of their ranks."""
    _, place, count = np.unique(values, return_inverse=True, return_counts=True)
    mean: Floats = np.cumsum(count) - (count - 1) / 2
    return mean[place]


def spearman(first: Floats, second: Floats) -> float:
    """Spearman's rank correlation; equal values get the mean of their ranks.

    Returns:
        From -1 to 1; NaN if one of the series does not vary.
    """
    a, b = (
        values - values.mean() if len(values) else values
        for values in (ranks(first), ranks(second))
    )
    scale = math.sqrt(float(a @ a) * float(b @ b))
    return float(a @ b) / scale if scale > 0 else math.nan


def utc_text(seconds: float) -> str:
    """A time in seconds since 1970 as text in UTC, to the millisecond."""
    when = datetime.fromtimestamp(float(seconds), timezone.utc)
    return when.isoformat(timespec="milliseconds").replace("+00:00", "Z")
