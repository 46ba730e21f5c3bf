"""Writes the timeline of a capture as a Perfetto trace."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .._atomic import typed_errors
from .._files import replacing
from .._native import ReaderInfo
from .._warn import warn
from ..analysis.reader import ActivationReader
from ..errors import InvalidArgumentError, StrapError
from ._captured import Drawn, Packets, draw
from ._machine import Counters, read_counters
from ._perfetto import PerfettoTrace, is_trace
from ._profiler import ProfilerTrace, read_profiler

__all__ = ["NoTimesError", "Timeline", "write_timeline"]

_SET_NS = 1_000_000  # a clock that was set by more than this is told

_RAN_TOGETHER = "Give the trace of a profiler that ran during the capture"
_SAME_MACHINE = (
    f"{_RAN_TOGETHER}. If it did, the machine was restarted, or the capture is of another one: "
    "capture with config.with_probes(), which records both clocks"
)


class NoTimesError(StrapError, LookupError):
    """The capture does not say when its packets were captured."""


@dataclasses.dataclass(frozen=True)
class Timeline:
    """A timeline that was written.

    Attributes:
        path: the file.
        packets: instants of packets: rows of the index that have a packet and a time.
        missing: instants of tensors that were not captured.
        untimed: rows of the capture that have no time, and are left out.
        steps, tokens, requests: slices of each.
        counters: values of the counters of the probes.
        profiler_events: slices and instants of the profiler.
        bytes: length of the file.
    """

    path: str
    packets: int
    missing: int
    untimed: int
    steps: int
    tokens: int
    requests: int
    counters: int
    profiler_events: int
    bytes: int


def write_timeline(
    stream: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    profiler: str | os.PathLike[str] | None = None,
    overwrite: bool = False,
) -> Timeline:
    """Writes a Perfetto trace of a capture, for https://ui.perfetto.dev.

    The file appears when it is complete. docs/howto/timeline.md describes its tracks. A warning
    says that the time of the day was set during the capture.

    It takes the memory of an `ActivationReader`, about 180 bytes for each packet, and about 200
    bytes for each event of the profiler's file.

    Args:
        stream: the stream of a capture. Its index, its token file and the files of its probes are
            expected beside it.
        out: the file. An earlier timeline there is replaced.
        profiler: a trace of PyTorch's profiler (`export_chrome_trace`), JSON or JSON in gzip, of
            the same run. Its events are mapped to the capture's clock.
        overwrite: replace what is at `out`, whatever it is.

    Raises:
        NotFoundError: (a FileNotFoundError) there is no such stream, or no such file.
        NoTimesError: (a LookupError) the capture has packets, but none has a time: it has no index.
        InvalidArgumentError: (a ValueError) `out` is another file; or `profiler` is no trace of the
            profiler, or of another time than the capture.
        CorruptError: (a ValueError) a file is damaged, or the profiler's has another clock.
        NoSpaceError, StrapIOError: (an OSError) the file cannot be written.
    """
    target = Path(os.path.realpath(out))
    with ActivationReader(stream, warn=False) as reader:
        packets = Packets(reader._catalogue)
        _check_times(reader.path, reader.info, packets)
        _check_target(target, overwrite)
        counters = read_counters(reader._file)
        profiled = None if profiler is None else read_profiler(profiler)
        clock = _clock(counters, packets, profiled)
        metadata: Mapping[str, Any] = reader.token_metadata or {}
        with typed_errors(f"cannot write to {target}"), replacing(target, durable=False) as partial:
            with open(partial, "wb", buffering=1 << 20) as file:
                trace = PerfettoTrace(file)
                drawn = _draw(trace, reader.path, packets, metadata, counters, profiled, clock)
            size = partial.stat().st_size
    return Timeline(
        path=os.fspath(out),
        untimed=packets.untimed,
        counters=counters.samples,
        profiler_events=0 if profiled is None else profiled.events,
        bytes=size,
        **dataclasses.asdict(drawn),
    )


def _draw(
    trace: PerfettoTrace,
    stream: str,
    packets: Packets,
    metadata: Mapping[str, Any],
    counters: Counters,
    profiled: ProfilerTrace | None,
    clock: tuple[int, int] | None,
) -> Drawn:
    if clock is not None:
        trace.clocks(*clock)
    elif len(packets.times):
        trace.clocks(int(packets.times[0]), None)
    root = trace.track(f"Capture {os.path.basename(stream)}")
    drawn = draw(trace, root, packets, metadata.get("tokens", ()))
    counters.draw(trace, root)
    if profiled is not None and clock is not None:
        profiled.draw(trace, clock[1] - clock[0])
    return drawn


def _check_times(path: str, info: ReaderInfo, packets: Packets) -> None:
    """
    Raises:
        NoTimesError: there are packets, but none has a time.
    """
    if info.packets and not len(packets.times):
        raise NoTimesError(
            f"{path}: no packet has a time, because the index is missing or not used"
            + (f": {info.problem}" if info.problem else "")
        )


def _check_target(target: Path, overwrite: bool) -> None:
    """
    Raises:
        InvalidArgumentError: another file would be replaced.
    """
    if overwrite or not target.exists():
        return
    beginning = b""
    if target.is_file():
        with open(target, "rb") as file:
            beginning = file.read(64)
    if not is_trace(beginning):
        raise InvalidArgumentError(
            f"{target} exists and is no timeline: choose another file, or replace it with overwrite"
        )


def _clock(
    counters: Counters, packets: Packets, profiled: ProfilerTrace | None
) -> tuple[int, int] | None:
    """A time in ns of CLOCK_MONOTONIC, and the time of the day at it in ns since 1970.

    The probes' snapshots have both. Without them, this machine's clocks are used for a profiler's
    trace. They give the same difference, unless the machine was restarted or suspended, the time
    of the day was set, or the capture is of another machine.

    Raises:
        InvalidArgumentError: the profiler's trace is of another time than the capture.
    """
    if counters.clock_set_ns > _SET_NS:
        warn(
            f"the time of the day was set by {counters.clock_set_ns / 1e6:,.1f} ms during the "
            "capture: the profiler's events may be off by as much"
        )
    if profiled is None:
        return counters.clock
    clock = counters.clock or _clocks_of_this_machine()
    if len(packets.times) and profiled.events:
        ahead = clock[1] - clock[0]
        begin, end = (int(packets.times[place]) + ahead for place in (0, -1))
        apart = max(profiled.begin_ns - end, begin - profiled.end_ns)
        if apart > 0:
            which = "after" if profiled.begin_ns > end else "before"
            raise InvalidArgumentError(
                f"{profiled.path} is of another time: it was recorded {apart / 1e9:,.3f} s {which} "
                f"the capture. {_RAN_TOGETHER if counters.clock else _SAME_MACHINE}"
            )
    return clock


def _clocks_of_this_machine() -> tuple[int, int]:
    """CLOCK_MONOTONIC and the time of the day, read within the shortest of some tries."""
    tries = []
    for _ in range(20):
        before = time.monotonic_ns()
        realtime = time.time_ns()
        after = time.monotonic_ns()
        tries.append((after - before, (before + after) // 2, realtime))
    _, monotonic, realtime = min(tries)
    return monotonic, realtime
