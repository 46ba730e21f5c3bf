"""Draws the figures of a run.

Each figure is drawn from tables alone. For an empty table, the figure says that it is empty.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..._extras import extra

with extra("mrm", "A figure of a run"):
    import pandas as pd
    from matplotlib.ticker import (
        FixedLocator,
        FuncFormatter,
        MaxNLocator,
        NullLocator,
        PercentFormatter,
    )

from ..._pages import drawing, units
from ..._pages.drawing import Floats
from . import looks
from .tables import as_frames, in_order

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = [
    "FIGURES",
    "FigureSpec",
    "generate_all_figures",
    "plot_retention_histogram",
    "plot_working_set",
    "plot_write_once",
]

Frames = Mapping[str, pd.DataFrame]

#: The limits of ``suitability`` for retention in seconds, and for the write-once ratio.
_RETENTION_LIMITS = ((1.0, "medium"), (10.0, "high"))
_WRITE_ONCE_LIMITS = ((0.5, "medium"), (0.8, "high"))
_PANEL_IN = 0.78


@dataclass(frozen=True)
class FigureSpec:
    """A figure of a run, drawn from the tables that ``needs`` names."""

    name: str
    needs: tuple[str, ...]
    draw: Callable[[Frames], Figure]
    always: bool = False  #: draw it for an empty table too


def generate_all_figures(
    analysis: Mapping[str, Any],
    run_dir: Path | str,
    formats: Sequence[str] = ("png",),
) -> list[Path]:
    """Draws each figure whose tables are in ``analysis``.

    If its table is empty, a figure of a table of ``compute_all`` says so, and any other figure is
    not drawn.

    Args:
        analysis: the tables of ``compute_all``, and if wanted those of ``compute_distributions``,
            ``distinct_pages``, ``kv_growth`` and ``process_samples``, by name.
        run_dir: the run folder; it is created if it does not exist.
        formats: some of png, pdf, svg.

    Returns:
        The files; the figures of ``compute_all`` come first.

    Raises:
        ValueError: a format is unknown.
    """
    tables = as_frames(analysis)
    return [
        path
        for spec in FIGURES
        if set(spec.needs) <= tables.keys() and (spec.always or not tables[spec.needs[0]].empty)
        for path in _saved(spec, tables, Path(run_dir), formats)
    ]


def plot_retention_histogram(
    retention_per_region: Any, run_dir: Path | str, formats: Sequence[str] = ("png",)
) -> Path:
    """Writes ``retention_histogram.png``, and returns the file of the first of ``formats``."""
    return _one(
        "retention_histogram", {"retention_per_region": retention_per_region}, run_dir, formats
    )


def plot_working_set(
    working_set_summary: Any, run_dir: Path | str, formats: Sequence[str] = ("png",)
) -> Path:
    """Writes ``working_set.png``, and returns the file of the first of ``formats``."""
    return _one("working_set", {"working_set_summary": working_set_summary}, run_dir, formats)


def plot_write_once(
    write_once: Any, run_dir: Path | str, formats: Sequence[str] = ("png",)
) -> Path:
    """Writes ``write_once.png``, and returns the file of the first of ``formats``."""
    return _one("write_once", {"write_once": write_once}, run_dir, formats)


def _one(name: str, tables: Mapping[str, Any], run_dir: Path | str, formats: Sequence[str]) -> Path:
    spec = next(spec for spec in FIGURES if spec.name == name)
    return _saved(spec, as_frames(tables), Path(run_dir), formats)[0]


def _saved(spec: FigureSpec, tables: Frames, folder: Path, formats: Sequence[str]) -> list[Path]:
    with drawing.settings():
        figure = spec.draw(tables)
        return [drawing.save(figure, folder / f"{spec.name}.{kind}") for kind in formats]


# ---- the figures ------------------------------------------------------------------------


def draw_retention_histogram(tables: Frames) -> Figure:
    """Draws a histogram of the retention of the regions, per type."""
    title = "Retention"
    table = tables["retention_per_region"]
    if table.empty:
        return drawing.nothing_to_show(title, "The trace has no regions, or cannot tell retention.")
    types = in_order(table["region_type"])
    values = {name: _column(table, name, "retention_s") for name in types}
    figure = drawing.new_figure(
        drawing.TOP_IN + _PANEL_IN * len(types) + drawing.BOTTOM_IN, title,
        "Regions by the time from their first store to their last load",
    )  # fmt: skip
    positive = np.concatenate(list(values.values()))
    positive = positive[positive > 0]
    low, high = (positive.min(), positive.max()) if len(positive) else (0.1, 1.0)
    axes_of = dict(zip(types, drawing.panels(figure, len(types), right_in=0.3), strict=True))
    for axes in axes_of.values():
        drawing.log_time_axis(axes, low, high)
    first, last = axes_of[types[0]].get_xlim()
    edges = np.geomspace(first, last, 1 + 6 * max(1, round(np.log10(last / first))))
    zeros = {name: int((value == 0).sum()) for name, value in values.items()}
    # A logarithmic axis has no 0, so regions with retention 0 get a bar of their own on the left.
    nowhere = first / 10**0.6
    for name, axes in axes_of.items():
        shade = looks.color(name)
        counts, _ = np.histogram(values[name], edges)
        axes.bar(edges[:-1], counts, np.diff(edges) * 0.94, align="edge", color=shade)
        if any(zeros.values()):
            axes.set_xlim(first / 10, last)
            axes.bar(nowhere, zeros[name], nowhere * 0.6, color=shade, alpha=0.45)
        drawing.count_axis(axes, max(counts.max(), zeros[name]))
        axes.grid(axis="y")
        looks.panel_label(axes, name, _spread(values[name], "region"))
        _mark_limits(axes, first, last, named=axes is axes_of[types[0]])
    if any(zeros.values()):
        _add_zero_tick(axes_of[types[-1]], first, nowhere)
    axes_of[types[-1]].set_xlabel("retention (logarithmic)")
    drawing.name_y(figure, "number of regions")
    return figure


def draw_working_set(tables: Frames) -> Figure:
    """Draws the size of the memory that was touched at all, per type.

    Without the table ``distinct_pages`` it is summed over the regions.
    """
    title = "Working set"
    table = tables["working_set_summary"]
    if table.empty:
        return drawing.nothing_to_show(title, "The trace has no rows.")
    table = table.set_index("region_type").loc[in_order(table["region_type"])]
    sums = table["total_bytes"].to_numpy(float)
    distinct, sizes = tables.get("distinct_pages"), sums
    if distinct is not None and set(table.index) <= set(distinct["region_type"]):
        sizes = distinct.set_index("region_type")["distinct_bytes"][table.index].to_numpy(float)
    else:
        distinct = None
    figure = drawing.new_figure(
        drawing.BARE_TOP_IN + 0.3 * len(table) + drawing.BOTTOM_IN, title,
        "Distinct pages of 4 KiB that were touched at all" if distinct is not None
        else "Pages of 4 KiB that were touched at all, summed over regions",
    )  # fmt: skip
    axes = drawing.panels(figure, 1, left_in=0.95, top_in=drawing.BARE_TOP_IN)[0]
    place = np.arange(len(table), dtype=float)[::-1]
    shades = [looks.color(name) for name in table.index]
    _draw_sizes(axes, place, sizes, shades)
    for y, row, bytes_, summed in zip(place, table.itertuples(), sizes, sums, strict=True):
        told = f"{units.size(bytes_)} in {units.counted(row.n_regions, 'region')}"
        if summed > bytes_:
            told += f", {units.size(summed)} summed over them"
        axes.annotate(told, (bytes_, y), xytext=(7, 0), textcoords="offset points", va="center")
    axes.set_xlabel("memory touched" + " (logarithmic)" * (axes.get_xscale() == "log"))
    axes.grid(axis="x")
    _name_rows(axes, place, list(table.index))
    return figure


def draw_write_once(tables: Frames) -> Figure:
    """Draws which part of the stored addresses was stored once, per type."""
    title = "Write-once ratio"
    table = tables["write_once"]
    if table.empty:
        return drawing.nothing_to_show(title, "The trace has no stores, or cannot tell them apart.")
    types = in_order(table["region_type"])
    figure = drawing.new_figure(
        drawing.TOP_IN + 0.36 * len(types) + drawing.BOTTOM_IN, title,
        "Addresses stored once, of those stored; bars: mean, lines: middle 80 % of regions",
    )  # fmt: skip
    axes = drawing.panels(figure, 1, left_in=0.95)[0]
    place = np.arange(len(types), dtype=float)[::-1]
    axes.set_xlim(0, 1.55)
    for limit, name in _WRITE_ONCE_LIMITS:
        axes.axvline(limit, color=drawing.INK, linewidth=0.8, linestyle=(0, (1, 2)))
        axes.annotate(
            f"{name} ≥ {limit:g}", (limit, 1), xycoords=("data", "axes fraction"), xytext=(0, 2),
            textcoords="offset points", ha="center", color=drawing.MUTED, fontsize=7,
        )  # fmt: skip
    for y, name in zip(place, types, strict=True):
        rows = table[table["region_type"] == name]
        ratios = rows["write_once_ratio"].to_numpy(float)
        axes.barh(y, ratios.mean(), 0.55, color=looks.color(name))
        if len(ratios) > 1:
            axes.hlines(y, *np.quantile(ratios, (0.1, 0.9)), color=drawing.INK, linewidth=1.2)
        once, stored = rows["n_write_once_addresses"].sum(), rows["n_written_addresses"].sum()
        told = f"{units.ratio(ratios.mean())} ({units.count(once)} of {units.count(stored)})"
        axes.annotate(told, (1.02, y), va="center")
    axes.xaxis.set_major_locator(FixedLocator([0, 0.2, 0.4, 0.6, 0.8, 1]))
    axes.grid(axis="x")
    axes.spines["bottom"].set_bounds(0, 1)
    axes.set_xlabel("write-once ratio", x=0.5 / 1.55)
    _name_rows(axes, place, types)
    return figure


def draw_retention_cdf(tables: Frames) -> Figure:
    """Draws the distribution function of the retention of the regions, per type."""
    title = "Retention, cumulated"
    table = tables["retention_cdf"]
    if table.empty:
        return drawing.nothing_to_show(title, "The trace has no regions, or cannot tell retention.")
    types = in_order(table["region_type"])
    times = table["retention_s"].to_numpy(float)
    positive = times[times > 0]
    figure = drawing.new_figure(
        3.3, title, "Part of a type's regions that is retained at most so long"
    )
    axes = drawing.panels(figure, 1, right_in=0.3)[0]
    low, high = (positive.min(), positive.max()) if len(positive) else (0.1, 1.0)
    drawing.log_time_axis(axes, low, high)
    first, last = axes.get_xlim()
    axes.set_ylim(0, 1.02)
    lines = []
    for name in types:
        rows = table[table["region_type"] == name]
        x = np.maximum(rows["retention_s"].to_numpy(float), first)
        y = rows["fraction"].to_numpy(float)
        x, y = np.concatenate([[first], x, [last]]), np.concatenate([[0.0], y, [1.0]])
        _curve(axes, x, y, name, drawstyle="steps-post")
        lines.append((name, x, y))
    _mark_limits(axes, first, last, named=True)
    axes.set_xlabel("retention (logarithmic)")
    drawing.name_y(figure, "part of the regions")
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.grid(axis="y")
    _name_curves(axes, lines)
    return figure


def draw_kv_growth(tables: Frames) -> Figure:
    """Draws the KV cache per token's step: the bytes held after the step, and loaded in it."""
    title = "KV cache over tokens"
    table = tables["kv_growth"]
    if not table[["live_bytes", "read_bytes"]].any(axis=None):
        return drawing.nothing_to_show(title, "No row of the KV cache knows its token and length.")
    by_context = bool(table["context_tokens"].notna().all())
    x_name = "context_tokens" if by_context else "token_index"
    held = table[table["live_bytes"].notna()]
    growth = kv_bytes_per_token(table)
    told = "Held from each step of a generation to the next"
    if growth is not None:
        told += f"; {units.size(growth)} more per token"
    figure = drawing.new_figure(2.7, title, told)
    axes = drawing.panels(
        figure, 1, left_in=0.85, right_in=0.75, top_in=drawing.BARE_TOP_IN
    )[0]  # fmt: skip
    shade = looks.color("kv_cache")
    ends: list[tuple[float, str, str]] = []
    top = 1.0
    for column, rows, name, color, dashes in (
        ("read_bytes", table, "loaded", drawing.MUTED, (0, (4, 1.5))),
        ("live_bytes", held, "held", shade, "-"),
    ):
        if not rows[column].any():
            continue
        for _, part in rows.groupby("generation"):
            axes.plot(
                part[x_name].to_numpy(float), part[column].to_numpy(float), color=color,
                linestyle=dashes, marker="o" if len(part) <= 40 else None, markersize=2.6,
                linewidth=1.2,
            )  # fmt: skip
        ends.append((float(rows[column].iloc[-1]), name, color))
        top = max(top, float(rows[column].max()))
    axes.set_ylim(0, top * 1.06)
    drawing.size_axis(axes, "y")
    first, last = float(table[x_name].min()), float(table[x_name].max())
    axes.set_xlim(first, last if last > first else first + 1)
    axes.xaxis.set_major_locator(MaxNLocator(8, integer=True))
    axes.set_xlabel("tokens in the context" if by_context else "token")
    drawing.name_y(figure, "memory in a step")
    axes.grid(axis="y")
    drawing.label_ends(axes, ends)
    return figure


