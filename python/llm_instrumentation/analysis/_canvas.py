"""The common look of the figures of captures: axes, heat maps, labels of layers and tokens."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from .._extras import extra

with extra("report", "A figure"):
    import matplotlib.font_manager
    import matplotlib.pyplot as plt  # so that a notebook shows the figure
    from matplotlib.colors import LogNorm, Normalize
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from .._pages import drawing

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis

__all__ = [
    "BLUE", "ERRORS", "ORANGE", "SHARES", "SIZES", "canvas", "heat_map", "layer_labels",
    "layers_on_x", "layers_on_y", "log_ticks", "panels", "shown", "sized", "small_heat_maps",
    "title", "tokens_on_x", "tokens_on_y", "write_cells",
]  # fmt: skip

BLUE, ORANGE = "#0072b2", "#d55e00"  # of Okabe and Ito

# Colours of heat maps. Lightness falls steadily, so they can be read in any colour vision and in
# grey print.
SHARES = "Blues"
SIZES = "viridis_r"
ERRORS = "YlOrRd"

_LABEL_IN = 0.12  # inches that a label of an axis takes
_LAYER_IN, _TOKEN_IN = 0.2, 0.3
_ABSENT = "#d5dae0"
# Texts in cells. They differ from the colours of `drawing`, which `inline_svg` makes those of a
# dark page: the colours of cells stay.
_ON_DARK, _ON_LIGHT = "#fefefe", "#1b1f25"
_DECADE = 10.0
_RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def sized(layers: Sequence[str], tokens: int | None = None) -> tuple[float, float]:
    """Inches of a figure with a row for each layer, and a column for each token if it has some."""
    labels, _ = layer_labels(layers)
    names = 0.2 + 0.06 * max(map(len, labels))
    height = 1.3 + min(max(len(layers), 4) * _LAYER_IN, 11)
    across = (
        drawing.WIDTH_IN - 0.4 if tokens is None else min(max(tokens * _TOKEN_IN, 3.4), 10) + 1.4
    )
    return names + across, height


@contextmanager
def canvas(ax: Axes | None, size: tuple[float, float]) -> Iterator[Axes]:
    """Gives the block the axes to draw on, and the project's settings of matplotlib.

    Args:
        ax: the axes; None makes a figure.
        size: width and height of that figure, in inches.
    """
    with drawing.settings():
        yield plt.subplots(figsize=size, layout="constrained")[1] if ax is None else ax


@contextmanager
def panels(count: int, size: tuple[float, float]) -> Iterator[tuple[Figure, Any]]:
    """As `canvas`: a new figure with several axes, one below the other.

    It is not pyplot's: as a cell's value a notebook would show it twice.
    """
    with drawing.settings():
        figure = Figure(figsize=size, layout="constrained")
        yield figure, figure.subplots(count, 1)


def title(ax: Axes, text: str, remark: str = "", *, legend: bool = False) -> None:
    """Writes a title above the left corner, and below it a remark or the legend of the marks."""
    ax.set_title(
        text, loc="left", fontsize=9.5, fontweight="bold", color=drawing.INK,
        pad=18 if remark or legend else 8,
    )  # fmt: skip
    if remark:
        ax.annotate(
            remark, (0, 1), xycoords="axes fraction", xytext=(0, 5), textcoords="offset points",
            color=drawing.MUTED, va="bottom", fontsize=7.5,
        )  # fmt: skip
    if legend:
        ax.legend(
            loc="lower left", bbox_to_anchor=(0, 1), ncols=5, frameon=False, fontsize=7.5,
            borderaxespad=0.2, handlelength=1.6, columnspacing=1.2, handletextpad=0.5,
            borderpad=0.2,
        )  # fmt: skip


def heat_map(
    ax: Axes,
    values: npt.NDArray[Any],
    colors: str,
    label: str,
    *,
    limits: tuple[float, float] | None = None,
    log: bool = False,
    absent: str = _ABSENT,
) -> Any:
    """Draws a matrix, the first row on top. Returns the image.

    Args:
        ax: the axes.
        values: [rows, columns].
        colors: the name of a map of colours.
        label: what the colours tell.
        limits: the values of the first and the last colour; None: those of the matrix.
        log: logarithmic colours, if no value is negative and they span more than a decade. Zeros
            get the first colour.
        absent: the colour of NaN.
    """
    known = values[np.isfinite(values)]
    positive = known[known > 0]
    low, high = limits or ((known.min(), known.max()) if len(known) else (0.0, 1.0))
    norm = Normalize(float(low), float(high) if high > low else float(low) + 1)
    if log and low >= 0 and len(positive) and positive.max() > _DECADE * positive.min():
        norm = LogNorm(float(positive.min()), float(positive.max()), clip=True)
    map_of = matplotlib.colormaps[colors].with_extremes(bad=absent)
    finite = np.where(np.isposinf(values), norm.vmax or 0.0, values)
    image = ax.imshow(finite, aspect="auto", cmap=map_of, norm=norm, interpolation="nearest")
    for side in ax.spines.values():
        side.set_visible(False)
    bar = ax.figure.colorbar(image, ax=ax, fraction=0.05, pad=0.02, aspect=30)
    bar.set_label(label)
    bar.outline.set_visible(False)
    if isinstance(norm, LogNorm):
        log_ticks(bar.ax.yaxis)
    return image


def write_cells(ax: Axes, texts: Sequence[Sequence[str]], on_dark: npt.NDArray[np.bool_]) -> None:
    """Writes a text into each cell of a heat map, white where the cell is dark."""
    for row, line in enumerate(texts):
        for column, text in enumerate(line):
            ax.text(
                column, row, drawing.shortened(shown(text), 9), ha="center", va="center",
                fontsize=6, color=_ON_DARK if on_dark[row, column] else _ON_LIGHT,
            )  # fmt: skip


def small_heat_maps(
    values: npt.NDArray[Any],
    titles: Sequence[str],
    rows: Sequence[str],
    columns: Sequence[str],
    colors: str,
    label: str,
    name: str,
) -> Figure:
    """Draws several heat maps of the same queries and keys in a grid, with one scale of colours.

    Args:
        values: [heat maps, rows, columns].
        titles: one for each heat map.
        rows, columns: labels of the tokens. Only the outer heat maps have them, if they have room.
        colors, label: as for `heat_map`.
        name: the title of the figure.
    """
    across = min(4, len(values))
    down = -(-len(values) // across)
    # It is not pyplot's: as a cell's value a notebook would show it twice.
    figure = Figure(figsize=(7.0, 0.6 + 7.0 / across * down), layout="constrained")
    grid = figure.subplots(down, across, squeeze=False, sharex=True, sharey=True)
    norm = Normalize(0.0, float(np.nanmax(values)))
    map_of = matplotlib.colormaps[colors].with_extremes(bad=drawing.SURFACE)
    for at, ax in enumerate(grid.flat):
        if at >= len(values):
            ax.set_visible(False)
            continue
        image = ax.imshow(
            values[at], aspect="auto", cmap=map_of, norm=norm, interpolation="nearest"
        )
        ax.set_title(titles[at], fontsize=7.5, color=drawing.MUTED, loc="left", pad=3)
        ax.tick_params(labelsize=6, length=0)
        if at >= len(values) - across:
            tokens_on_x(ax, columns, "")
            ax.tick_params(labelbottom=True)
        if at % across == 0:
            tokens_on_y(ax, rows, "")
    bar = figure.colorbar(image, ax=grid, fraction=0.03, pad=0.02, aspect=40)
    bar.set_label(label)
    bar.outline.set_visible(False)
    figure.suptitle(name, fontsize=9.5, fontweight="bold", x=0.012, ha="left")
    return figure


def layers_on_y(ax: Axes, layers: Sequence[str]) -> None:
    """Labels the rows of a heat map, or a y axis of layers."""
    labels, common = layer_labels(layers)
    _label(ax, "y", labels)
    ax.set_ylabel(common)


def layers_on_x(ax: Axes, layers: Sequence[str]) -> None:
    """Labels the columns of a heat map, or an x axis of layers."""
    labels, common = layer_labels(layers)
    _label(ax, "x", labels)
    ax.tick_params(axis="x", labelrotation=90 if any(len(name) > 2 for name in labels) else 0)
    ax.set_xlabel(common)


def tokens_on_x(
    ax: Axes, tokens: Sequence[str], label: str = "Token", places: Sequence[float] | None = None
) -> None:
    """Labels the columns of a heat map, or an x axis with a token at each of some places."""
    labels = [token_text(token) for token in tokens]
    _label(ax, "x", labels, places)
    ax.tick_params(axis="x", labelrotation=90 if any(len(text) > 2 for text in labels) else 0)
    ax.set_xlabel(label)


def log_ticks(axis: Axis) -> None:
    """Labels a logarithmic axis with numbers: 1, 2 and 5 in each decade, if it has few."""
    low, high = axis.get_view_interval()
    decades = math.log10(high / low)
    subs = (1.0, 2.0, 5.0) if decades < 2.5 else (1.0,)
    axis.set_major_locator(LogLocator(subs=subs, numticks=9))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: _number(value)))


def _number(value: float) -> str:
    """A round number; far from 1 as a power of ten, as 2·10⁻⁵."""
    power = math.floor(math.log10(value) + 1e-9)
    if -3 <= power <= 4:
        return f"{value:g}"
    factor, raised = round(value / 10.0**power), str(power).translate(_RAISED)
    return f"10{raised}" if factor == 1 else f"{factor}·10{raised}"


def tokens_on_y(ax: Axes, tokens: Sequence[str], label: str) -> None:
    """Labels the rows of a heat map with tokens."""
    _label(ax, "y", [token_text(token) for token in tokens])
    ax.set_ylabel(label)


def token_text(text: str) -> str:
    """A token as a label: without spaces around it, and shortened."""
    return drawing.shortened(shown(text).strip() or repr(text), 14)


def _label(
    ax: Axes, which: str, labels: Sequence[str], places: Sequence[float] | None = None
) -> None:
    """Writes as many of the labels as have room, at their places or at 0, 1, ..."""
    width, height = ax.get_position().size * ax.figure.get_figure(root=True).get_size_inches()
    room = max(1, int((width if which == "x" else height) / _LABEL_IN))
    every = -(-len(labels) // room)
    axis = ax.xaxis if which == "x" else ax.yaxis
    places = range(len(labels)) if places is None else places
    axis.set_ticks(list(places[::every]), list(labels[::every]))
    axis.set_tick_params(length=0)


def layer_labels(layers: Sequence[str]) -> tuple[list[str], str]:
    """A label for each layer, and a name for all: numbers, if only they differ."""
    found = [re.fullmatch(r"(.*?)\.?(\d+)", name) for name in layers]
    common = {match[1] for match in found if match}
    if all(found) and len(common) == 1 and len(layers) > 1:
        return [match[2] for match in found if match], common.pop() or "Layer"
    return [drawing.shortened(shown(name) or "<root>", 40) for name in layers], "Layer"


@functools.cache
def shown(text: str) -> str:
    """A text with all characters visible: escaped, or a box if the font lacks it."""
    font = matplotlib.font_manager.get_font(matplotlib.font_manager.findfont("DejaVu Sans"))
    visible = (
        c if c.isprintable() else c.encode("unicode_escape", "replace").decode() for c in text
    )
    return "".join(c if font.get_char_index(ord(c)) else "□" for c in "".join(visible))
