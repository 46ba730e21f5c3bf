"""Draws snapshots of block devices with matplotlib. It needs no display."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..._extras import extra

with extra("report", "A figure of block devices"):
    import matplotlib.dates
    from matplotlib.colors import LogNorm
    from matplotlib.ticker import FuncFormatter, MaxNLocator

from ..._pages import drawing
from .analysis import Device, Floats, anomalous, bucket_edges_us, percentiles_us

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["device_figures", "draw_device", "draw_timeline", "file_stems", "latency_text"]

_SECONDS_A_DAY = 86400.0  # matplotlib counts days since 1970
_COLUMNS = 400  # the most columns of the heat map; each is two pixels wide


def latency_text(us: float) -> str:
    """A latency in us as text with three digits and a unit: ``512 us``, ``1.02 ms``, ``2.1 s``."""
    for scale, unit in ((1e6, "s"), (1e3, "ms")):
        if us >= scale:
            return f"{us / scale:.3g} {unit}"
    return f"{us:.3g} us"


def file_stems(names: Iterable[str]) -> dict[str, str]:
    """The beginning of each device's file names, by device name; all are different.

    It is the device's name, with other characters than letters, digits, ``.``, ``_`` and ``-``
    replaced by ``_``. A number is added if two devices would get the same.
    """
    stems: dict[str, str] = {}
    taken: set[str] = set()
    # Names that need no change come first, so that no changed name takes their place.
    for name in sorted(names, key=lambda name: (_safe(name) != name, name)):
        stem, number = _safe(name), 1
        while stem in taken:
            number += 1
            stem = f"{_safe(name)}_{number}"
        taken.add(stem)
        stems[name] = stem
    return stems


def _safe(name: str) -> str:
    return re.sub(r"^\.|[^A-Za-z0-9._-]", "_", name)


def device_figures(device: Device, percentiles: Sequence[float]) -> Iterator[tuple[str, Figure]]:
    """Yields a device's figures with their names. Empty figures are left out.

    Args:
        device: a device of a trace.
        percentiles: the percentiles of latency to draw, each from 0 to 100.
    """
    if device.requests.any():
        yield "latency_hist", _drawn(device, "requests by latency", _draw_latency_hist)
    if device.requests.any() or device.depths.any():
        yield "queue_depth", _drawn(device, "requests in flight", _draw_queue_depth)
    if device.requests.any():
        title = f"requests, {device.requests.sum():,} in all"
        yield "requests", _drawn(device, title, _draw_requests)
        yield (
            "latency_percentiles",
            _drawn(device, "latency", _draw_latency_percentiles, percentiles),
        )


def draw_device(
    device: Device, directory: Path, stem: str, percentiles: Sequence[float]
) -> list[Path]:
    """Writes a device's figures as PNGs.

    Args:
        device: a device of a trace.
        directory: the folder of the files.
        stem: the beginning of their names.
        percentiles: the percentiles of latency to draw, each from 0 to 100.

    Returns:
        The paths of the files.

    Raises:
        OSError: a file cannot be written.
    """
    return [
        _save(figure, directory / f"{stem}_{name}.png")
        for name, figure in device_figures(device, percentiles)
    ]


def draw_timeline(table: pd.DataFrame) -> Figure:
    """Draws a timeline: four panels over time, shaded in intervals with a bottleneck.

    Args:
        table: a table of :func:`.correlation.timeline`.
    """
    with drawing.figure((9, 9)) as figure:
        rates, waits, latency, pressure = figure.subplots(4, sharex=True)
        edges = np.append(table.index[0] - table["interval_s"].iloc[0], table.index)

        def steps(axes: Axes, column: str, label: str, scale: float = 1.0) -> None:
            if table[column].notna().any():
                values = table[column].to_numpy(np.float64) * scale
                axes.stairs(values, edges, baseline=None, linewidth=1.4, label=label)

        steps(rates, "captured_mb_s", "activations captured", 1e6)
        steps(rates, "file_mb_s", "stream written", 1e6)
        steps(rates, "disk_mb_s", "disk, reads and writes", 1e6)
        rates.set_ylabel("bytes a second")
        # The last interval may be a few milliseconds, in which a rate says little.
        long = table["interval_s"] >= table["interval_s"].median() / 2
        drawn = table.loc[long, ["captured_mb_s", "file_mb_s", "disk_mb_s"]].max().max() * 1e6
        rates.set_ylim(top=drawn * 1.05 if drawn > 0 else None)
        steps(waits, "stall_share", "model waits for room", 100)
        steps(waits, "write_share", "writer in write calls", 100)
        steps(waits, "write_blocked_share", "writer waits for the disk", 100)
        steps(waits, "cpu_throttled_share", "CPU quota used up", 100)
        waits.set_ylabel("% of the interval")
        steps(latency, "disk_mean_us", "mean")
        steps(latency, "disk_p99_us", "p99")
        latency.set_yscale("log")
        drawing.log_ticks(latency.yaxis, latency_text)
        latency.set_ylabel("latency of the disk")
        steps(pressure, "io_pressure", "I/O", 100)
        steps(pressure, "memory_pressure", "memory", 100)
        steps(pressure, "cpu_pressure", "CPU", 100)
        pressure.set_ylabel("% of the time\nsome task waits")
        pressure.set_xlabel("seconds since the capture began")
        for axes in (rates, waits, latency, pressure):
            for what, color in (("disk", drawing.ALARM), ("cpu", drawing.MUTED)):
                for row in np.flatnonzero(table["bottleneck"] == what):
                    axes.axvspan(edges[row], edges[row + 1], color=color, alpha=0.15, linewidth=0)
            axes.grid(True, axis="y")
            if axes.get_legend_handles_labels()[0]:
                axes.legend(loc="upper left", bbox_to_anchor=(1, 1))
            else:
                axes.text(0.5, 0.5, "not recorded", transform=axes.transAxes, ha="center")
            if axes is not latency:
                axes.set_ylim(bottom=0)
        drawing.size_axis(rates, "y")
        drawing.title(
            rates,
            "The capture over time",
            "shaded: the model waits, red for the disk, grey for the CPU",
        )
        return figure


def _draw_latency_hist(axes: Axes, device: Device) -> None:
    edges, rows = _cells(device)
    used = np.flatnonzero(device.counts.any(axis=0))
    first, last = int(used[0]), int(used[-1]) + 1
    counts = np.nan_to_num(_spread(device.counts[:, first:last], rows))
    # Neighbouring windows share a column if there are many, because a column narrower than a pixel
    # would be invisible.
    together = -(-len(rows) // _COLUMNS)
    starts = np.arange(0, len(rows), together)
    counts = np.add.reduceat(counts, starts, axis=0)
    # All buckets have the same height. A logarithmic axis has no place for 0 to 2 us.
    mesh = axes.pcolormesh(
        np.append(edges[starts], edges[-1]),
        np.arange(first, last + 1),
        np.ma.masked_less(counts.T, 1),
        norm=LogNorm(1, max(10.0, float(counts.max()))),
        cmap="viridis_r",
        rasterized=True,  # an image inside vector graphics
    )
    label = "requests in the window" if together == 1 else f"requests in {together} windows"
    plain = FuncFormatter(lambda count, _: f"{count:,.0f}")  # not 10^n, the default for logs
    bar = axes.figure.colorbar(mesh, ax=axes, label=label, format=plain)
    bar.outline.set_visible(False)
    bounds = bucket_edges_us(last)
    axes.yaxis.set_major_locator(MaxNLocator(nbins=12, integer=True, steps=[1, 2, 4, 5, 10]))
    axes.yaxis.set_major_formatter(
        FuncFormatter(lambda at, _: latency_text(bounds[int(at)]) if 0 <= at <= last else "")
    )
    axes.set_ylabel("latency (buckets of powers of two)")


def _draw_queue_depth(axes: Axes, device: Device) -> None:
    _, rows = _cells(device)
    # A gap gets any time, because its NaN is not drawn.
    times = np.where(rows >= 0, device.ends[rows], device.ends[np.roll(rows, -1)])
    depths = _spread(device.depths.astype(np.float64), rows)
    axes.plot(times / _SECONDS_A_DAY, depths, marker=".", markersize=4, linewidth=1, clip_on=False)
    axes.set_ylabel("requests in flight, at each snapshot")
    axes.set_ylim(bottom=0, top=max(1.0, 1.05 * float(device.depths.max())))
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))


def _draw_requests(axes: Axes, device: Device) -> None:
    edges, rows = _cells(device)
    axes.stairs(_spread(device.requests / device.intervals, rows), edges, fill=True)
    axes.set_ylabel("requests completed per second")
    axes.set_ylim(bottom=0)


def _draw_latency_percentiles(axes: Axes, device: Device, percentiles: Sequence[float]) -> None:
    edges, rows = _cells(device)
    values = _spread(percentiles_us(device.counts, percentiles), rows)
    for percentile, line in zip(percentiles, values.T, strict=True):
        axes.stairs(line, edges, baseline=None, linewidth=1.3, label=f"p{percentile:g}")
    strange = _spread(anomalous(device.counts).astype(np.float64), rows) == 1
    if strange.any():
        axes.broken_barh(
            [(edges[i], edges[i + 1] - edges[i]) for i in np.flatnonzero(strange)],
            (0, 1),
            transform=axes.get_xaxis_transform(),
            color=drawing.ALARM,
            alpha=0.2,
            zorder=0,
            label="anomalous window",
        )
    axes.set_yscale("log")
    drawing.log_ticks(axes.yaxis, latency_text)
    axes.set_ylabel("latency in the window")
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1))


def _drawn(device: Device, title: str, draw: Callable[..., None], *arguments: Any) -> Figure:
    """A figure over the time of a trace. ``draw`` gets its axes, the device and the arguments."""
    with drawing.figure((9, 4.5)) as figure:
        axes = figure.add_subplot()
        axes.set_xlabel("time (UTC)")
        edges, _ = _cells(device)
        dates: Any = matplotlib.dates  # its classes have no types
        locator = dates.AutoDateLocator(tz=timezone.utc)
        axes.xaxis.set_major_locator(locator)
        axes.xaxis.set_major_formatter(dates.ConciseDateFormatter(locator, tz=timezone.utc))
        axes.set_xlim(edges[0], edges[-1])
        axes.grid(True, axis="y")
        draw(axes, device, *arguments)
        drawing.title(axes, f"{device.name}: {title}")
        return figure


def _cells(device: Device) -> tuple[Floats, Any]:
    """Divides time into cells: one for each window, and one for each gap between windows.

    Returns:
        (cells + 1,) float64, the edges in days since 1970; (cells,) int64, the window of each cell,
        -1 for a gap.
    """
    edges = [float(device.ends[0] - device.intervals[0])]
    rows: list[int] = []
    for row, (end, interval) in enumerate(zip(device.ends, device.intervals, strict=True)):
        if end - interval - edges[-1] > interval / 2:
            edges.append(float(end - interval))
            rows.append(-1)
        edges.append(max(float(end), edges[-1]))
        rows.append(row)
    return np.array(edges) / _SECONDS_A_DAY, np.array(rows)


def _spread(values: Any, rows: Any) -> Any:
    """Turns values of windows (windows, ...) into values of cells (cells, ...); NaN in gaps."""
    spread = values[rows].astype(np.float64)
    spread[rows < 0] = np.nan
    return spread


def _save(figure: Figure, path: Path) -> Path:
    with drawing.settings():
        figure.savefig(path, format="png")
    return path
