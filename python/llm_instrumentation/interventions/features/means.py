"""Means of features and of errors over texts, for mean ablation."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

import torch
from torch import nn

from ...errors import UnsupportedError
from ..prompts import Prompts
from .coders import Coder
from .ways import Mean, Way, read

__all__ = ["Over", "means_of"]

Over = Literal["tokens", "sequences"]
"""Of a mean: one over all tokens of all texts, or one for each position over the texts."""


@torch.no_grad()
def means_of(
    model: nn.Module, coders: list[Coder], batches: Iterable[Prompts], over: Over
) -> dict[Coder, Mean]:
    """The means over the clean texts, without padding, in float64.

    An error is the value minus what the autoencoder makes of it, in the same run.

    Args:
        model: the model.
        coders: the autoencoders.
        batches: the examples.
        over: see `Over`. A position at which no text has a token has means of 0.

    Raises:
        UnsupportedError: the attention mask does not say which tokens are padding, or is of other
            tokens than a site, as those of a decoder.
    """
    totals: dict[Coder, list[Any]] = {}
    count = torch.zeros(())
    for batch in batches:
        here, _ = read(model, coders, batch.clean)
        real = batch.as_run_on("clean").real_tokens()
        axes = (0, 1) if over == "tokens" else (0,)
        count = count + real.cpu().double().sum(axes)
        for coder in coders:
            way = Way(coder, here[coder], None)
            if way.error.shape[:2] != real.shape:
                raise UnsupportedError(
                    f"{coder.key}: the tensor has the shape {list(way.error.shape)}, and the texts "
                    f"have {list(real.shape)} tokens, so it is not known which of its tokens are "
                    'padding: give ablation="zero" or "corrupted"'
                )
            inside = real.to(way.error.device)[..., None]
            sums = [
                torch.where(inside, value.double(), 0).sum(axes)
                for value in (way.features, way.error)
            ]
            before = totals.get(coder, [0.0, 0.0])
            totals[coder] = [one + more for one, more in zip(before, sums, strict=True)]
    return {
        coder: Mean(*(one / count.to(one.device).clamp_min(1)[..., None] for one in own))
        for coder, own in totals.items()
    }
