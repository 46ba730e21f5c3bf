"""Writes the report of a trace of block devices: one HTML page in the style of mrm-trace."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from pathlib import Path

import numpy as np

from ..._extras import extra

with extra("report", "A report of block devices"):
    import pandas as pd

from ..._files import write_text
from ..._pages import drawing, page, units
from .analysis import (
    ANOMALY_RULE,
    MIN_WINDOWS,
    BlockTrace,
    Device,
    Metrics,
    anomalous,
    mean_us,
    percentiles_us,
    utc_text,
)
from .association import METHOD, Association
from .figures import device_figures, file_stems

__all__ = ["device_sections", "write_report"]

_FIGURE_IN = (6.2, 3.6)
_MOST_WINDOWS = 200  # at most so many anomalous windows of a device are listed
_DESCRIPTIONS = {
    "latency_hist": "Heat map of requests by latency and time",
    "queue_depth": "Requests in flight at each snapshot",
    "requests": "Requests completed per second over time",
    "latency_percentiles": "Percentiles of latency over time",
}


def write_report(
    path: Path,
    trace: BlockTrace,
    metrics: Metrics | None,
    found: Mapping[str, Sequence[Association]],
    percentiles: Sequence[float],
    top: int,
    *,
    source: str,
) -> Path:
    """Writes the report. It needs no other file, and follows the reader's light or dark theme.

    Args:
        path: the file to write.
        trace: the trace of block devices.
        metrics: system metrics of the same time; None: the report has none.
        found: the associations of each device with the metrics, by the device's name.
        percentiles: of latency, each from 0 to 100.
        top: how many processes to list.
        source: the file that the trace was read from, for the title.

    Raises:
        OSError: the file cannot be written.
    """
    title = f"Block devices: {Path(source).name}"
    body = [
        f"<header><h1>{escape(title)}</h1>",
        page.paragraph(_time(trace), "sub"),
        f'<div class="chips">{"".join(_chips(trace))}</div></header>',
        *device_sections(trace, found, percentiles),
    ]
    if metrics is not None:
        body.append(page.section("Longest off the CPU", _processes(metrics, top)))
    body.append(page.section("Before you use the numbers", *_cautions(metrics)))
    return write_text(path, page.page(title, "\n".join(part for part in body if part)))


def device_sections(
    trace: BlockTrace,
    found: Mapping[str, Sequence[Association]] | None = None,
    percentiles: Sequence[float] = (50, 95, 99),
) -> Iterator[str]:
    """What is lost of a trace, a table of its devices, and a section for each.

    Arguments are those of `write_report`.
    """
    yield from _losses(trace)
    yield page.section("Devices", page.table(_overview(trace, percentiles)))
    yield from _devices(trace, found or {}, percentiles)


def _time(trace: BlockTrace) -> str:
    if not trace.devices:
        return "no devices"
    device = trace.devices[0]  # all have the same windows
    return f"{utc_text(device.ends[0] - device.intervals[0])} to {utc_text(device.ends[-1])}"


def _chips(trace: BlockTrace) -> Iterator[str]:
    yield page.chip("windows", units.count(trace.windows))
    if trace.devices:
        yield page.chip("length", units.seconds(float(trace.devices[0].intervals.sum())))
    requests = sum(int(device.requests.sum()) for device in trace.devices)
    yield page.chip("requests", units.count(requests))


def _losses(trace: BlockTrace) -> Iterator[str]:
    lost = [f"{name} {units.count(count)}" for name, count in trace.losses.items() if count]
    if lost:
        yield page.notice("fair", f"Not followed, or not to their end: {', '.join(lost)}.")


def _overview(trace: BlockTrace, percentiles: Sequence[float]) -> pd.DataFrame:
    rows = []
    for device in trace.devices:
        counts = device.counts.sum(axis=0)
        latencies = [float(mean_us(counts)), *percentiles_us(counts, percentiles).tolist()]
        told = np.count_nonzero(device.requests) >= MIN_WINDOWS
        rows.append(
            (
                device.name,
                int(counts.sum()),
                *map(_rounded, latencies),
                int(device.depths.max()),
                int(anomalous(device.counts).sum()) if told else math.nan,
            )
        )
    columns = ["device", "requests", "mean us", *(f"p{p:g} us" for p in percentiles)]
    columns += ["peak queue depth", "anomalous windows"]
    table: pd.DataFrame = pd.DataFrame(rows, columns=columns)
    return table


def _rounded(value: float) -> float:
    """Rounds to three digits, but to a whole number from 100 on."""
    return float(f"{value:.3g}") if not abs(value) >= 100 else float(round(value))


def _devices(
    trace: BlockTrace, found: Mapping[str, Sequence[Association]], percentiles: Sequence[float]
) -> Iterator[str]:
    stems = file_stems(device.name for device in trace.devices)
    for device in trace.devices:
        parts = [_figures(device, stems[device.name], percentiles), _anomalies(device)]
        parts += _associations(found.get(device.name, ()))
        yield page.section(device.name, *parts)


def _figures(device: Device, stem: str, percentiles: Sequence[float]) -> str:
    drawn = []
    with drawing.settings():
        for name, figure in device_figures(device, percentiles):
            figure.set_size_inches(*_FIGURE_IN)
            description = f"{_DESCRIPTIONS[name]}, {device.name}"
            drawn.append(page.figure(drawing.inline_svg(figure, f"{stem}-{name}", description)))
    return f'<div class="figures">{"".join(drawn)}</div>' if drawn else ""


def _anomalies(device: Device) -> str:
    found = np.flatnonzero(anomalous(device.counts))
    if not len(found):
        return ""
    p99 = percentiles_us(device.counts, [99])[:, 0]
    worst = np.sort(found[np.argsort(-p99[found], kind="stable")[:_MOST_WINDOWS]])
    rows = [
        (utc_text(device.ends[at]), _rounded(p99[at]), int(device.requests[at]), device.depths[at])
        for at in worst
    ]
    columns = ["window ends", "p99 us", "requests", "in flight"]
    heading = f"Anomalous windows: {len(found)}"
    if len(found) > len(rows):
        heading += f", the {len(rows)} with the highest p99"
    return page.details(heading, page.table(pd.DataFrame(rows, columns=columns)))


def _associations(found: Sequence[Association]) -> Iterator[str]:
    if not found:
        return
    rows = [(one.metric, one.n, round(one.rho, 2), round(one.p, 4)) for one in found]
    yield "<h3>System metrics, by their association with latency</h3>"
    yield page.table(pd.DataFrame(rows, columns=["metric", "windows", "rho", "p adjusted"]))
    yield page.paragraph(f"{METHOD}. An association is no cause.", "sub")


def _processes(metrics: Metrics, top: int) -> str:
    shown = metrics.processes.head(top)
    table = pd.DataFrame(
        {
            "pid": shown.index.map(str),
            "off_cpu_s": shown["off_cpu_ns"].to_numpy() / 1e9,
            "page faults": shown["page_faults"].to_numpy(),
        }
    )
    return page.table(table)


def _cautions(metrics: Metrics | None) -> Iterable[str]:
    yield page.paragraph(
        "Latencies come from histograms of powers of two: percentiles are off by less than a "
        "factor of 2, and the mean is 3/4 to 3/2 of the true one."
    )
    yield page.paragraph(
        "Queue depth is known when a snapshot is taken; what peaked between two is not seen."
    )
    yield page.paragraph(f"Anomalous is a window with a {ANOMALY_RULE}; of {MIN_WINDOWS} windows.")
    if metrics is not None:
        yield page.paragraph(
            "A metric that goes with latency need not cause it: load moves both. Where the series "
            "have a trend, or a memory that is longer than the blocks, p is too small."
        )
