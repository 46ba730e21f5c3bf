"""Draws heat maps of layers and tokens, and of queries and keys."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ..._extras import extra
from ..._pages import drawing
from . import canvas

with extra("report", "A figure"):
    from matplotlib.colors import LogNorm

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from ..attention import AttentionWeights
    from ..logit_lens import LogitLens
    from ..views import TokenErrors, TokenNorms

__all__ = [
    "attention_size",
    "draw_attention",
    "draw_errors",
    "draw_lens",
    "draw_norms",
    "lens_size",
]

_WRITTEN = 40  # a heat map with more columns than this has no texts in its cells


def attention_size(found: AttentionWeights) -> tuple[float, float]:
    """Inches of a figure of `draw_attention`."""
    _, queries, keys = found.weights.shape
    return 2.2 + min(max(keys * 0.2, 2.6), 8), 1.6 + min(max(queries * 0.2, 2.0), 8)


def draw_attention(ax: Axes, found: AttentionWeights, head: int | None = None) -> None:
    """Draws the weights of a head, or the mean of all, as `plots.plot_attention` describes."""
    heads = len(found.weights)
    of = f"mean of {heads} heads" if head is None else f"head {head} (of 0 to {heads - 1})"
    values = found.weights.mean(axis=0) if head is None else found.weights[head]
    canvas.heat_map(
        ax, values, canvas.SHARES, "Attention weight", limits=(0.0, float(np.nanmax(values))),
        absent=drawing.SURFACE,
    )  # fmt: skip
    canvas.tokens_on_x(ax, found.keys, "Key")
    canvas.tokens_on_y(ax, found.queries, "Query")
    drawing.title(ax, found.layer, of)


def lens_size(lens: LogitLens) -> tuple[float, float]:
    """Inches of a figure of `draw_lens`."""
    return (
        1.6 + min(max(0.52 * len(lens.tokens), 3.6), 14),
        canvas.sized(lens.layers, lens.tokens)[1] + 0.2,
    )


def draw_lens(ax: Axes, lens: LogitLens) -> None:
    """Draws the logit lens, as `plots.plot_logit_lens` describes."""
    canvas.heat_map(ax, lens.probabilities, canvas.SHARES, "Probability", limits=(0.0, 1.0))
    if len(lens.tokens) <= _WRITTEN:
        canvas.write_cells(ax, lens.texts, lens.probabilities > 0.55)
    canvas.layers_on_y(ax, lens.layers)
    canvas.tokens_on_x(ax, lens.tokens)
    drawing.title(ax, "Logit lens", "the most probable token behind each token")


def draw_norms(ax: Axes, norms: TokenNorms) -> None:
    """Draws the norms of tokens, as `plots.plot_token_norms` describes."""
    image = canvas.heat_map(ax, norms.values, canvas.SIZES, "L2 norm", log=True)
    canvas.layers_on_y(ax, norms.layers)
    canvas.tokens_on_x(ax, norms.tokens)
    scale = "logarithmic" if isinstance(image.norm, LogNorm) else "linear"
    remark = f"large norms are bright; one {scale} scale of colours for all layers"
    drawing.title(ax, "Norm of each token", remark)


def draw_errors(ax: Axes, errors: TokenErrors) -> None:
    """Draws the errors of tokens, as `plots.plot_token_errors` describes."""
    canvas.heat_map(ax, errors.values, canvas.ERRORS, "Relative error", log=True)
    canvas.layers_on_y(ax, errors.layers)
    canvas.tokens_on_x(ax, errors.tokens)
    drawing.title(ax, "Error of each token", "‖b − a‖ / ‖a‖ of its vector")
