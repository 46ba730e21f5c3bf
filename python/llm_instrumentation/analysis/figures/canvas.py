"""The common look of the figures of captures: axes, heat maps, labels of layers and tokens."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ..._extras import extra

with extra("report", "A figure"):
    import matplotlib
    import matplotlib.pyplot as plt  # so that a notebook shows the figure
    from matplotlib.colors import LogNorm, Normalize

from ..._pages import drawing

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = [
    "BLUE", "ERRORS", "ORANGE", "SHARES", "SIZES", "canvas", "heat_map", "layer_labels",
    "layers_on_x", "layers_on_y", "sized", "small_heat_maps", "tokens_on_x", "tokens_on_y",
    "write_cells",
]  # fmt: skip

BLUE, ORANGE = "#0072b2", "#d55e00"  # of Okabe and Ito

# Colours of heat maps. Lightness changes steadily, so they can be read in any colour vision and in
# grey print. Large sizes are bright, large shares and errors dark.
SHARES = "Blues"
SIZES = "viridis"
ERRORS = "YlOrRd"

_LABEL_IN = 0.12  # inches that a label of an axis takes
_LAYER_IN, _TOKEN_IN = 0.2, 0.3
_UPRIGHT = 2  # labels of an x axis are turned if one has more characters than this
_ABSENT = "#d5dae0"
# Texts in cells. They differ from the colours of `drawing`, which `inline_svg` makes those of a
# dark page: the colours of cells stay.
_ON_DARK, _ON_LIGHT = "#fefefe", "#1b1f25"
_DECADE = 10.0


def sized(layers: Sequence[str], tokens: Sequence[str] | None = None) -> tuple[float, float]:
    """Inches of a figure with a row for each layer.

    Args:
        layers: their names.
        tokens: those of a heat map, which has a column for each; None: it is no heat map.
    """
    labels, _ = layer_labels(layers)
    names, rows = 0.2 + 0.06 * max(map(len, labels)), len(layers) * _LAYER_IN
    if tokens is None:
        return names + drawing.WIDTH_IN - 0.4, 1.3 + min(max(rows, 0.8), 11)
    longest = max((len(token_text(token)) for token in tokens), default=0)
    below = 0.06 * longest if longest > _UPRIGHT else 0.1
    across = min(max(len(tokens) * _TOKEN_IN, 3.4), 10) + 1.4
    # The label of the colours stands upright beside the rows, and needs the height.
    return names + across, 0.95 + below + min(max(rows, 1.5), 11)


@contextmanager
def canvas(ax: Axes | None, size: tuple[float, float]) -> Iterator[Axes]:
    """Gives the block the axes to draw on, and the project's settings of matplotlib.

    Args:
        ax: the axes; None makes a figure.
        size: width and height of that figure, in inches.
    """
    with drawing.settings():
        axes = plt.subplots(figsize=size, layout="constrained")[1] if ax is None else ax
        yield axes
        drawing.settle(axes.get_figure(root=True))


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
    bar.set_label(drawing.shown(label))
    bar.outline.set_visible(False)
    if isinstance(norm, LogNorm):
        drawing.log_ticks(bar.ax.yaxis)
    return image


def write_cells(ax: Axes, texts: Sequence[Sequence[str]], on_dark: npt.NDArray[np.bool_]) -> None:
    """Writes a text into each cell of a heat map, white where the cell is dark."""
    for row, line in enumerate(texts):
        for column, text in enumerate(line):
            ax.text(
                column, row, drawing.shown(text, 10), ha="center", va="center",
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
    with drawing.figure((7.0, 0.6 + 7.0 / across * down)) as figure:
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
        bar.set_label(drawing.shown(label))
        bar.outline.set_visible(False)
        figure.suptitle(drawing.shown(name), fontsize=9.5, fontweight="bold", x=0.012, ha="left")
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
    _turn(ax, labels)
    ax.set_xlabel(common)


def tokens_on_x(
    ax: Axes, tokens: Sequence[str], label: str = "Token", places: Sequence[float] | None = None
) -> None:
    """Labels the columns of a heat map, or an x axis with a token at each of some places."""
    labels = [token_text(token) for token in tokens]
    _label(ax, "x", labels, places)
    _turn(ax, labels)
    ax.set_xlabel(label)


def _turn(ax: Axes, labels: Sequence[str]) -> None:
    """Turns the labels of an x axis if one is long."""
    turned = any(len(text) > _UPRIGHT for text in labels)
    ax.tick_params(axis="x", labelrotation=90 if turned else 0)


def tokens_on_y(ax: Axes, tokens: Sequence[str], label: str) -> None:
    """Labels the rows of a heat map with tokens."""
    _label(ax, "y", [token_text(token) for token in tokens])
    ax.set_ylabel(label)


def token_text(text: str) -> str:
    """A token as a label: without spaces around it, and shortened."""
    return drawing.shown(text.strip(" "), 14) or repr(text)


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
        return [match[2] for match in found if match], drawing.shown(common.pop()) or "Layer"
    return [drawing.shown(name, 40) or "<root>" for name in layers], "Layer"
