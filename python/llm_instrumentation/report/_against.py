"""Where a capture differs from another one."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from .._pages import page, units
from ..analysis.compare import CaptureComparison, LayerComparison, compare_captures
from ..analysis.figures import layers as layer_figures
from ..analysis.reader import ActivationReader
from ..errors import InvalidArgumentError
from ._drawn import drawn
from ._sample import evenly

__all__ = ["compared", "comparison_parts"]

_DRAWN = 200  # layers that have a row in the figure
_OPEN = 20  # layers that differ, in the table that is not folded
_LISTED = 500  # layers that differ and are listed
_TOLD = 20
_HEADS = (
    "layer", "pairs", "equal", "beyond", "largest error", "relative error", "worst", "SNR",
    "cosine", "tolerance",
)  # fmt: skip


def compared(
    reference: ActivationReader,
    reader: ActivationReader,
    other: int | None,
    rename: Mapping[str, str] | None,
    packets: int,
    told: Callable[[int, int], Any],
) -> tuple[CaptureComparison, Sequence[int] | None]:
    """Compares a capture with a reference, in as many steps as the number of packets allows.

    Args:
        reference: the capture that errors are relative to.
        reader: the capture of the report.
        other: the first step in which the models were given other tokens; None: there is none.
        rename: as for `compare_captures`.
        packets: tensors of the reference to read at most; but those of one step at least.
        told: called with the number of compared pairs, and of all.

    Returns:
        The comparison, and the steps that it is of; None: all tensors.

    Raises:
        InvalidArgumentError: the captures have no layer in common; or they are too long, and their
            steps are unknown.
        CorruptError: a packet is damaged.
    """
    steps: Sequence[int] | None = None
    if other is not None and reference.steps and reference.steps[0] < other:
        steps = [step for step in reference.steps if step < other]
    if len(reference.select(steps=steps)) > packets:
        steps = reference.steps if steps is None else steps
        if not steps:
            raise InvalidArgumentError(
                f"{reference.path} has {len(reference):,} tensors of unknown steps, so none can be "
                f"chosen: raise packets above {packets:,} to compare all"
            )
        each = math.ceil(len(reference) / len(reference.steps))
        steps = [steps[at] for at in evenly(len(steps), max(1, packets // each))]
    found = compare_captures(reference, reader, steps=steps, rename=rename, progress=told)
    return found, steps


def comparison_parts(
    found: CaptureComparison, steps: Sequence[int] | None, of: int, other: int | None
) -> Iterator[str]:
    """The comparison on the page.

    Args:
        found: the comparison.
        steps: the steps that were compared; None: all.
        of: number of steps of the reference.
        other: the first step in which the models were given other tokens; None: there is none.
    """
    differing = [layer for layer in found.layers if not layer.agrees]
    first = found.first
    if first is not None:
        step = "" if first.step is None else f" in step {first.step}"
        odd = f", {first.nonfinite:,} NaN or infinite values" if first.nonfinite else ""
        yield page.notice(
            "bad",
            f"The first tensor beyond the tolerance is of {first.layer or '<root>'}{step}: "
            f"relative error {first.relative_error:.3g}{odd}, tolerance {first.tolerance:.3g}.",
        )
    elif differing:
        yield page.notice("fair", "No tensor is beyond the tolerance, but some have no partner.")
    else:
        yield page.notice("good", "No tensor is beyond the tolerance.")
    if found.other_tokens is not None:
        yield page.notice(
            "fair",
            "The models were given other tokens from the first step on: the differences say "
            "nothing about the models.",
        )
    elif other is not None:
        yield page.notice(
            "plain",
            f"From step {other} on the models were given other tokens, so only the steps before it "
            "are compared.",
        )
    for path, names in ((found.a, found.only_in_a), (found.b, found.only_in_b)):
        if names:
            more = f", and {len(names) - _TOLD:,} more" if len(names) > _TOLD else ""
            yield page.paragraph(f"Layers that only {path} has: {', '.join(names[:_TOLD])}{more}.")
    shown = len(layer_figures.drift_layers(found))
    of_steps = "all tensors" if steps is None else f"{len(steps):,} of {of:,} steps"
    yield page.paragraph(
        f"The reference is {found.a}. Compared: {of_steps} of "
        f"{units.counted(len(found.layers), 'layer')}. Equal: {len(found.layers) - shown:,}. "
        f"Different, but within the tolerance: {shown - len(differing):,}. Beyond the tolerance, "
        f"or with tensors that have no partner: {len(differing):,}."
    )
    if found.pairs["compared"].any() and 0 < shown <= _DRAWN:
        yield drawn(
            "drift", f"The relative error of {shown} layers; the others are equal",
            layer_figures.drift_size(found),
            lambda ax: layer_figures.draw_drift(ax, found),
            "A bar reaches from the least to the largest error of a layer's tensors. A diamond is "
            "beyond the tolerance.",
        )  # fmt: skip
    yield page.listing(_HEADS, map(_row, differing[:_LISTED]))
    if len(differing) > _LISTED:
        yield page.paragraph(f"{len(differing) - _LISTED:,} more of these layers are not listed.")


def _row(layer: LayerComparison) -> tuple[str, ...]:
    name = layer.name or "<root>"
    if layer.name_b != layer.name:
        name += f" = {layer.name_b}"
    if layer.incomparable:
        name += f" ({layer.incomparable:,} cannot be compared: {layer.reason})"
    numbers = (
        f"{layer.max_abs_error:.3g}", f"{layer.relative_error:.3g}",
        f"{layer.worst_relative_error:.3g}", f"{layer.snr_db:.1f} dB", f"{layer.cosine:.6f}",
        f"{layer.tolerance:.2g}",
    )  # fmt: skip
    there = numbers if layer.tensors else (units.UNKNOWN,) * len(numbers)
    return (name, f"{layer.tensors:,}", f"{layer.equal:,}", f"{layer.over:,}", *there)