def kv_bytes_per_token(table: pd.DataFrame) -> float | None:
    """By how many bytes the live KV cache grows per token of the first generation.

    This is the slope of a least-squares line. None if fewer than two steps tell the live bytes.
    """
    held = table[table["live_bytes"].notna() & (table["generation"] == 0)]
    if len(held) < 2:
        return None
    x, y = held["token_index"].to_numpy(float), held["live_bytes"].to_numpy(float)
    centred = x - x.mean()
    return float((centred * y).sum() / (centred**2).sum())


def draw_working_set_over_time(tables: Frames) -> Figure:
    """Draws the memory touched in each window of time, per type."""
    title = "Working set over time"
    table = tables["working_set_over_time"]
    if table.empty:
        return drawing.nothing_to_show(title, "The trace has no rows.")
    width = _window(table)
    figure, axes_of, x = _time_panels(table, title, f"Distinct pages touched in each {width}")
    for name, axes in axes_of.items():
        y = _over_windows(table, name, "working_set_bytes")
        axes.fill_between(x, y, step="post", color=looks.color(name), linewidth=0)
        axes.set_ylim(0, max(y.max(), 1) * 1.08)
        axes.yaxis.set_major_locator(FixedLocator([0, y.max()]))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: units.size(value)))
        axes.grid(axis="y")
        looks.panel_label(axes, name, f"at most {units.size(y.max())}")
    drawing.name_y(figure, "working set")
    return figure


