"""Figures of sparse autoencoders: the losses of a training, and a feature."""

from __future__ import annotations

import os
import unicodedata
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow.parquet as pq

from ..._extras import extra
from ..._pages.theme import PALETTE
from ..._parsing import parsing
from ...errors import NotFoundError
from .features import HISTOGRAM_EDGES, Feature
from .folder import LOSSES
from .logits import TokenEffect

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["plot_feature", "plot_losses"]

_BLUE, _VERMILLION = PALETTE[:2]
_WIDTH = 7.0  # inches
_LINE = 0.19  # inches of a context
_POINTS = 6.5  # of its letters
_MONOSPACE = "DejaVu Sans Mono"
_LETTER = 0.602 * _POINTS / 72  # inches: its advance


def plot_losses(path: str | os.PathLike[str]) -> Figure:
    """Draws the losses of a finished training, a line for each layer.

    Raises:
        NotFoundError: the folder has no finished training.
        MissingExtraError: matplotlib is not installed; the extra "report" brings it.
    """
    with extra("report", "A plot of losses"):
        from ..._pages import drawing
    file = Path(path) / LOSSES
    if not file.exists():
        raise NotFoundError(f"{path} has no losses: its training is not finished")
    with parsing(file):
        table = pq.read_table(file)
        losses_of = {
            layer: table[layer].to_numpy().astype("float64") for layer in table.column_names
        }
    with drawing.figure((7, 4)) as figure:
        axes = figure.add_subplot()
        for layer, losses in losses_of.items():
            # Means of up to 500 groups, so that a long training is a line and no band.
            size = max(1, len(losses) // 500)
            means = losses[: len(losses) // size * size].reshape(-1, size).mean(1)
            steps = [size * (k + 0.5) for k in range(len(means))]
            axes.plot(steps, means, label=drawing.shown(layer), linewidth=1.2)
        axes.set_yscale("log")
        drawing.log_ticks(axes.yaxis)
        axes.set_xlabel("training step")
        axes.set_ylabel("loss")
        axes.grid(True, axis="y")
        axes.legend()
        drawing.title(axes, "Loss of the training")
        return figure


def plot_feature(feature: Feature, *, contexts: int = 10) -> Figure:
    """Draws a feature: how often it has which activations, the logits it changes, and its contexts.

    A line is a context around the token with the largest activation, which has a frame. The darker
    a token, the larger is its activation. The number is that of the frame. A character that no
    font has is written as an escape.

    Args:
        feature: the feature.
        contexts: draw no more of its contexts.

    Raises:
        MissingExtraError: matplotlib is not installed; the extra "report" brings it.
    """
    with extra("report", "A plot of a feature"):
        from ..._pages import drawing
    lines = min(contexts, len(feature.contexts))
    upper, lower = 2.15, _LINE * max(1, lines) + 0.1  # inches
    height = upper + lower
    with drawing.figure((_WIDTH, height), layout="none") as figure:

        def axes(left: float, bottom: float, right: float, top: float) -> Axes:
            """Axes whose sides are given in inches."""
            return figure.add_axes(
                (left / _WIDTH, bottom / height, (right - left) / _WIDTH, (top - bottom) / height)
            )

        figure.text(
            0.1 / _WIDTH, 1 - 0.08 / height,
            drawing.shown(f"{feature.layer}, feature {feature.feature}", 70),
            fontsize=9.5, fontweight="bold", va="top",
        )  # fmt: skip
        figure.text(
            0.1 / _WIDTH, 1 - 0.29 / height,
            f"active on {feature.fired:,} tokens ({feature.density:.2%}), at most "
            f"{feature.maximum:.3g}",
            fontsize=7.5, va="top", color=drawing.MUTED,
        )  # fmt: skip
        bottom, top = lower + 0.42, height - 0.54
        effects = feature.promoted is not None and feature.suppressed is not None
        _draw_histogram(axes(0.55, bottom, 3.3 if effects else _WIDTH - 0.1, top), feature)
        if feature.promoted is not None and feature.suppressed is not None:
            _draw_effects(
                axes(3.6, bottom, _WIDTH - 0.1, top), feature.promoted[:5], feature.suppressed[:5]
            )
        _draw_contexts(axes(0.1, 0.05, _WIDTH - 0.1, 0.05 + _LINE * max(1, lines)), feature, lines)
        return figure


def _draw_histogram(axes: Axes, feature: Feature) -> None:
    from ..._pages import drawing

    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("activation", labelpad=2)
    axes.set_ylabel("tokens", labelpad=1)
    counts = np.array(feature.histogram)
    there = np.flatnonzero(counts)
    if len(there):
        # The first and the last bin are open. They are drawn as wide as the others.
        edges = HISTOGRAM_EDGES[0] / 2**0.5, *HISTOGRAM_EDGES, HISTOGRAM_EDGES[-1] * 2**0.5
        some = slice(there[0], there[-1] + 1)
        axes.stairs(counts[some], edges[there[0] : there[-1] + 2], fill=True, color=_BLUE)
        axes.set_ylim(0.7, counts.max() * 1.6)
    for axis in (axes.xaxis, axes.yaxis):
        drawing.log_ticks(axis)


def _draw_effects(
    axes: Axes, promoted: Sequence[TokenEffect], suppressed: Sequence[TokenEffect]
) -> None:
    """The tokens with the largest and the smallest effects, each beside its bar."""
    from ..._pages import drawing

    effects = [*promoted, *reversed(suppressed)]
    values = [effect.value for effect in effects]
    places = -np.arange(len(effects)) - 0.6 * (np.arange(len(effects)) >= len(promoted))
    colours = [_BLUE] * len(promoted) + [_VERMILLION] * len(suppressed)
    axes.barh(places, values, height=0.72, color=colours)
    axes.axvline(0, color=drawing.RULE, linewidth=0.8)
    for effect, place in zip(effects, places, strict=True):
        left = effect.value > 0
        axes.annotate(
            drawing.shown(str(effect), 24), (0, place), (-3 if left else 3, 0),
            textcoords="offset points", ha="right" if left else "left", va="center_baseline",
            fontsize=6.5, family=drawing.families(_MONOSPACE), annotation_clip=False,
        )  # fmt: skip
    axes.set_xlabel("effect on the logit of a token", labelpad=2)
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)
    reach = max((abs(value) for value in values), default=1.0) or 1.0
    axes.set_xlim(-1.05 * reach, 1.05 * reach)


def _draw_contexts(axes: Axes, feature: Feature, lines: int) -> None:
    """The contexts below each other, so that their largest activations are in one column."""
    from ..._pages import drawing

    axes.set_axis_off()
    fonts = drawing.families(_MONOSPACE)
    columns = int((_WIDTH - 0.2) / _LETTER)
    axes.set_xlim(0, columns)
    axes.set_ylim(max(1, lines), 0)
    if not lines:
        axes.text(0, 0.5, "no context: it is active on no token", fontsize=8, va="center")
    drawn = feature.contexts[:lines]
    words_of = [[drawing.shown(word) for word in context.words()] for context in drawn]
    before = [
        sum(map(_columns, words[: context.peak]))
        for words, context in zip(words_of, drawn, strict=True)
    ]
    first = 6  # the number is left of this column
    peak_at = first + min(max(before, default=0), int(columns * 0.6))
    for line, context in enumerate(drawn):
        axes.text(
            first - 1.2, line + 0.5, f"{context.value:.3g}", fontsize=7, ha="right", va="center"
        )
        words = words_of[line]
        begin = peak_at - before[line]
        for number, (word, value) in enumerate(zip(words, context.values, strict=True)):
            at, begin = begin, begin + _columns(word)
            is_peak = number == context.peak
            if not is_peak and (at < first or begin > columns):
                continue  # lines have whole tokens
            if value > 0:
                axes.barh(
                    line + 0.5, _columns(word), 0.88, left=at, edgecolor=drawing.INK,
                    color=_shade(value / feature.maximum), linewidth=0.8 if is_peak else 0,
                    zorder=2 if is_peak else 1,
                )  # fmt: skip
            axes.text(
                at, line + 0.5, word, fontsize=_POINTS, family=fonts, va="center_baseline",
                clip_on=True, zorder=3,
            )  # fmt: skip


def _columns(text: str) -> int:
    """How many letters of a monospace font are as wide as a text."""
    return sum(1 + (unicodedata.east_asian_width(letter) in "WF") for letter in text)


def _shade(share: float) -> tuple[float, float, float]:
    """From white to vermillion: one hue, so that grey prints show the order too."""
    red, green, blue = (
        1 - (0.1 + 0.65 * share) * (1 - part / 255) for part in bytes.fromhex(_VERMILLION[1:])
    )
    return red, green, blue
