"""Draws the figures of a sweep: four metrics over a parameter."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ..._extras import extra

with extra("mrm", "A report of runs"):
    import pandas as pd
    from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, MaxNLocator, NullLocator

from ..._pages import drawing, units
from ..._pages.drawing import Floats
from . import looks
from .tables import in_order

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["draw_by_parameter"]

_HEIGHT_IN = 4.9
_MARKERS = ("o", "s", "^", "D", "v", "P", "X")


def draw_by_parameter(metrics: pd.DataFrame, parameter: str) -> Figure:
    """Draws retention, write-once ratio, reads per write and working set over a parameter.

    Args:
        metrics: a row per run and region type, as in :class:`~.sweep.Sweep`.
        parameter: a column of ``metrics``. Its values, numbers or words, stand side by side at
            equal distances.
    """
    types = in_order(metrics["region_type"])
    figure = drawing.new_figure(
        _HEIGHT_IN, f"By {parameter.replace('_', ' ')}",
        "Means over runs; bars from the least to the most",
    )  # fmt: skip
    grid = figure.subplots(
        2, 2,
        gridspec_kw={"left": 0.12, "right": 0.97, "top": 0.77, "bottom": 0.1, "hspace": 0.6,
                     "wspace": 0.36},
    )  # fmt: skip
    _name_types(figure, types)
    place = _places(metrics[parameter])
    panels = (
        ("retention_p99_s", "p99 retention", _time_axis),
        ("working_set_mb_total", "working set, summed over regions", _size_axis),
        ("write_once_ratio_mean", "write-once ratio", _ratio_axis),
        ("reads_per_write_mean", "reads per write, mean of regions", _count_axis),
    )
    for axes, (column, title, finish) in zip(grid.flat, panels, strict=True):
        values = pd.to_numeric(metrics[column]) * (2**20 if column.endswith("_mb_total") else 1)
        floor = _floor(values)
        for number, name in enumerate(types):
            rows = metrics["region_type"] == name
            _draw_type(
                axes, metrics.loc[rows, parameter], values[rows], place, name,
                _MARKERS[number % len(_MARKERS)], (number - (len(types) - 1) / 2) * 0.05,
            )  # fmt: skip
        axes.set_title(title, loc="left", fontsize=8, color=drawing.INK)
        axes.grid(axis="y")
        _parameter_axis(axes, place)
        axes.set_xlabel(parameter.replace("_", " "))
        finish(axes, floor, float(values.max()) if values.notna().any() else 1.0)
    return figure


def _name_types(figure: Figure, types: list[str]) -> None:
    """Draws the legend: the types with their colours and marks, in a line below the subtitle."""
    x = 0.1 * drawing.WIDTH_IN
    y = 1 - 0.72 / _HEIGHT_IN
    for number, name in enumerate(types):
        left = x / drawing.WIDTH_IN
        marker = _MARKERS[number % len(_MARKERS)]
        figure.add_artist(drawing.mark(left, y, marker, looks.color(name), figure.transFigure))
        figure.text(left + 0.013, y, name, color=looks.color(name), fontweight="bold", va="center")
        x += 0.25 + 0.085 * len(name)


def _places(values: pd.Series) -> dict[object, float]:
    """The place of each value on the x axis: side by side, at equal distances."""
    known = sorted(values.dropna().unique().tolist(), key=lambda v: (isinstance(v, str), v))
    return {value: float(number) for number, value in enumerate(known)}


def _draw_type(
    axes: Axes,
    parameter: pd.Series,
    values: pd.Series,
    place: dict[object, float],
    name: str,
    marker: str,
    shift: float,
) -> None:
    by_value = values.groupby(parameter).agg(["mean", "min", "max"]).dropna()
    x: Floats = np.array([place[value] for value in by_value.index]) + shift
    shade = looks.color(name)
    axes.vlines(x, by_value["min"], by_value["max"], color=shade, linewidth=1.2)
    numeric = not any(isinstance(value, str) for value in place)
    axes.plot(
        x, by_value["mean"], color=shade, marker=marker, markersize=4.5,
        linestyle=looks.line(name) if numeric else "none", linewidth=1.2,
    )  # fmt: skip


def _parameter_axis(axes: Axes, place: dict[object, float]) -> None:
    axes.set_xlim(-0.4, max(len(place) - 0.6, 0.4))
    axes.set_xticks(list(place.values()), [drawing.shown(str(value), 18) for value in place])


def _floor(values: pd.Series) -> float:
    positive = values[values > 0]
    return float(positive.min()) if len(positive) else 1.0


def _time_axis(axes: Axes, floor: float, top: float) -> None:
    _log(axes, floor, top)
    axes.yaxis.set_major_formatter(
        FuncFormatter(lambda value, _: units.seconds(float(f"{value:.6g}")))
    )


def _size_axis(axes: Axes, floor: float, top: float) -> None:
    _log(axes, floor, top)
    low, high = axes.get_ylim()
    ticks = [4.0**n for n in range(-2, 30) if low <= 4.0**n <= high]
    axes.yaxis.set_major_locator(FixedLocator(ticks[:: 1 + len(ticks) // 6]))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: units.size(value)))


def _count_axis(axes: Axes, floor: float, top: float) -> None:
    if top / floor > 50:
        _log(axes, floor, top)
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: units.short_count(value)))
    else:
        axes.set_ylim(0, max(top, 1) * 1.1)
        axes.yaxis.set_major_locator(MaxNLocator(5))


def _ratio_axis(axes: Axes, floor: float, top: float) -> None:
    axes.set_ylim(-0.04, 1.06)


def _log(axes: Axes, floor: float, top: float) -> None:
    """Makes the y axis logarithmic. Values of 0 are drawn at its lower edge."""
    axes.set_yscale("log", nonpositive="clip")
    axes.set_ylim(floor / 3, max(top, floor) * 3)
    axes.yaxis.set_major_locator(LogLocator(10, numticks=7))
    axes.yaxis.set_minor_locator(NullLocator())