def draw_bandwidth_over_time(tables: Frames) -> Figure:
    """Draws the bytes loaded and stored over time, or the accesses if rows have no lengths."""
    title = "Bandwidth over time"
    table = tables["bandwidth_over_time"]
    if table.empty:
        return drawing.nothing_to_show(title, "The trace has no rows.")
    in_bytes = bool(table["read_bytes"].any() or table["written_bytes"].any())
    loads, stores = ("read_bytes", "written_bytes") if in_bytes else ("reads", "writes")
    what = "Loaded above the line, stored below it"
    if not in_bytes:
        what = "Loads above the line, stores below it, as rows have no length"
    figure, axes_of, x = _time_panels(table, title, f"{what}; per {_window(table)}")

    def rate(value: float) -> str:
        each = units.size(abs(value)) if in_bytes else units.short_count(float(f"{abs(value):.3g}"))
        return f"{each}/s"

    for name, axes in axes_of.items():
        seconds = _window_seconds(table)
        up = _over_windows(table, name, loads) / seconds
        down = _over_windows(table, name, stores) / seconds
        axes.fill_between(x, up, step="post", color=looks.color(name), linewidth=0)
        axes.fill_between(x, -down, step="post", color=looks.color(name), alpha=0.5, linewidth=0)
        axes.axhline(0, color=drawing.INK, linewidth=0.6)
        top, bottom = max(up.max(), 0), max(down.max(), 0)
        margin = max(top + bottom, 1e-12) * 0.06
        axes.set_ylim(-bottom - margin, top + margin)
        axes.yaxis.set_major_locator(FixedLocator(_apart([-bottom, 0, top])))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: rate(value)))
        looks.panel_label(axes, name, f"at most {rate(top)} loaded, {rate(bottom)} stored")
    drawing.name_y(figure, "bandwidth" if in_bytes else "accesses")
    return figure


