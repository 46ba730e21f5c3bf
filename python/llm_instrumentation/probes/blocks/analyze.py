"""The command that summarises snapshots of block devices: ``scripts/analyze_tracepoints.py``."""

from __future__ import annotations

import argparse
import math
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import numpy as np

from ...errors import InvalidArgumentError, StrapError
from ..jsonl import read_snapshots
from .analysis import (
    ANOMALY_RULE,
    MIN_WINDOWS,
    BlockTrace,
    Device,
    Metrics,
    anomalous,
    mean_us,
    parse_metrics,
    parse_trace,
    percentiles_us,
    utc_text,
)
from .association import METHOD, Association, associations

__all__ = ["main"]

_SHOWN = 20  # at most so many anomalous windows of a device are printed
_Parsed = TypeVar("_Parsed", BlockTrace, Metrics)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Prints the error in one line, without the usage, and exits with 2."""
        self.exit(2, f"{self.prog}: {message}\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints a summary of each device, writes its figures, and returns the exit code."""
    parser = _Parser(
        prog="analyze_tracepoints.py",
        description="Latencies and queue depths of block devices, from what tracepoints.py wrote.",
        epilog="Ends with 2 for a bad argument or a file of something else, 1 for a file that "
        "cannot be read or written, else 0.",
    )
    parser.add_argument("--input", required=True, help="file of snapshots")
    parser.add_argument("--output-dir", required=True, help="for the figures; made if missing")
    parser.add_argument("--system-metrics", help="file of system metrics of the same time")
    parser.add_argument(
        "--top", type=int, default=5, help="processes to show of the system metrics (default: 5)"
    )
    parser.add_argument(
        "--percentiles", default="50,90,99", help="of latency, 0 to 100 (default: 50,90,99)"
    )
    parser.add_argument("--html", help="file for all of it as one page")
    given = parser.parse_args(arguments)
    try:
        _analyze(given)
    except (StrapError, OSError) as error:
        print(f"analyze_tracepoints.py: {error}", file=sys.stderr)
        return 1 if isinstance(error, OSError) else 2
    return 0


def _analyze(given: argparse.Namespace) -> None:
    percentiles = _percentiles(given.percentiles)
    if given.top < 1:
        raise InvalidArgumentError(f"--top {given.top}: give 1 or more")
    page = None if given.html is None else Path(given.html)
    if page is not None and page.exists() and not page.is_file():
        raise InvalidArgumentError(f"--html {page}: it would be replaced; give a file")
    trace = _parsed(given.input, parse_trace)
    metrics = None
    if given.system_metrics is not None:
        metrics = _parsed(given.system_metrics, parse_metrics)
    directory = Path(given.output_dir)
    directory.mkdir(parents=True, exist_ok=True)
    found: dict[str, list[Association]] = {}
    if metrics is not None:
        busy = (device for device in trace.devices if device.requests.any())
        found = {device.name: associations(device, metrics) for device in busy}
    for line in _summary(trace, metrics, found, percentiles, given.top):
        print(line)
    written = _draw(trace, directory, percentiles)
    if written:
        print(f"{written} figures in {directory}")
    if page is not None:
        from .report import write_report

        write_report(page, trace, metrics, found, percentiles, given.top, source=given.input)
        print(f"report in {page}")


def _percentiles(text: str) -> list[float]:
    try:
        percentiles = sorted({float(part) for part in text.split(",")})
    except ValueError:
        raise InvalidArgumentError(f"--percentiles {text}: give numbers, as 50,90,99") from None
    for percentile in percentiles:
        if not 0 <= percentile <= 100:
            raise InvalidArgumentError(f"--percentiles {text}: give numbers from 0 to 100")
    return percentiles


