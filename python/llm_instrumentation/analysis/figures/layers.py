"""Draws numbers of each layer, or of each pair of layers; a layer is a row."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..._extras import extra
from ..._pages import drawing
from . import canvas

with extra("report", "A figure"):
    from matplotlib.ticker import FuncFormatter

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from ..compare import CaptureComparison
    from ..similarity import LayerSimilarity
    from ..views import LayerStatistics, MassiveActivations

__all__ = [
    "draw_drift", "draw_outliers", "draw_ranges", "draw_similarity", "drift_layers", "drift_size",
    "similarity_size",
]  # fmt: skip

_BAND = "#9fc6e0"
_CELL_IN = 0.3  # of a square, in inches
_WRITTEN = 16  # a matrix with more rows or columns than this has no numbers in its cells


def _rows(ax: Axes, layers: Sequence[str]) -> np.ndarray[Any, Any]:
    """Gives the y axis a row for each layer, the first on top. Returns their places."""
    places = np.arange(len(layers))
    ax.set_ylim(len(layers) - 0.5, -0.5)
    canvas.layers_on_y(ax, layers)
    ax.grid(True, axis="x")
    return places


def drift_layers(comparison: CaptureComparison) -> list[int]:
    """The places of the layers that `draw_drift` draws: all but those that are equal."""
    return [
        place
        for place, layer in enumerate(comparison.layers)
        if not layer.agrees or layer.equal < layer.tensors
    ]


def drift_size(comparison: CaptureComparison) -> tuple[float, float]:
    """Inches of a figure of `draw_drift`."""
    drawn = [comparison.layers[place].name for place in drift_layers(comparison)]
    return canvas.sized(drawn or [""])


def draw_drift(ax: Axes, comparison: CaptureComparison) -> None:
    """Draws the relative error of each layer, as `plots.plot_drift` describes."""
    chosen = drift_layers(comparison)
    of = len(comparison.layers)
    if not chosen:
        ax.set_axis_off()
        ax.text(
            0.5, 0.5, "no layer differs", ha="center", va="center", color=drawing.MUTED, fontsize=9
        )
        drawing.title(ax, "Error of each layer", f"{of:,} of {of:,} layers are equal")
        return
    layers, pairs = (
        [comparison.layers[place] for place in chosen],
        comparison.pairs[comparison.pairs["compared"]],
    )
    places = _rows(ax, [layer.name for layer in layers])
    errors = np.array([layer.relative_error for layer in layers])
    tolerances = np.array([layer.tolerance if layer.tensors else math.nan for layer in layers])
    of_pairs = pairs["relative_error"]
    positive = of_pairs[np.isfinite(of_pairs) & (of_pairs > 0)]
    floor = min([*positive.tolist(), *tolerances[tolerances > 0].tolist()], default=1e-7) / 3
    ceiling = max([*positive.tolist(), *tolerances[tolerances > 0].tolist()], default=1.0) * 3

    def on_axis(value: Any) -> Any:
        return np.clip(value, floor, ceiling)

    for place, of_layer in zip(places, chosen, strict=True):
        its = of_pairs[pairs["layer"] == of_layer]
        if len(its) and its.max() > its.min():
            ends = on_axis(np.array([its.min(), its.max()]))
            ax.plot(ends, [place, place], color=_BAND, linewidth=4, solid_capstyle="butt")
    drawn = np.where(np.isnan(errors), np.nan, on_axis(errors))
    over = np.array([layer.over > 0 for layer in layers])
    equal = errors == 0
    # The line has a gap where equal layers are left out.
    gaps = np.flatnonzero(np.diff(chosen) > 1) + 1
    ax.plot(
        np.insert(drawn, gaps, np.nan), np.insert(places.astype(float), gaps, np.nan),
        color=canvas.BLUE, linewidth=0.8, alpha=0.6,
    )  # fmt: skip
    for marked, marker, color, fill, label in (
        (~over & ~equal, "o", canvas.BLUE, True, "within the tolerance"),
        (over, "D", canvas.ORANGE, True, "beyond it"),
        (equal & ~over, "o", canvas.BLUE, False, "equal, but some have no pair"),
    ):
        if (marked & ~np.isnan(errors)).any():
            # Errors of 0 and infinite ones lie on the frame, which would cut their markers.
            ax.plot(
                drawn[marked], places[marked], marker, color=color, markersize=4.5, label=label,
                markerfacecolor=color if fill else drawing.SURFACE, linestyle="none",
                clip_on=False, zorder=3,
            )  # fmt: skip
    for place in places[np.isinf(errors)]:
        ax.annotate(
            "infinite", (ceiling, place), xytext=(-6, 0), textcoords="offset points", ha="right",
            va="center", fontsize=6.5, color=drawing.MUTED,
        )  # fmt: skip
    if (tolerances > 0).any():
        ax.plot(
            np.where(tolerances > 0, tolerances, np.nan), places, color=drawing.MUTED,
            linestyle=(0, (4, 2)), linewidth=1, label="tolerance",
        )  # fmt: skip
    ax.set_xscale("log")
    ax.set_xlim(floor, ceiling)
    ax.set_xlabel("Relative error ‖b − a‖ / ‖a‖")
    if (first := comparison.first) is not None:
        place = next(at for at, layer in enumerate(layers) if layer.name == first.layer)
        ax.annotate(
            "first", (1, place), xycoords=("axes fraction", "data"), xytext=(5, 0),
            textcoords="offset points", color=canvas.ORANGE, fontweight="bold", va="center",
            annotation_clip=False,
        )  # fmt: skip
    drawing.log_ticks(ax.xaxis)
    left_out = of - len(chosen)
    equal_told = f" that differs; {left_out:,} of {of:,} are equal" if left_out else ""
    drawing.title(ax, f"Error of each layer{equal_told}", legend=True)


def draw_outliers(ax: Axes, found: MassiveActivations) -> None:
    """Draws the largest magnitudes, as `plots.plot_massive_activations` describes."""
    places = _rows(ax, found.layers)
    sizes = np.full((len(found.largest), max(map(len, found.largest), default=0)), np.nan)
    for place, ones in enumerate(found.largest):  # a layer may have few values, or NaN alone
        sizes[place, : len(ones)] = [abs(one.value) for one in ones]
    for nth, (marker, shade) in enumerate(
        (("o", canvas.BLUE), ("s", "#009e73"), ("^", "#b8558f"))[: sizes.shape[1]]
    ):
        ax.plot(
            sizes[:, nth], places, marker=marker, markersize=4, linewidth=0.9, color=shade,
            label=("largest", "second", "third")[nth],
        )  # fmt: skip
    ax.plot(
        found.median, places, color=drawing.MUTED, linestyle=(0, (4, 2)), linewidth=1.2,
        label="median",
    )  # fmt: skip
    for place, ones in enumerate(found.largest):
        for one in ones:
            if one.massive:
                ax.plot(
                    abs(one.value), place, "o", markersize=9, markerfacecolor="none",
                    markeredgecolor=canvas.ORANGE, markeredgewidth=1.3,
                )  # fmt: skip
        ax.annotate(
            f"channel {ones[0].channel}, {drawing.shown(ones[0].token, 12)}" if ones else "NaN",
            (1, place), xycoords=("axes fraction", "data"), xytext=(5, 0),
            textcoords="offset points", va="center", fontsize=6.5, color=drawing.MUTED,
            annotation_clip=False,
        )  # fmt: skip
    ax.set_xscale("log")
    ax.set_xlabel("Magnitude")
    drawing.log_ticks(ax.xaxis)
    drawing.title(
        ax, f"Largest activations, {len(found.massive) or 'none'} of them massive", legend=True
    )


def draw_ranges(ax: Axes, found: Sequence[LayerStatistics]) -> None:
    """Draws ranges, means and deviations, as `plots.plot_layer_statistics` describes."""
    places = _rows(ax, [one.name for one in found])
    low, high, mean, std = (
        np.array([getattr(one, name) for one in found]) for name in ("min", "max", "mean", "std")
    )
    ax.hlines(places, low, high, color=canvas.BLUE, linewidth=1, label="smallest to largest")
    ax.hlines(
        places, mean - std, mean + std, color=_BAND, linewidth=5, label="mean ± standard deviation"
    )
    ax.plot(mean, places, "o", color=canvas.BLUE, markersize=3.5, label="mean")
    spread = float(np.nanmedian(std)) if np.isfinite(std).any() else 0.0
    if spread > 0 and np.nanmax(np.abs([low, high])) > 20 * spread:
        ax.set_xscale("symlog", linthresh=10.0 ** math.ceil(math.log10(spread)), linscale=1)
        ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    ax.set_xlabel("Value")
    odd = sum(one.nan + one.inf for one in found)
    left_out = f", without {odd:,} that are NaN or infinite" if odd else ""
    drawing.title(ax, f"Values of each layer{left_out}", legend=True)


def similarity_size(found: LayerSimilarity) -> tuple[float, float]:
    """Inches of a figure of `draw_similarity`."""
    sides = []
    for layers, least in ((found.other_layers, 2.4), (found.layers, 1.2)):
        labels, _ = canvas.layer_labels(layers)
        names = 0.2 + 0.06 * max(map(len, labels))
        sides.append((names, min(max(len(layers) * _CELL_IN, least), 9)))
    (names_x, width), (names_y, height) = sides
    return names_y + width + 1.3, names_x + height + 1.0


def draw_similarity(ax: Axes, found: LayerSimilarity) -> None:
    """Draws a matrix of layers, as `plots.plot_similarity` describes."""
    values = found.values
    low = min(0.0, float(values.min()))
    canvas.heat_map(ax, values, canvas.SHARES, "CKA", limits=(low, 1.0))
    if max(values.shape) <= _WRITTEN:
        rounded = values.round(2) + 0.0  # not -0.00
        texts = [[f"{value:.2f}" for value in of_layer] for of_layer in rounded]
        canvas.write_cells(ax, texts, (values - low) / (1 - low) > 0.65)
    canvas.layers_on_y(ax, found.layers)
    canvas.layers_on_x(ax, found.other_layers)
    if found.a != found.b:
        for name, label in ((found.a, ax.yaxis.label), (found.b, ax.xaxis.label)):
            label.set_text(f"{label.get_text()} of {os.path.basename(name)}")
    drawing.title(ax, "Similarity of layers", found.title)
