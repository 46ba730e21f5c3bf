"""Checks that what one head reads acts on the result of this head alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ...analysis.causal_graph import EdgeInput
from ...analysis.causal_graph.parts import INPUTS
from ...errors import UnsupportedError
from ..decoders import DecoderBlock, DecoderGraph
from ..edits import Edit, apply
from ..installed import intervene

__all__ = ["check_apart"]

# Large, so that a norm over all heads changes the others much.
_FACTOR = 64


@torch.no_grad()
def check_apart(decoder: DecoderGraph, inputs: Mapping[str, Tensor]) -> None:
    """Refuses a decoder in which heads are joined by something that its layout does not say.

    The query of head 0 is made larger, in all layers in one run, and then its key and its value.
    The results of heads that do not share them have to stay as they were.

    Args:
        decoder: the decoder.
        inputs: arguments of the model. The first example runs, up to four times.

    Raises:
        UnsupportedError: the result of another head changes.
    """
    first = {name: one[:1] for name, one in inputs.items()}
    results: dict[str, Tensor] = {}

    def keep(name: str) -> Callable[[Tensor], Tensor]:
        def kept(value: Tensor) -> Tensor:
            results[name] = value.clone()
            return value

        return kept

    _run(decoder, first, [apply(block.out, keep(block.out), side="input")
                          for block in decoder.blocks])  # fmt: skip
    for kind in INPUTS:
        edits = []
        for block in decoder.blocks:
            if kind in block.heads.layout.joint or not _others(block, kind):
                continue
            place = block.heads.columns(0, kind)
            edits.append(apply(place.module, _larger(place.columns)))
            edits.append(
                apply(block.out, _compared(decoder, block, kind, results[block.out]), side="input")
            )
        if edits:
            _run(decoder, first, edits)


def _run(decoder: DecoderGraph, inputs: Mapping[str, Any], edits: list[Edit]) -> None:
    with intervene(decoder.model, *edits):
        decoder.model(**inputs)


def _others(block: DecoderBlock, kind: EdgeInput) -> list[int]:
    """The heads that do not read an input of head 0."""
    heads = block.heads
    if kind == "q":
        return list(range(1, heads.heads))
    return [head for head in range(heads.heads) if heads.key_value_head(head)]


def _larger(columns: slice) -> Callable[[Tensor], Tensor]:
    def change(returned: Tensor) -> Tensor:
        new = returned.clone()
        new[..., columns] *= _FACTOR
        return new

    return change


def _compared(
    decoder: DecoderGraph, block: DecoderBlock, kind: EdgeInput, before: Tensor
) -> Callable[[Tensor], Tensor]:
    def change(value: Tensor) -> Tensor:
        for head in _others(block, kind):
            columns = block.heads.columns(head).columns
            one, other = value[..., columns], before[..., columns]
            if not torch.allclose(one, other, rtol=1e-3, atol=1e-3 * float(other.abs().max())):
                raise UnsupportedError(
                    f"{block.heads.layer!r}: the {kind} of head 0 changes the result of head {head}"
                    ", as by a norm over all heads, so the layout of "
                    f"{type(decoder.module(block.heads.layer)).__name__} is not complete: say "
                    f'joint=("{kind}",) in its HeadLayout with register_heads'
                )
        return before  # so the next layers run as before

    return change
