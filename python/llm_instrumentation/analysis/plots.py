"""Figures of captures. Each function returns the matplotlib `Axes`::

    ax = plot_attention("run.stream", "model.layers.0", head=3, tokenizer=tokenizer)
    save_figure(ax, "attention.pdf")

A layer is a row and a token a column; the first layer is on top. `analysis.views`,
`analysis.attention`, `analysis.logit_lens` and `analysis.compare` give the numbers.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from .._pages import drawing
from ..errors import InvalidArgumentError
from . import _canvas, _layer_figures
from ._opened import Capture
from ._selection import Selector
from .attention import attention_weights
from .compare import CaptureComparison
from .logit_lens import logit_lens
from .views import layer_statistics, massive_activations, token_errors, token_norms

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from torch import nn

__all__ = [
    "plot_attention",
    "plot_attention_heads",
    "plot_drift",
    "plot_layer_statistics",
    "plot_logit_lens",
    "plot_massive_activations",
    "plot_token_errors",
    "plot_token_norms",
    "save_figure",
]

_WRITTEN = 40  # a heat map with more columns than this has no texts in its cells


def save_figure(drawn: Axes | Figure, path: str | os.PathLike[str]) -> None:
    """Writes a figure for print: PNG with 300 dots per inch, or PDF or SVG with text as text.

    Args:
        drawn: a figure, or axes of it.
        path: ends in .png, .pdf or .svg. An existing file is replaced.

    Raises:
        InvalidArgumentError: (a ValueError) the path ends in something else.
        OSError: the file cannot be written.
    """
    root = drawn.get_figure(root=True)
    assert root is not None
    with drawing.settings():
        try:
            drawing.save(root, Path(path))
        except ValueError as error:
            raise InvalidArgumentError(f"{path}: {error}") from error


# ---- attention ------------------------------------------------------------------------------


def plot_attention(
    capture: Capture,
    layer: str | int = 0,
    *,
    head: int | None = None,
    step: int | None = None,
    batch_row: int = 0,
    tokenizer: Any = None,
    ax: Axes | None = None,
) -> Axes:
    """Draws the attention weights of a layer: a row for each query, a column for each key.

    Args:
        capture: a reader or the path of a stream.
        layer: as for `attention_weights`.
        head: the head, from 0; None: the mean of all heads.
        step: as for `attention_weights`.
        batch_row: as for `attention_weights`.
        tokenizer: its `decode` gives the texts of tokens.
        ax: the axes to draw to; None makes a figure.

    Raises:
        NoAttentionError: (a LookupError) the capture has no attention weights of the layer.
        InvalidArgumentError: (a ValueError) there is no such head, batch row or step.
        MissingExtraError: matplotlib is not installed; the extra "report" brings it.
    """
    found = attention_weights(capture, layer, step=step, batch_row=batch_row, tokenizer=tokenizer)
    heads, queries, keys = found.weights.shape
    if head is not None and not 0 <= head < heads:
        raise InvalidArgumentError(f"head = {head}: {found.layer!r} has {heads}, from 0")
    of = f"mean of {heads} heads" if head is None else f"head {head} of {heads}"
    values = found.weights.mean(axis=0) if head is None else found.weights[head]
    size = (2.2 + min(max(keys * 0.2, 2.6), 8), 1.6 + min(max(queries * 0.2, 2.0), 8))
    with _canvas.canvas(ax, size) as axes:
        limits = (0.0, float(np.nanmax(values)))
        _canvas.heat_map(
            axes, values, _canvas.SHARES, "Attention weight", limits=limits,
            absent=drawing.SURFACE,
        )  # fmt: skip
        _canvas.tokens_on_x(axes, found.keys, "Key")
        _canvas.tokens_on_y(axes, found.queries, "Query")
        _canvas.title(axes, found.layer, of)
        return axes


def plot_attention_heads(
    capture: Capture,
    layer: str | int = 0,
    *,
    step: int | None = None,
    batch_row: int = 0,
    tokenizer: Any = None,
) -> Figure:
    """Draws the attention weights of all heads of a layer, with one scale of colours.

    Arguments and errors are those of `plot_attention`.
    """
    found = attention_weights(capture, layer, step=step, batch_row=batch_row, tokenizer=tokenizer)
    with drawing.settings():
        return _canvas.small_heat_maps(
            found.weights, [f"head {n}" for n in range(len(found.weights))], found.queries,
            found.keys, _canvas.SHARES, "Attention weight", found.layer,
        )  # fmt: skip


# ---- tokens ---------------------------------------------------------------------------------


def plot_logit_lens(
    capture: Capture,
    model: nn.Module,
    layers: str | Iterable[str] | None = None,
    *,
    sequence: int = 0,
    tokenizer: Any = None,
    norm: nn.Module | None = None,
    unembedding: nn.Module | None = None,
    ax: Axes | None = None,
) -> Axes:
    """Draws the most probable next token of each layer behind each token, and its probability.

    Arguments and errors are those of `logit_lens` and of `plot_attention`.
    """
    lens = logit_lens(
        capture, model, layers, sequence=sequence, tokenizer=tokenizer, norm=norm,
        unembedding=unembedding,
    )  # fmt: skip
    count = len(lens.tokens)
    width = 1.6 + min(max(0.52 * count, 3.6), 14)
    with _canvas.canvas(ax, (width, _canvas.sized(lens.layers)[1] + 0.3)) as axes:
        _canvas.heat_map(axes, lens.probabilities, _canvas.SHARES, "Probability", limits=(0.0, 1.0))
        if count <= _WRITTEN:
            _canvas.write_cells(axes, lens.texts, lens.probabilities > 0.55)
        _canvas.layers_on_y(axes, lens.layers)
        _canvas.tokens_on_x(axes, lens.tokens)
        _canvas.title(axes, "Logit lens", "the most probable token behind each token")
        return axes


def plot_token_norms(
    capture: Capture,
    layers: str | Iterable[str] | None = None,
    *,
    sequence: int = 0,
    tokenizer: Any = None,
    ax: Axes | None = None,
) -> Axes:
    """Draws the L2 norm of the vector of each token at each layer, with logarithmic colours.

    Arguments and errors are those of `token_norms` and of `plot_attention`.
    """
    norms = token_norms(capture, layers, sequence=sequence, tokenizer=tokenizer)
    with _canvas.canvas(ax, _canvas.sized(norms.layers, len(norms.tokens))) as axes:
        _canvas.heat_map(axes, norms.values, _canvas.SIZES, "L2 norm", log=True)
        _canvas.layers_on_y(axes, norms.layers)
        _canvas.tokens_on_x(axes, norms.tokens)
        _canvas.title(axes, "Norm of each token")
        return axes


def plot_token_errors(
    a: Capture,
    b: Capture,
    layers: str | Iterable[str] | None = None,
    *,
    sequence: int = 0,
    rename: Mapping[str, str] | None = None,
    tokenizer: Any = None,
    ax: Axes | None = None,
) -> Axes:
    """Draws how much the vector of each token at each layer differs in two captures.

    Arguments and errors are those of `token_errors` and of `plot_attention`.
    """
    errors = token_errors(a, b, layers, sequence=sequence, rename=rename, tokenizer=tokenizer)
    with _canvas.canvas(ax, _canvas.sized(errors.layers, len(errors.tokens))) as axes:
        _canvas.heat_map(axes, errors.values, _canvas.ERRORS, "Relative error", log=True)
        _canvas.layers_on_y(axes, errors.layers)
        _canvas.tokens_on_x(axes, errors.tokens)
        _canvas.title(axes, "Error of each token", "‖b − a‖ / ‖a‖ of its vector")
        return axes


# ---- layers ---------------------------------------------------------------------------------


def plot_massive_activations(
    capture: Capture,
    layers: str | Iterable[str] | None = None,
    *,
    sequence: int = 0,
    tokenizer: Any = None,
    min_magnitude: float = 100.0,
    min_ratio: float = 1000.0,
    ax: Axes | None = None,
) -> Axes:
    """Draws the three largest magnitudes of each layer beside its median, and where they are.

    Massive activations have a ring. Arguments and errors are those of `massive_activations` and of
    `plot_attention`.
    """
    found = massive_activations(
        capture, layers, sequence=sequence, tokenizer=tokenizer, min_magnitude=min_magnitude,
        min_ratio=min_ratio,
    )  # fmt: skip
    with _canvas.canvas(ax, _canvas.sized(found.layers)) as axes:
        _layer_figures.draw_outliers(axes, found)
        return axes


def plot_layer_statistics(
    capture: Capture,
    layers: str | Iterable[str] | None = None,
    *,
    steps: Selector = None,
    ax: Axes | None = None,
) -> Axes:
    """Draws the range, the mean and the standard deviation of the values of each layer.

    Arguments and errors are those of `layer_statistics` and of `plot_attention`.
    """
    found = layer_statistics(capture, layers, steps=steps)
    with _canvas.canvas(ax, _canvas.sized([one.name for one in found])) as axes:
        _layer_figures.draw_ranges(axes, found)
        return axes


def plot_drift(comparison: CaptureComparison, ax: Axes | None = None) -> Axes:
    """Draws the relative error of each layer of two captures, in the order of execution.

    A bar reaches from the least to the largest error of its tensors. The dashed line is the
    tolerance. Layers beyond it have a diamond.

    Args:
        comparison: of `compare_captures`.
        ax: as for `plot_attention`.

    Raises:
        InvalidArgumentError: (a ValueError) no pair of tensors was compared.
        MissingExtraError: matplotlib is not installed; the extra "report" brings it.
    """
    if not comparison.pairs["compared"].any():
        raise InvalidArgumentError(
            f"no tensors of {comparison.a} and {comparison.b} could be compared"
        )
    with _canvas.canvas(ax, _canvas.sized([layer.name for layer in comparison.layers])) as axes:
        _layer_figures.draw_drift(axes, comparison)
        return axes