def draw_reuse_distance(tables: Frames) -> Figure:
    """Draws which part of the accesses an LRU cache would hit, over the size of the cache."""
    title = "Reuse distance"
    table = tables["reuse_distance_histogram"]
    if table.empty:
        return drawing.nothing_to_show(title, "The trace has no rows, or cannot tell reuse.")
    types = in_order(table["region_type"])
    figure = drawing.new_figure(
        3.1, title, "Accesses that a memory of a size catches, if the page unused longest goes"
    )
    axes = drawing.panels(figure, 1, right_in=0.3, top_in=drawing.BARE_TOP_IN)[0]
    axes.set_xscale("log", base=2)
    reused = table[table["bin_low_pages"].notna()]
    last = max(2.0, float(reused["bin_high_pages"].max()) if len(reused) else 2.0)
    axes.set_xlim(1, last)
    axes.set_ylim(0, 1.02)
    lines = []
    for name in types:
        rows = table[table["region_type"] == name]
        total = rows["n_accesses"].sum()
        rows = rows[rows["bin_low_pages"].notna()].sort_values("bin_low_pages")
        x = np.maximum(rows["bin_high_pages"].to_numpy(float), 1)
        y = rows["n_accesses"].to_numpy(float).cumsum() / max(total, 1)
        x = np.concatenate([[1], x, [last]])
        y = np.concatenate([[0], y, y[-1:] if len(y) else [0]])
        _curve(axes, x, y, name)
        lines.append((name, x, y))
    powers = np.arange(0, np.ceil(np.log2(last)) + 1, max(1, int(np.ceil(np.log2(last) / 8))))
    axes.xaxis.set_major_locator(FixedLocator([2.0**power for power in powers]))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: units.size(value * 4096)))
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.set_xlabel("size of the memory (4 KiB a distinct page; logarithmic)")
    drawing.name_y(figure, "part of the accesses")
    axes.grid(axis="y")
    _name_curves(axes, lines)
    return figure


