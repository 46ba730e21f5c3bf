"""Rows against the tensors that plain hooks kept."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Iterator, Sequence

import torch
from llm_instrumentation import ActivationReader
from llm_instrumentation.analysis.rows import Rows
from llm_instrumentation.errors import StrapError
from plain_hooks import same

from .cells import Cell, Different, not_applicable, refused, works
from .texts import LAYOUTS, Text, vectors_of
from .watched import Watched

__all__ = ["NO_TEXT", "Sides", "check_rows", "rows_of_layers"]

NO_TEXT = not_applicable("no text")
# For each outermost call the texts that it may have vectors of, as of an encoder and a decoder.
Sides = Sequence[dict[str, Text]]


@functools.lru_cache(maxsize=1)
def rows_of_layers(reader: ActivationReader) -> tuple[dict[str, Rows], dict[str, str]]:
    """The rows of the layers that have some, and why the other ones have none."""
    found: dict[str, Rows] = {}
    refusals: dict[str, str] = {}
    for layer in reader.layers:
        try:
            found[layer] = reader.rows(layer)
        except StrapError as error:
            refusals[layer] = str(error)
    return found, refusals


def check_rows(reader: ActivationReader, watched: Watched, sides: Sides) -> Cell:
    """Whether the rows of all layers that have some are the tokens' vectors.

    Args:
        reader: of a capture of all calls.
        watched: the calls.
        sides: the texts of each call.

    Raises:
        Different: they are not.
    """
    if not any(sides):
        return NO_TEXT
    found, refusals = rows_of_layers(reader)
    for layer, rows in found.items():
        _check_layer(layer, rows, watched, sides)
    blocks = sorted(_blocks(watched, sides))
    without = [name for name in blocks if name not in found]
    if without:
        return refused(refusals.get(without[0], f"{without[0]!r} is not captured"))
    if not blocks:
        none = "no module of a list returns a vector for each token"
        numbered = (why for name, why in refusals.items() if _NUMBERED.search(name))
        return refused(next(numbered, none))
    return works


def _check_layer(layer: str, rows: Rows, watched: Watched, sides: Sides) -> None:
    calls = [
        (of, [tensor for name, tensor in call.seen if name == layer])
        for call, of in zip(watched.calls, sides, strict=True)
    ]
    why = ""
    got = {name: rows.column(name).tolist() for name in ("token_id", "position", "sequence")}
    for side in dict.fromkeys(name for of in sides for name in of):
        texts = [(of.get(side), tensors) for of, tensors in calls if tensors]
        if any(text is None for text, _ in texts):
            continue
        columns = _joined(text.columns() for text, tensors in texts for _ in tensors)
        wrong = [name for name in got if got[name] != columns[name]]
        if wrong:
            why = why or _difference(wrong[0], got[wrong[0]], columns[wrong[0]])
            continue
        why = f"its {len(rows)} rows are not the vectors of the tokens"
        for layout in LAYOUTS:
            parts = [vectors_of(text, one, layout) for text, tensors in texts for one in tensors]
            if all(part is not None for part in parts) and same(rows.to_torch(), torch.cat(parts)):
                return
    raise Different(f"rows of {layer!r}: {why}")


def _joined(columns: Iterable[dict[str, list[int]]]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {"token_id": [], "position": [], "sequence": []}
    for one in columns:
        for name, values in one.items():
            found[name] += values
    return found


def _difference(name: str, got: list[int], expected: list[int]) -> str:
    if len(got) != len(expected):
        return f"{len(got)} rows of {len(expected)} tokens"
    at = next(place for place, (a, b) in enumerate(zip(got, expected, strict=True)) if a != b)
    return f"{name} {got[at]} instead of {expected[at]} in row {at}"


_NUMBERED = re.compile(r"\.\d+$")


def _blocks(watched: Watched, sides: Sides) -> Iterator[str]:
    """The modules of a list whose outputs are [rows, tokens, ...] in each call."""
    shapes: dict[str, list[bool]] = {}
    for call, of in zip(watched.calls, sides, strict=True):
        for name, tensor in call.seen:
            if _NUMBERED.search(name):
                shapes_of_texts = [text.ids.shape for text in of.values()]
                both = [*shapes_of_texts, *(shape[::-1] for shape in shapes_of_texts)]
                fits = tensor.is_floating_point() and tensor.shape[:2] in both
                shapes.setdefault(name, []).append(fits)
    yield from (name for name, fits in shapes.items() if all(fits))
