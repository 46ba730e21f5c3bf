"""Features of a sparse autoencoder: how often they are active, and on which tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from typing import TYPE_CHECKING

import numpy as np

from .._pages import page, units
from ..analysis.neurons.page import contexts_list, effects_line, histogram_line

if TYPE_CHECKING:
    from ..analysis.sparse_autoencoder import Feature

__all__ = ["feature_parts"]


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
            + effects_line("promotes", feature.promoted)
            + effects_line("suppresses", feature.suppressed)
            + contexts_list(feature.contexts, feature.maximum)
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
    told = "Histogram of its activations, each bar up to 1.4 times the last,"
    return histogram_line(feature.histogram[low : high + 1], begin, end, told)
