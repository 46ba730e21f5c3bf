"""Joins a capture's counters with its probes: what the model waited for in each interval."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from .._extras import extra

with extra("report", "A timeline"):
    import pandas as pd

from .._parsing import parsing
from ..errors import NotFoundError
from .blocks.analysis import percentiles_us, slot_counts
from .capture import CAPTURE, snapshot_path
from .jsonl import read_snapshots

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["plot_timeline", "timeline"]

_Floats: TypeAlias = "npt.NDArray[np.float64]"

#: An interval has a bottleneck if the model waited for room for more than this share of it.
_WAITED = 0.05
#: The bottleneck is the disk if the writer slept in write calls for more than this share, else the
#: CPU.
_BLOCKED = 0.5
# Column: (counter, factor). The column is the counter's growth times the factor, per second; with
# None it is the growth itself.
_COUNTERS = {
    "captured_mb_s": ("raw_bytes", 1e-6),
    "file_mb_s": ("file_bytes", 1e-6),
    "stall_share": ("stall_seconds", 1.0),
    "write_share": ("write_seconds", 1.0),
    "dropped": ("dropped", None),
}
_DISK = ["disk_mb_s", "disk_requests_s", "disk_mean_us", "disk_p99_us", "disk_in_flight"]
_PRESSURES = ["io_pressure", "memory_pressure", "cpu_pressure"]
_SYSTEM = [*_PRESSURES, "cpu_share", "runqueue_share", "major_faults"]
_PRESSURE_COUNTED_S = 2.0  # the kernel adds to its totals so often: PSI_FREQ in kernel/sched/psi.c


def timeline(stream: str | os.PathLike[str]) -> pd.DataFrame:
    """A table of a capture with probes, one row per interval.

    Each row joins a line of the capture's counters with the snapshots of disk and system that were
    taken just after it. Columns without a snapshot are NaN.

    Args:
        stream: the stream of a capture with ``config.with_probes(...)``.

    Returns:
        A frame with the index ``time_s``, the interval's end in seconds since the capture began,
        and these columns:

        - ``monotonic_ns``: the interval's end on the clock of the capture's index.
        - ``interval_s``: the interval's length.
        - ``captured_mb_s``: activations captured, in 10^6 bytes per second.
        - ``file_mb_s``: growth of the stream, in 10^6 bytes per second.
        - ``queued_mb``: staging memory that waiting packets hold, in 10^6 bytes.
        - ``dropped``: tensors left out.
        - ``stall_share``: time that the model waited for room, as a share of the interval. It is
            above 1 if several threads wait.
        - ``write_share``: time that the writer was in write calls, as a share of the interval.
        - ``write_blocked_share``: the part of ``write_share`` in which the writer slept until the
            disk answered. It equals ``write_share`` if the kernel does not count the time of
            threads (schedstat).
        - ``bottleneck``: ``""`` if the model waited for at most 5 % of the interval. Otherwise
            ``"disk"`` if the writer slept in write calls for more than half of it, else ``"cpu"``:
            compression or the writer had too little of the CPUs.
        - ``disk_mb_s``, ``disk_requests_s``, ``disk_mean_us``, ``disk_p99_us``,
            ``disk_in_flight``: of the disk below the stream; of all disks if that disk is unknown.
        - ``io_pressure``, ``memory_pressure``, ``cpu_pressure``: share of the interval in which
            some task waited for this resource. The kernel counts every 2 s, so shorter intervals
            that it counted together have one share.
        - ``cpu_share``, ``runqueue_share``: number of CPUs that the capturing process used, and
            that it waited for.
        - ``major_faults``: of the capturing process, per second.
        - ``cpu_throttled_share``: share of the interval in which the CPU quota of the process's
            control group was used up.

    Raises:
        NotFoundError: (a FileNotFoundError) there are no snapshots beside the stream.
        CorruptError: a file holds something other than the snapshots of a capture.
    """
    path = snapshot_path(stream, CAPTURE)
    if not path.exists():
        raise NotFoundError(f"{path} is missing: capture with config.with_probes(...)")
    lines = list(read_snapshots(path))
    if not lines:
        raise NotFoundError(f"{path} holds no snapshot: the capture ended before its first")
    with parsing(path, "or a file beside it is none of a capture"):
        return _laid_over(stream, lines)


def _laid_over(stream: str | os.PathLike[str], lines: list[dict[str, Any]]) -> pd.DataFrame:
    frame = _capture(lines)
    ends = frame["monotonic_ns"].to_numpy()
    for name, columns, told in (("block", _DISK, _disk), ("system", _SYSTEM, _system)):
        table = np.full((len(frame), len(columns)), np.nan)
        free = np.ones(len(frame), np.bool_)
        for snapshot in _snapshots(snapshot_path(stream, name)):
            # One thread takes all snapshots of an interval: the capture's first, then the probes'.
            at = int(np.searchsorted(ends, snapshot["monotonic_ns"], side="right")) - 1
            if at >= 0 and free[at]:
                row = told(snapshot, lines[at])
                table[at] = [row[column] for column in columns]
                free[at] = False
        frame[columns] = table
    for column in _PRESSURES:
        frame[column] = _pressure(frame[column].to_numpy(), frame["interval_s"].to_numpy())
    frame["bottleneck"] = _bottleneck(frame)
    return frame


def _pressure(stalled_s: _Floats, seconds: _Floats) -> _Floats:
    """The shares of intervals in which tasks waited.

    A growth of the kernel's total is of the intervals since the growth before, of 2 s at most.

    Args:
        stalled_s: the growth in each interval, in seconds; NaN without a snapshot.
        seconds: the lengths of the intervals.
    """
    shares = stalled_s * 0
    first = 0
    for at in np.flatnonzero(stalled_s > 0).tolist():
        begin, covered = at, seconds[at]
        while (
            begin > first
            and covered + seconds[begin - 1] <= _PRESSURE_COUNTED_S
            and not np.isnan(stalled_s[begin - 1])
        ):
            begin -= 1
            covered += seconds[begin]
        # A growth in the first intervals is also of the time before them.
        shares[begin : at + 1] = min(1.0, stalled_s[at] / covered)
        first = at + 1
    return shares


def _bottleneck(frame: pd.DataFrame) -> list[str]:
    return [
        "" if waited <= _WAITED else "disk" if blocked > _BLOCKED else "cpu"
        for waited, blocked in zip(frame["stall_share"], frame["write_blocked_share"], strict=True)
    ]


def _capture(lines: list[dict[str, Any]]) -> pd.DataFrame:
    seconds = np.array([line["interval_s"] for line in lines], np.float64)
    ends = np.array([line["monotonic_ns"] for line in lines], np.int64)
    columns: dict[str, Any] = {"monotonic_ns": ends, "interval_s": seconds}
    for column, (counter, scale) in _COUNTERS.items():
        grown = _grown(lines, [line["counters"][counter] for line in lines])
        columns[column] = grown if scale is None else grown * scale / seconds
    columns["queued_mb"] = [line["counters"]["queued_bytes"] * 1e-6 for line in lines]
    # Assumes that all of the writer's CPU time was in write calls, because it does little else.
    used = _grown(lines, [line["writer_cpu_s"] or 0.0 for line in lines]) / seconds
    columns["write_blocked_share"] = np.maximum(columns["write_share"] - used, 0.0)
    throttled = [np.nan if (spent := line["cpu_throttled_s"]) is None else spent for line in lines]
    columns["cpu_throttled_share"] = _grown(lines, throttled) / seconds
    since = (ends - ends[0]) / 1e9 + seconds[0]
    frame: pd.DataFrame = pd.DataFrame(columns, index=pd.Index(since, name="time_s"))
    return frame


def _grown(lines: list[dict[str, Any]], totals: list[float]) -> Any:
    """The growth of totals since the line before. A resumed capture counts from 0 again."""
    began = np.array([line["began_ns"] for line in lines])
    anew = np.diff(began, prepend=-1) != 0
    return np.where(anew, totals, np.diff(totals, prepend=0))


def _snapshots(path: Path) -> Iterator[dict[str, Any]]:
    return read_snapshots(path) if path.exists() else iter(())


def _disk(snapshot: Mapping[str, Any], line: Mapping[str, Any]) -> dict[str, float]:
    device = line["device_id"]

    def wanted(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [row for row in rows if device is None or row["device_id"] == device]

    operations = wanted(snapshot["operations"])
    histograms = wanted(snapshot["latency_histogram"])
    seconds = snapshot["interval_s"]
    counts = slot_counts(bucket for row in histograms for bucket in row["buckets"])
    completed = sum(row["completed"] for row in operations)
    latency_ns = sum(row["latency_ns"] for row in operations)
    return {
        "disk_mb_s": sum(row["bytes"] for row in operations) / 1e6 / seconds,
        "disk_requests_s": completed / seconds,
        "disk_mean_us": latency_ns / completed / 1e3 if completed else np.nan,
        "disk_p99_us": float(percentiles_us(counts, [99])[0]),
        "disk_in_flight": sum(row["count"] for row in wanted(snapshot["inflight"])),
    }


def _system(snapshot: Mapping[str, Any], line: Mapping[str, Any]) -> dict[str, float]:
    seconds = snapshot["interval_s"]
    process = snapshot["processes"].get(str(line["pid"]), {})

    def stalled_s(resource: str) -> float:
        stalled = snapshot["stalled_us"].get(resource, {}).get("some")
        return np.nan if stalled is None else stalled / 1e6

    return {
        "io_pressure": stalled_s("io"),
        "memory_pressure": stalled_s("memory"),
        "cpu_pressure": stalled_s("cpu"),
        "cpu_share": process.get("on_cpu_ns", 0) / 1e9 / seconds,
        "runqueue_share": process.get("runqueue_ns", 0) / 1e9 / seconds,
        "major_faults": process.get("major_faults", 0) / seconds,
    }


def plot_timeline(stream: str | os.PathLike[str] | pd.DataFrame) -> Figure:
    """Draws a timeline: rates, waiting, the disk's latency and the machine's pressure over time.

    Intervals with a bottleneck are shaded.

    Args:
        stream: the stream of a capture with ``config.with_probes(...)``, or the table that
            :func:`timeline` returned.

    Returns:
        A figure of four panels over one axis of time. Save it with
        ``figure.savefig("timeline.png")``.

    Raises:
        NotFoundError: (a FileNotFoundError) there are no snapshots beside the stream.
        CorruptError: a file holds something other than the snapshots of a capture.
    """
    from .blocks.figures import draw_timeline

    return draw_timeline(stream if isinstance(stream, pd.DataFrame) else timeline(stream))