def draw_reuse_interval(tables: Frames) -> Figure:
    """Draws a histogram of the times between two accesses to an address, per type."""
    title = "Inter-access interval"
    table = tables["reuse_histogram"]
    if table.empty:
        return drawing.nothing_to_show(title, "No address is accessed twice, at two times.")
    types = in_order(table["region_type"])
    figure = drawing.new_figure(
        drawing.TOP_IN + _PANEL_IN * len(types) + drawing.BOTTOM_IN, title,
        "Time between two accesses to one address, as part of a type's intervals",
    )  # fmt: skip
    low = max(1.0, float(table["bin_low_ns"].min())) / 1e9
    high = float(table["bin_high_ns"].max()) / 1e9
    panels = drawing.panels(figure, len(types))
    for name, axes in zip(types, panels, strict=True):
        rows = table[table["region_type"] == name]
        counts = rows["n_intervals"].to_numpy(float)
        left = np.maximum(rows["bin_low_ns"].to_numpy(float), 1) / 1e9
        right = rows["bin_high_ns"].to_numpy(float) / 1e9
        drawing.log_time_axis(axes, low, high)
        parts = counts / max(counts.sum(), 1)
        axes.bar(left, parts, (right - left) * 0.94, align="edge", color=looks.color(name))
        axes.set_ylim(0, max(parts.max(), 1e-9) * 1.08)
        axes.yaxis.set_major_locator(MaxNLocator(2))
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        axes.grid(axis="y")
        looks.panel_label(axes, name, units.counted(int(counts.sum()), "interval"))
    panels[-1].set_xlabel("time between accesses (logarithmic)")
    drawing.name_y(figure, "part of the intervals")
    return figure


