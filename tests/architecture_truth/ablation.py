"""Attention and MLP blocks that are ablated, beside the same by hand with the residual kept."""

from __future__ import annotations

from functools import partial
from typing import Any, Literal, TypeAlias, get_args

import torch
from blocks_by_hand import NothingAddedError, contribution_ablated, tensors_of
from llm_instrumentation.interventions import intervene, sites_of, zero
from tiny_models import Tiny

from .cells import Cell, Different, judged, works, worst
from .fields import with_fields
from .watched import watched

__all__ = ["ablation_cell"]

Block: TypeAlias = Literal["attention", "mlp"]


def ablation_cell(tiny: Tiny) -> Cell:
    """The cell of ablations of all blocks, each on its own.

    Where a model multiplies what blocks add, it does not by 1.
    """
    tiny = with_fields(tiny, "residual_multiplier", 0.4) or tiny
    return worst(judged(partial(_ablates, tiny, kind)) for kind in get_args(Block))


def _ablates(tiny: Tiny, kind: Block) -> Cell:
    inputs = tiny.inputs(padding="right")
    sites = sites_of(tiny.model, kind)
    with torch.no_grad(), watched(tiny.model) as kept:
        tiny.model(**inputs)
    ran = {name for name, _ in kept.seen}
    # Parts for images do not run without an image.
    for site in [site for site in sites if site.layer in ran] or sites[:1]:
        torch.manual_seed(0)
        with torch.no_grad(), intervene(tiny.model, zero(site)):
            ablated = tensors_of(tiny.model(**inputs))
        torch.manual_seed(0)
        try:
            by_hand = tensors_of(contribution_ablated(tiny.model, inputs, site))
        except NothingAddedError as error:
            raise Different(f"{kind} {site}: by hand {error}") from error
        if len(ablated) != len(by_hand) or not all(map(_close, ablated, by_hand)):
            raise Different(f"{kind} {site}: the outputs differ from those by hand")
    return works


def _close(one: Any, other: Any) -> bool:
    return one.shape == other.shape and torch.allclose(
        one, other, rtol=1e-4, atol=1e-5, equal_nan=True
    )
