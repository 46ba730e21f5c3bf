"""What a dump of a flight recorder is about: why it was written, and what went wrong first."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from .._pages import page
from ..analysis.blame import Blame, LayerRange, Offender, blame
from ..analysis.reader import ActivationReader
from ..analysis.rows import NoCallsError, NotTokenAlignedError, Rows
from ..analysis.token_rows.text_rows import token_labels
from ..errors import CorruptError, NotFoundError
from ._texts import check_ids, written

__all__ = ["dump_parts"]

_TOLD = 20  # layers, and tokens, at most
_TEXT = 64  # tokens of a text, at most: the last ones


def dump_parts(reader: ActivationReader, tokenizer: Any, progress: bool | None) -> Iterator[str]:
    """The parts of the section of a dump; nothing if the capture is none.

    Args:
        reader: the capture.
        tokenizer: its `decode` gives the texts of tokens; None: they are shown as ids.
        progress: as for `blame`.

    Raises:
        CorruptError: the trigger's file or a packet is damaged.
        InvalidArgumentError: a token has an id that the tokenizer lacks.
    """
    file = Path(reader.path) / "trigger.json"
    if not file.is_file():
        return
    try:
        trigger = json.loads(file.read_bytes())["trigger"]
        why = {
            "written because": str(trigger["reason"]), "in step": trigger["step"],
            "for request": trigger["request"],
        }  # fmt: skip
    except (ValueError, KeyError, TypeError) as error:
        raise CorruptError(f"{file} is damaged: {error!r}") from error
    yield page.definitions(why.items())
    try:
        found = blame(reader.path, progress=progress)
    except NotFoundError:  # no tensor has floats
        return
    if found.first is None:
        yield page.paragraph("No value is infinite, NaN or far beyond the usual.")
        return
    yield page.definitions(_first(found.first).items())
    yield from _tokens(reader, found.first, tokenizer)
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


def _tokens(reader: ActivationReader, first: Offender, tokenizer: Any) -> Iterator[str]:
    """The tokens whose vectors show the fault, and the text of the first of them.

    Tokens that a mask leaves out are among them, because their vectors can show it first.
    """
    if first.step is None:
        return
    window = slice(max(0, first.step - _TEXT + 1), first.step + 1)
    try:
        rows = reader.rows(
            first.layer + first.path, steps=window, padding=True, refused=True, tokenizer=tokenizer
        )
    except (NotTokenAlignedError, NoCallsError) as error:
        yield page.paragraph(f"Its tokens cannot be shown: {error}")
        return
    here = (rows.column("step") == first.step) & (rows.column("call") == first.call)
    if first.rank is not None:
        here &= rows.column("rank") == first.rank
    if not here.any():
        yield page.paragraph("Its tokens cannot be shown: the capture does not have its call.")
        return
    check_ids(rows.column("token_id"), tokenizer)
    at = np.flatnonzero(here)
    bad = rows[at[_shows(rows[at], first)]]
    what = "the largest magnitude" if first.times is not None else "values that are not finite"
    yield page.paragraph(
        f"Tokens with {what}: {len(bad):,} of the {len(at):,} of that call"
        + (f"; the first {_TOLD}:" if len(bad) > _TOLD else ".")
    )
    if not len(bad):  # the value is at no token, as in a part that rows leave out
        return
    told = bad[:_TOLD]
    columns = (told.column(name).tolist() for name in ("batch_row", "position", "padding"))
    yield page.listing(
        ["token", "row of the batch", "position", "padding"],
        [
            [label, str(row), "" if position < 0 else str(position), "yes" if padding == 1 else ""]
            for label, row, position, padding in zip(token_labels(told), *columns, strict=True)
        ],
    )
    one = bad[:1]
    sequence = one.column("sequence")
    if sequence[0] >= 0:
        of_text = rows.column("sequence") == sequence
    else:  # the capture does not know which texts go on
        of_text = here & (rows.column("batch_row") == one.column("batch_row"))
    text = rows[np.flatnonzero(of_text)][-_TEXT:]
    yield page.paragraph(f"The text of the first of them, to the end of step {first.step}:")
    yield page.code_block(written(text, tokenizer))


def _shows(rows: Rows, first: Offender) -> npt.NDArray[np.bool_]:
    """Which rows show the fault: those with values that are not finite, or with the outlier."""
    values = rows.to_torch().float().reshape(len(rows), -1)
    if first.times is None:
        found = ~values.isfinite().all(dim=1)
    else:
        largest = values.abs().nan_to_num(0.0, math.inf).amax(dim=1)
        found = largest == largest.max()
    shown: npt.NDArray[np.bool_] = found.numpy()
    return shown


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
