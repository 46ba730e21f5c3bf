"""What a dump of a flight recorder is about: why it was written, and what went wrong first."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path

from .._pages import page
from ..analysis.blame import Blame, LayerRange, Offender, blame
from ..errors import CorruptError, NotFoundError

__all__ = ["dump_parts"]

_TOLD = 20  # layers, at most


def dump_parts(path: str, progress: bool | None) -> Iterator[str]:
    """The parts of the section of a dump; nothing if the capture is none."""
    trigger = Path(path) / "trigger.json"
    if not trigger.is_file():
        return
    try:
        reason = str(json.loads(trigger.read_bytes())["trigger"]["reason"])
    except (ValueError, KeyError, TypeError) as error:
        raise CorruptError(f"{trigger} is damaged: {error!r}") from error
    yield page.definitions({"written because": reason}.items())
    try:
        found = blame(path, progress=progress)
    except NotFoundError:  # no tensor has floats
        return
    if found.first is None:
        yield page.paragraph("No value is infinite, NaN or far beyond the usual.")
        return
    yield page.definitions(_first(found.first).items())
    yield page.listing(
        ["layer", "usual", "largest", "last", "not finite", "since step"],
        map(_row, _around(found, found.first)),
    )


def _first(first: Offender) -> dict[str, str | int | None]:
    value = f"{first.value:g} at element {first.element:,} of {first.elements:,}"
    if first.times is not None:
        value += f", {first.times:,.0f} times the usual of the layer"
    return {
        "first": first.layer + first.path or "the whole model", "value": value, "step": first.step,
        "request": first.request, "rank": first.rank or None,
    }  # fmt: skip


def _around(found: Blame, first: Offender) -> tuple[LayerRange, ...]:
    """The layers before the first offender and behind it."""
    names = [layer.name for layer in found.layers]
    begin = max(0, names.index(first.layer + first.path) - _TOLD // 4)
    return found.layers[begin : begin + _TOLD]


def _row(layer: LayerRange) -> list[str]:
    ranges = (layer.usual, layer.largest, layer.last)
    since = "" if layer.first_bad_step is None else str(layer.first_bad_step)
    return [
        layer.name or "the whole model",
        *("" if math.isnan(one) else f"{one:.3g}" for one in ranges),
        f"{layer.not_finite:,}" if layer.not_finite else "", since,
    ]  # fmt: skip
