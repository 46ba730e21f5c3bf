r"""Figures of captures. Each function returns the matplotlib `Axes`::

    ax = plot_attention("run.stream", "model.layers.0", head=3, tokenizer=tokenizer)
    save_figure(ax, "attention.pdf")

A layer is a row and a token a column; the first layer is on top. `analysis.views`,
`analysis.attention`, `analysis.logit_lens` and `analysis.compare` give the numbers.

A figure shows at the end of a notebook's cell. Colours can be told apart in any colour vision and
in grey print, and marks differ in shape too. A character that no installed font has is written as
an escape, as ``\u4e2d``. The caller's settings of matplotlib stay as they are. Importing this
module without matplotlib raises `MissingExtraError`.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .._pages import drawing
from ..errors import InvalidArgumentError
from .attention import attention_weights
from .compare import CaptureComparison
from .figures import canvas
from .figures import layers as layer_figures
from .figures import tokens as token_figures
from .logit_lens import logit_lens
from .reading.opened import Capture
from .reading.selection import Selector
from .views import layer_statistics, massive_activations, token_errors, token_norms

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from torch import nn

    from .similarity import LayerSimilarity

__all__ = [
    "plot_attention",
    "plot_attention_heads",
    "plot_drift",
    "plot_layer_statistics",
    "plot_logit_lens",
    "plot_massive_activations",
    "plot_similarity",
    "plot_token_errors",
    "plot_token_norms",
    "save_figure",
]


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
    heads = len(found.weights)
    if head is not None and not 0 <= head < heads:
        raise InvalidArgumentError(f"head = {head}: {found.layer!r} has {heads}, from 0")
    with canvas.canvas(ax, token_figures.attention_size(found)) as axes:
        token_figures.draw_attention(axes, found, head)
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
    return canvas.small_heat_maps(
        found.weights, [f"head {n}" for n in range(len(found.weights))], found.queries,
        found.keys, canvas.SHARES, "Attention weight", found.layer,
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
    with canvas.canvas(ax, token_figures.lens_size(lens)) as axes:
        token_figures.draw_lens(axes, lens)
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

    Large norms are bright.

    Arguments and errors are those of `token_norms` and of `plot_attention`.
    """
    norms = token_norms(capture, layers, sequence=sequence, tokenizer=tokenizer)
    with canvas.canvas(ax, canvas.sized(norms.layers, norms.tokens)) as axes:
        token_figures.draw_norms(axes, norms)
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
    with canvas.canvas(ax, canvas.sized(errors.layers, errors.tokens)) as axes:
        token_figures.draw_errors(axes, errors)
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
    with canvas.canvas(ax, canvas.sized(found.layers)) as axes:
        layer_figures.draw_outliers(axes, found)
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
    with canvas.canvas(ax, canvas.sized([one.name for one in found])) as axes:
        layer_figures.draw_ranges(axes, found)
        return axes


def plot_similarity(similarity: LayerSimilarity, ax: Axes | None = None) -> Axes:
    """Draws the CKA of each layer, a row, with each other one, a column.

    Args:
        similarity: of `cka`.
        ax: as for `plot_attention`.

    Raises:
        MissingExtraError: matplotlib is not installed; the extra "report" brings it.
    """
    with canvas.canvas(ax, layer_figures.similarity_size(similarity)) as axes:
        layer_figures.draw_similarity(axes, similarity)
        return axes


def plot_drift(comparison: CaptureComparison, ax: Axes | None = None) -> Axes:
    """Draws the relative error of each layer of two captures, in the order of execution.

    A bar reaches from the least to the largest error of its tensors. The dashed line is the
    tolerance. Layers beyond it have a diamond. Layers whose tensors are all equal are left out; the
    title says how many.

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
    with canvas.canvas(ax, layer_figures.drift_size(comparison)) as axes:
        layer_figures.draw_drift(axes, comparison)
        return axes
