"""What snapshots of block devices tell: latencies, queue depths, and what stands out.

All of it comes from histograms of powers of two, so that a latency is known to a factor of 2, and
below 2 us to 2 us.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from .._extras import extra
from ..errors import CorruptError, InvalidArgumentError
from .kinds import described, kind_of

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

#: Fewer windows than these say nothing of what is usual, and nothing of a correlation.
MIN_WINDOWS = 8
ANOMALY_RULE = (
    "p99 above median + 3 sigma and above twice the median of the device's windows, "
    "sigma = 1.4826 MAD"
)
#: Metrics of the whole machine: what there is pressure on, and what all processes did.
_RESOURCES = ("io", "cpu", "memory")
_WORK = ("off-CPU time", "page faults", "run-queue wait", "switches")
_A_YEAR_S = 366 * 86400.0
_LAST_DATE_S = 253_370_764_800.0  # the year 9999 begins


@dataclass(frozen=True)
class Device:
    """A device over the windows of a trace, by time.

    Attributes:
        name: as the kernel calls it.
        ends: (windows,) when the snapshots were taken, s since 1970.
        intervals: (windows,) s.
        counts: (windows, slots) requests that completed, by the power of two of their latency.
        depths: (windows,) requests in flight when the snapshot was taken.
    """

    name: str
    ends: Floats
    intervals: Floats
    counts: Ints
    depths: Ints

    @property
    def requests(self) -> Ints:
        """(windows,) that completed."""
        return np.asarray(self.counts.sum(axis=1), np.int64)


@dataclass(frozen=True)
class BlockTrace:
    """A file of snapshots: its devices by name, and the requests that were not followed."""

    windows: int
    devices: list[Device]
    losses: dict[str, int]


@dataclass(frozen=True)
class Metrics:
    """A file of system metrics.

    Attributes:
        processes: by pid, the one longest off the CPU first: ``off_cpu_ns`` and ``page_faults``.
        ends: (lines,) s since 1970.
        series: by name, (lines,) of each metric of the whole machine; NaN: not known. Pressure is
            in per cent of the time that some task waited, and its name tells what it was taken
            from; time of processes is in s/s, the rest /s.
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
    """The devices of snapshots, of this package or of llm_instrumentation 1.3.1.

    A device that a snapshot does not name had no requests then.

    Raises:
        CorruptError: a snapshot has no such fields; the message says which one, from 1.
    """
    windows: list[_Window] = []
    losses: dict[str, int] = {}
    for number, snapshot in enumerate(snapshots, 1):
        try:
            _expect("block", snapshot)
            windows.append(_window(snapshot))
            for name, count in snapshot.get("losses", {}).items():
                losses[name] = losses.get(name, 0) + _count(count)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
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
    """The power of two of a bucket, by where it begins: older files count their slots from 1."""
    slot = max(_count(low_us).bit_length() - 1, 0)
    if low_us not in (0, 1 << slot):
        raise ValueError(f"bucket_low = {low_us} is no power of two")
    return slot


def _expect(kind: str, line: Mapping[str, Any]) -> None:
    if kind_of(line) not in (kind, None):  # where nothing is known, a missing field says more
        raise ValueError(f"it is of {described(line)}")


def slot_counts(buckets: Iterable[Mapping[str, Any]]) -> Ints:
    """(64,) how many there are of each slot, of one histogram or of several in a row."""
    counts = np.zeros(64, np.int64)
    for bucket in buckets:
        counts[bucket_slot(bucket["bucket_low"])] += bucket["count"]
    return counts


def _reason(error: Exception) -> str:
    return f"no field {error}" if isinstance(error, KeyError) else str(error)


# ---- latencies ----


def bucket_edges_us(slots: int) -> Floats:
    """(slots + 1,) where the buckets begin and the last one ends: 0, 2, 4, 8 ... us."""
    edges = np.ldexp(np.ones(slots + 1, np.float64), np.arange(slots + 1))
    edges[0] = 0.0
    return edges


def mean_us(counts: Ints) -> Floats:
    """The mean latency (us) as if each request took the middle of its bucket.

    Args:
        counts: (..., slots) requests.

    Returns:
        (...), between 3/4 and 3/2 of the true mean where no request took less than 2 us; NaN where
        there are no requests.
    """
    edges = bucket_edges_us(counts.shape[-1])
    total = counts.sum(axis=-1)
    sums = counts @ ((edges[:-1] + edges[1:]) / 2)
    return np.asarray(np.where(total > 0, sums / np.maximum(total, 1), np.nan), np.float64)