def _parsed(path: str, parse: Callable[[Iterator[dict[str, Any]]], _Parsed]) -> _Parsed:
    """Parses a file of snapshots. Prints its warnings to the standard error, one line each."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        parsed = parse(read_snapshots(path))
    for warning in caught:
        print(f"analyze_tracepoints.py: {warning.message}", file=sys.stderr)
    return parsed


def _draw(trace: BlockTrace, directory: Path, percentiles: Sequence[float]) -> int:
    # Importing matplotlib takes a second, and a trace without requests has no figures.
    if not any(device.requests.any() or device.depths.any() for device in trace.devices):
        return 0
    from .figures import draw_device, file_stems

    stems = file_stems(device.name for device in trace.devices)
    return sum(
        len(draw_device(device, directory, stems[device.name], percentiles))
        for device in trace.devices
    )


# ---- the summary ----


def _summary(
    trace: BlockTrace,
    metrics: Metrics | None,
    found: Mapping[str, Sequence[Association]],
    percentiles: Sequence[float],
    top: int,
) -> Iterator[str]:
    if trace.windows == 0:
        yield "no snapshots: the file is empty"
    elif not any(device.requests.any() for device in trace.devices):
        yield f"no requests in {trace.windows} windows"
    for device in trace.devices:
        yield from _device(device, percentiles)
        if device.name in found:
            yield from _associations(found[device.name])
    lost = [f"{name} {count}" for name, count in trace.losses.items() if count]
    if lost:
        yield f"not followed, or not to their end: {', '.join(lost)}"
    if metrics is not None:
        if found:
            yield f"association: {METHOD}; it is no cause"
        yield from _processes(metrics, top)


def _device(device: Device, percentiles: Sequence[float]) -> Iterator[str]:
    windows, counts = len(device.ends), device.counts.sum(axis=0)
    peak = int(device.depths.argmax())
    yield f"{device.name}"
    seconds = device.intervals.sum()
    yield f"  requests           {counts.sum()} in {windows} windows, {seconds:.1f} s"
    if counts.any():
        yield f"  mean latency       about {_us(float(mean_us(counts)))}"
        for percentile, us in zip(percentiles, percentiles_us(counts, percentiles), strict=True):
            yield f"  {f'p{percentile:g}':<18} {_us(us)}"
    at = f", at {utc_text(device.ends[peak])}" if device.depths[peak] else ""
    yield f"  peak queue depth   {device.depths[peak]}{at}"
    yield from _anomalies(device)


def _anomalies(device: Device) -> Iterator[str]:
    busy = np.count_nonzero(device.requests)
    if busy < MIN_WINDOWS:
        yield f"  anomalous windows  too few windows with requests to say: {busy} of {MIN_WINDOWS}"
        return
    found = np.flatnonzero(anomalous(device.counts))
    yield f"  anomalous windows  {len(found)} of {busy} with requests ({ANOMALY_RULE})"
    p99 = percentiles_us(device.counts, [99])[:, 0]
    worst = found[np.argsort(-p99[found], kind="stable")[:_SHOWN]]
    for window in np.sort(worst):
        yield (
            f"    {utc_text(device.ends[window])}  p99 {_us(p99[window])}, "
            f"{device.requests[window]} requests"
        )
    if len(found) > _SHOWN:
        yield f"    and {len(found) - _SHOWN} with a lower p99"


def _associations(found: Sequence[Association]) -> Iterator[str]:
    yield "  system metrics by their association with latency"
    for one in found:
        if one.n < MIN_WINDOWS:
            told = f"too few windows, n = {one.n} of {MIN_WINDOWS}"
        elif math.isnan(one.rho):
            told = f"none, it or the latency does not vary, n = {one.n}"
        else:
            told = f"rho {one.rho:+.2f}, n = {one.n}, p = {one.p:.2g}"
        yield f"    {one.metric:<39} {told}"


def _processes(metrics: Metrics, top: int) -> Iterator[str]:
    shown = metrics.processes.head(top)
    if shown.empty:
        yield "no processes in the system metrics"
        return
    yield f"longest off the CPU, {len(shown)} of {len(metrics.processes)} processes"
    yield f"  {'pid':>10}  {'off-CPU s':>12}  {'page faults':>12}"
    for pid, row in shown.iterrows():
        yield f"  {pid:>10}  {row['off_cpu_ns'] / 1e9:>12.3f}  {row['page_faults']:>12}"


def _us(us: float) -> str:
    """A latency with three digits. The unit is always us, so that a column is easy to compare."""
    return f"{us:.0f} us" if us >= 100 else f"{us:.3g} us"