def draw_process_memory(tables: Frames) -> Figure:
    """Draws the memory and the processor use of the model's processes over time, added up."""
    title = "Process memory and processor"
    table = tables["process_samples"]
    if table.empty:
        return drawing.nothing_to_show(title, "The process monitor took no sample.")
    samples = table.groupby("t_s")[["rss_mb", "cpu_pct"]].sum()
    # The use of the processor in an interval much shorter than the others is noise.
    gaps = np.diff(samples.index.to_numpy(float), prepend=0.0)
    samples.loc[gaps < np.median(gaps) / 2, "cpu_pct"] = np.nan
    figure = drawing.new_figure(
        drawing.TOP_IN + 1.1 * 2 + drawing.BOTTOM_IN, title,
        f"{units.counted(len(samples), 'sample')} of the processes that run the model",
    )  # fmt: skip
    memory, processor = drawing.panels(figure, 2, left_in=0.95)
    x = samples.index.to_numpy(float)
    for axes, y, name, told in (
        (memory, samples["rss_mb"].to_numpy(float) * 2**20, "resident memory", units.size),
        (processor, samples["cpu_pct"].to_numpy(float), "processor", lambda value: f"{value:.0f}%"),
    ):
        axes.plot(x, y, color=drawing.INK, linewidth=1.2, marker="." if len(x) < 3 else None)
        highest = float(np.nanmax(y))
        axes.set_ylim(0, max(highest, 1e-9) * 1.08)
        axes.grid(axis="y")
        looks.panel_label(axes, name, f"at most {told(highest)}")
    drawing.size_axis(memory, "y")
    processor.yaxis.set_major_locator(MaxNLocator(3))
    processor.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0f}%"))
    memory.set_xlim(0, max(float(x[-1]), 1e-3))
    processor.set_xlabel("time since the process monitor began (s); 100 % is one core")
    return figure


FIGURES: tuple[FigureSpec, ...] = (
    FigureSpec(
        "retention_histogram", ("retention_per_region",), draw_retention_histogram, always=True
    ),
    FigureSpec("working_set", ("working_set_summary",), draw_working_set, always=True),
    FigureSpec("write_once", ("write_once",), draw_write_once, always=True),
    FigureSpec("retention_cdf", ("retention_cdf",), draw_retention_cdf),
    FigureSpec("kv_growth", ("kv_growth",), draw_kv_growth),
    FigureSpec("working_set_over_time", ("working_set_over_time",), draw_working_set_over_time),
    FigureSpec("bandwidth_over_time", ("bandwidth_over_time",), draw_bandwidth_over_time),
    FigureSpec("reuse_interval", ("reuse_histogram",), draw_reuse_interval),
    FigureSpec("reuse_distance", ("reuse_distance_histogram",), draw_reuse_distance),
    FigureSpec("process_memory", ("process_samples",), draw_process_memory),
)


# ---- parts ------------------------------------------------------------------------------


def _column(table: pd.DataFrame, region_type: str, column: str) -> Floats:
    values: Floats = table.loc[table["region_type"] == region_type, column].to_numpy(float)
    return values


def _spread(values: Floats, noun: str) -> str:
    median, high = np.quantile(values, (0.5, 0.99))
    told = units.counted(len(values), noun)
    if len(values) == 1:
        return f"{told}, {units.seconds(median)}"
    return f"{told}, median {units.seconds(median)}, p99 {units.seconds(high)}"


def _mark_limits(axes: Axes, first: float, last: float, *, named: bool) -> None:
    """Draws a line at each retention limit of ``suitability`` that lies on the axis."""
    for limit, name in _RETENTION_LIMITS:
        if not first <= limit <= last:
            continue
        axes.axvline(limit, color=drawing.INK, linewidth=0.8, linestyle=(0, (1, 2)), zorder=0.5)
        if named:
            axes.annotate(
                name, (limit, 1), xycoords=("data", "axes fraction"), xytext=(0, 15),
                textcoords="offset points", ha="center", color=drawing.MUTED, fontsize=7,
            )  # fmt: skip


def _add_zero_tick(axes: Axes, first: float, nowhere: float) -> None:
    ticks = [nowhere, *(tick for tick in axes.get_xticks() if tick >= first)]
    axes.xaxis.set_major_locator(FixedLocator(ticks))
    axes.xaxis.set_major_formatter(
        FuncFormatter(lambda x, _: "0" if x < first else units.seconds(float(f"{x:.6g}")))
    )