def percentiles_us(counts: Ints, percentiles: Sequence[float]) -> Floats:
    """Percentiles of latency (us), by the nearest rank.

    The rank finds the bucket; within it requests are taken to lie evenly, and the result is
    interpolated. It is off by less than a factor of 2, and below 2 us by less than 2 us.

    Args:
        counts: (..., slots) requests.
        percentiles: each from 0 to 100.

    Returns:
        (..., percentiles); NaN where there are no requests.

    Raises:
        InvalidArgumentError: a percentile is out of its range.
    """
    for percentile in percentiles:
        if not 0 <= percentile <= 100:
            raise InvalidArgumentError(f"percentile {percentile:g}: give 0 to 100")
    edges = bucket_edges_us(counts.shape[-1])
    upto = counts.cumsum(axis=-1)[..., np.newaxis, :]
    total = upto[..., -1]
    # 99.9 * n / 100 may come out a hair above the whole number that it is.
    exact = np.round(np.asarray(percentiles, np.float64) * total / 100, 9)
    rank = np.maximum(np.ceil(exact), 1)
    slot = np.minimum((upto < rank[..., np.newaxis]).sum(axis=-1), counts.shape[-1] - 1)
    inside = np.take_along_axis(counts, slot, axis=-1)
    before = np.take_along_axis(upto[..., 0, :], slot, axis=-1) - inside
    share = (rank - before - 0.5) / np.maximum(inside, 1)
    value = edges[slot] + share * (edges[slot + 1] - edges[slot])
    return np.asarray(np.where(total > 0, value, np.nan), np.float64)


def anomalous(counts: Ints) -> Bools:
    """Which windows stand out, by :data:`ANOMALY_RULE`.

    Twice the median is asked for too: less than that, buckets cannot tell.

    Args:
        counts: (windows, slots) requests.

    Returns:
        (windows,); none where fewer than :data:`MIN_WINDOWS` windows have requests.
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
    """Off-CPU time and page faults by process, and what all of them did by time.

    The pressure is what ``some.total`` grew by since the line before, over the time between them;
    the avg10 of the kernel where no line has a total. A total that fell (a restart of the machine)
    and one after a gap are not known; nor is any where the kernel measures no pressure.

    Raises:
        CorruptError: a line has no such fields; the message says which one, from 1.
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
        except (KeyError, TypeError, ValueError, AttributeError) as error:
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
    """The totals of the resources, then their avg10; NaN where there is none."""
    pressure = line.get("pressure") or {}
    for key in ("total", "avg10"):
        for resource in _RESOURCES:
            some = (pressure.get(resource) or {}).get("some") or {}
            yield float(some.get(key, math.nan))


def _sums(line: Mapping[str, Any]) -> Iterator[float]:
    """What all processes did in a second, as :data:`_WORK`; NaN where the line does not tell."""
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
    """(lines,) per cent of the time since the line before."""
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
    """Mean latency (us) and a metric of the windows that have both.

    A window goes with the line nearest to its end, at most half its interval away; a line goes
    with one window, the nearest.

    Returns:
        Two of (pairs,).
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
    """(n,) from 1; ties share their mean rank."""
    _, place, count = np.unique(values, return_inverse=True, return_counts=True)
    mean: Floats = np.cumsum(count) - (count - 1) / 2
    return mean[place]


def spearman(first: Floats, second: Floats) -> float:
    """Spearman's rank correlation; ties share their mean rank.

    Returns:
        From -1 to 1; NaN where one of them does not vary.
    """
    a, b = (
        values - values.mean() if len(values) else values
        for values in (ranks(first), ranks(second))
    )
    scale = math.sqrt(float(a @ a) * float(b @ b))
    return float(a @ b) / scale if scale > 0 else math.nan


def utc_text(seconds: float) -> str:
    """A time since 1970 as text, to the millisecond."""
    when = datetime.fromtimestamp(float(seconds), timezone.utc)
    return when.isoformat(timespec="milliseconds").replace("+00:00", "Z")
