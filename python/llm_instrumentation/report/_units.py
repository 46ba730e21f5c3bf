"""Single units of layers: their values, their effects on logits, and their contexts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from .._pages import page
from ..analysis.neurons import unit_page
from ..analysis.neurons.page import unit_parts
from ..analysis.neurons.unit_logits import UnitLogits, Writes
from ..analysis.reader import ActivationReader

if TYPE_CHECKING:
    from torch import nn

__all__ = ["unit_section"]

_CONTEXTS = 10  # at each end


def unit_section(
    reader: ActivationReader,
    units: Sequence[tuple[str, int]],
    tokenizer: Any,
    model: nn.Module | None,
    writes: Writes | None,
    progress: bool | None,
) -> Iterator[str]:
    """The units, in the order in which they were asked for.

    Args:
        reader: the capture.
        units: the layer and the number of each.
        tokenizer: gives the texts of tokens, or None.
        model: its unembedding gives the effects on logits, if `writes` is given too.
        writes: how the units of a layer write to the residual stream; None: leave the effects out.
        progress: show a progress bar.
    """
    if not units:
        return
    yield page.paragraph(
        "The stronger the colour of a token in a context, the nearer is its value to the largest "
        "one, or to the smallest one. The number on the left is that of the underlined token."
    )
    logits = None if model is None or writes is None else UnitLogits(model, writes)
    for layer, number in units:
        given, problem = ({}, None) if logits is None else logits.of(layer)
        found = unit_page(
            reader, layer, number, k=_CONTEXTS, tokenizer=tokenizer, progress=progress, **given
        )
        yield from unit_parts(
            found, f"The tokens that it promotes are unknown: {problem}" if problem else ""
        )
