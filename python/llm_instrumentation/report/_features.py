"""Features of a sparse autoencoder: how often they are active, and on which tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from typing import TYPE_CHECKING

import numpy as np

from .._pages import page, small, units

if TYPE_CHECKING:
    from ..analysis.sparse_autoencoder import Feature, FeatureContext, TokenEffect

__all__ = ["feature_parts"]

_EFFECTS = 8  # tokens that a feature raises or lowers
_STRONGEST = 40  # percent of the colour that the largest activation gets


def feature_parts(features: Sequence[Feature]) -> Iterator[str]:
    """Each feature with its histogram, its effects on logits, and its contexts."""
    if not features:
        yield page.paragraph("The folder has no feature that was active.")
        return
    yield page.paragraph(
        ("The feature" if len(features) == 1 else f"The {len(features)} features")
        + " with the largest activations. The stronger the colour of a token in a context, the "
        "larger is its activation. The number on the left is that of the underlined token."
    )
    for feature in features:
        yield (
            '<article class="feature">'
            f"<h3>{escape(feature.layer)}, feature {feature.feature}</h3>"
            + page.paragraph(
                f"Active on {units.counted(feature.fired, 'token')} ({feature.density:.2%}). Its "
                f"largest activation is {feature.maximum:.3g}."
            )
            + _histogram(feature)
            + _effects("promotes", feature.promoted)
            + _effects("suppresses", feature.suppressed)
            + _contexts(feature)
            + "</article>"
        )


def _histogram(feature: Feature) -> str:
    from ..analysis.sparse_autoencoder import HISTOGRAM_EDGES

    there = np.flatnonzero(feature.histogram)
    if not len(there):
        return ""
    low, high = int(there[0]), int(there[-1])
    # The first and the last bin are open.
    begin = "0" if low == 0 else f"{HISTOGRAM_EDGES[low - 1]:.3g}"
    end = f"{HISTOGRAM_EDGES[min(high, len(HISTOGRAM_EDGES) - 1)]:.3g}"
    told = f"Histogram of its activations from {begin} to {end}, each bar up to 1.4 times the last"
    bars = small.bars(feature.histogram[low : high + 1], told, width=220, height=36)
    return f'<p class="bars">{escape(begin)} {bars} {escape(end)}</p>'


def _effects(what: str, effects: Sequence[TokenEffect] | None) -> str:
    if not effects:
        return ""
    listed = ", ".join(f"{effect} {effect.value:.2g}" for effect in effects[:_EFFECTS])
    return page.paragraph(f"It {what} {listed}")


def _contexts(feature: Feature) -> str:
    items = "".join(
        f"<li><b>{context.value:.3g}</b> <span>{_tokens(context, feature.maximum)}</span></li>"
        for context in feature.contexts
    )
    return f'<ol class="contexts">{items}</ol>' if items else ""


def _tokens(context: FeatureContext, maximum: float) -> str:
    told = []
    for number, (word, value) in enumerate(zip(context.words(), context.values, strict=True)):
        text = escape(word)
        if number == context.peak:
            text = f"<u>{text}</u>"
        if value > 0 and maximum > 0:
            share = round(_STRONGEST * min(1.0, value / maximum))
            text = f'<mark style="--share: {share}%">{text}</mark>'
        told.append(text)
    return "".join(told)