def _draw_sizes(axes: Axes, place: Floats, sizes: Floats, shades: Sequence[str]) -> None:
    """Draws sizes as bars from 0, or as dots on a logarithmic axis if they differ too much."""
    high = max(float(sizes.max()), 1.0)
    low = float(min(sizes[sizes > 0], default=high))
    if high / low < 50:
        axes.barh(place, sizes, 0.62, color=shades)
        axes.set_xlim(0, high * 1.5)
        drawing.size_axis(axes, "x")
        return
    low /= 4
    axes.set_xscale("log")
    axes.hlines(place, low, np.maximum(sizes, low), color=drawing.GRID, linewidth=1)
    axes.scatter(np.maximum(sizes, low), place, s=46, color=shades, zorder=3)
    axes.set_xlim(low, low * (high / low) ** 1.55)
    ticks = [4.0**n for n in range(26) if low <= 4.0**n <= high * 4]
    axes.xaxis.set_major_locator(FixedLocator(ticks[:: 1 + len(ticks) // 7]))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: units.size(value)))


def _name_rows(axes: Axes, place: Floats, names: Sequence[str]) -> None:
    axes.set_ylim(place.min() - 0.6, place.max() + 0.6)
    axes.set_yticks(place, [drawing.shown(name, 14) for name in names])
    axes.spines["left"].set_visible(False)
    for label, name in zip(axes.get_yticklabels(), names, strict=True):
        label.set_color(looks.color(name))
        label.set_fontweight("bold")
        label.set_fontsize(8)


def _curve(axes: Axes, x: Floats, y: Floats, name: str, **how: Any) -> None:
    axes.plot(x, y, color=looks.color(name), linestyle=looks.line(name), **how)


def _name_curves(axes: Axes, lines: Iterable[tuple[str, Floats, Floats]]) -> None:
    """Writes the name of each rising curve at a height of its own, so that no names overlap."""
    lines = list(lines)
    for number, (name, x, y) in enumerate(lines):
        height = (number + 1) / (len(lines) + 1) * y.max()
        index = int(np.searchsorted(y, height))
        at = float(x[min(index, len(x) - 1)])
        first, last = axes.get_xlim()
        right = np.log(at / first) > 0.8 * np.log(last / first)
        axes.annotate(
            name, (at, height), xytext=(-6 if right else 6, 0), textcoords="offset points",
            ha="right" if right else "left", va="center", color=looks.color(name),
            fontweight="bold",
            bbox={"boxstyle": "square,pad=0.15", "facecolor": drawing.SURFACE, "linewidth": 0},
        )  # fmt: skip


def _time_panels(
    table: pd.DataFrame, title: str, subtitle: str
) -> tuple[Figure, dict[str, Axes], Floats]:
    """A figure with a panel over time per type, the panels by type, and the edges of the windows.

    The edges are x values in the unit of the axis.
    """
    types = in_order(table["region_type"])
    figure = drawing.new_figure(
        drawing.TOP_IN + _PANEL_IN * len(types) + drawing.BOTTOM_IN, title, subtitle
    )
    panels = drawing.panels(figure, len(types), left_in=0.95)
    seconds = np.arange(_windows(table) + 1, dtype=np.float64) * _window_seconds(table)
    factor, unit = units.time_unit(seconds[-1])
    x: Floats = seconds / factor
    panels[-1].set_xlim(0, x[-1])
    panels[-1].set_xlabel(f"time since the first access ({unit})")
    return figure, dict(zip(types, panels, strict=True)), x


def _window_ns(table: pd.DataFrame) -> int:
    return int((table["window_end_ns"] - table["window_start_ns"]).max())


def _window_seconds(table: pd.DataFrame) -> float:
    return _window_ns(table) / 1e9


def _window(table: pd.DataFrame) -> str:
    return f"window of {units.seconds(_window_seconds(table))}"


def _windows(table: pd.DataFrame) -> int:
    span = int(table["window_end_ns"].max()) - int(table["window_start_ns"].min())
    return max(1, -(-span // _window_ns(table)))


def _over_windows(table: pd.DataFrame, region_type: str, column: str) -> Floats:
    """A column's value for each window, 0 without a row of the type; the last value comes twice.

    The second copy draws the last step of a step plot.
    """
    rows = table[table["region_type"] == region_type]
    start = int(table["window_start_ns"].min())
    index = ((rows["window_start_ns"] - start) // _window_ns(table)).to_numpy(np.int64)
    values = np.zeros(_windows(table) + 1)
    np.add.at(values, index, rows[column].to_numpy(float))
    values[-1] = values[-2]
    return values


def _apart(ticks: list[float]) -> list[float]:
    """The tick at zero, and of the outer ticks those whose labels do not overlap its label."""
    low, zero, high = ticks
    span = high - low
    return [tick for tick in (low, high) if abs(tick - zero) > span * 0.28] + [zero]
