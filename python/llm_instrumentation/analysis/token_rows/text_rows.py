"""The rows of one text of a capture, at several layers."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ..._integers import integers
from ...errors import InvalidArgumentError
from ..reader import ActivationReader, UnknownActivationError
from ..reading.selection import Selector
from ..rows import NoCallsError, NotTokenAlignedError, Rows

__all__ = [
    "chosen_layers",
    "labels",
    "of_last_calls",
    "one_text",
    "rows_and_texts",
    "rows_of_text",
    "rows_of_texts",
    "token_labels",
]

_BLOCK = re.compile(r"((?:.*\.)?)\d+")


def chosen_layers(reader: ActivationReader, layers: str | Iterable[str] | None) -> tuple[str, ...]:
    """The layers of names or patterns, in the order of execution; None: the model's blocks.

    The blocks are the modules with a number as name, as "model.layers.3", of the outermost list; of
    several such lists the longest. A capture without them gives all its layers.

    Raises:
        UnknownActivationError: a name or pattern matches no layer; or the capture is empty.
    """
    if layers is not None:
        patterns = [layers] if isinstance(layers, str) else layers
        wanted = {name for pattern in patterns for name in reader._fitting(pattern)}
        return tuple(name for name in reader.layers if name in wanted)
    if not reader.layers:
        raise UnknownActivationError(f"{reader.path} has no activations")
    lists: dict[str, list[str]] = {}
    for name in reader.layers:
        if found := _BLOCK.fullmatch(name):
            lists.setdefault(found[1], []).append(name)
    if not lists:
        return reader.layers
    blocks = min(lists.values(), key=lambda names: (names[0].count("."), -len(names)))
    return tuple(blocks)


def rows_of_texts(
    reader: ActivationReader,
    layers: str | Iterable[str] | None,
    sequence: int | Sequence[int],
    tokenizer: Any = None,
    steps: Selector = None,
    *,
    last_calls: bool = False,
) -> dict[str, Rows]:
    """The rows of a text, or of texts, at each layer. All have the same tokens.

    Args:
        reader: the capture.
        layers: as for `chosen_layers`. Of all layers those without a vector for each token are left
            out; a layer that is named must have them.
        sequence: as for `rows_of_text`.
        tokenizer: its `decode` gives the texts of tokens.
        steps: as for `rows_of_text`.
        last_calls: of layers that a model runs several times in a step, those of the last time.

    Raises:
        NotTokenAlignedError: a layer has no vector for each token, or other tokens.
        InvalidArgumentError: there is no such text.
        UnknownActivationError: a name or pattern matches no layer.
    """
    found: dict[str, Rows] = {}
    problem: NotTokenAlignedError | None = None
    for layer in chosen_layers(reader, layers):
        try:
            rows = rows_of_text(reader, layer, sequence, tokenizer, steps)
            rows = of_last_calls(rows) if last_calls else rows
        except NotTokenAlignedError as error:
            problem = problem or error
            if layers is not None:
                raise
            continue
        first = next(iter(found.values()), rows)
        if not np.array_equal(_places(first), _places(rows)):
            if layers is None:
                continue
            raise NotTokenAlignedError(
                f"{first.layer!r} has {len(first)} tokens of text {sequence}, {layer!r} has "
                f"{len(rows)}, or tokens of other steps: choose layers with the same tokens"
            )
        found[layer] = rows
    if problem is not None and not found:
        raise NotTokenAlignedError(
            f"no layer of {reader.path} has a vector for each token; the first: {problem}"
        ) from problem
    return found


def one_text(sequence: Any) -> int:
    """The number of one text, as Python has it.

    Raises:
        InvalidArgumentError: it is no integer, or there are several.
    """
    number = integers("sequence", sequence)
    if not isinstance(number, int):
        raise InvalidArgumentError(
            f"sequence = {sequence!r}: give the number of one text, and call once for each"
        )
    return number


def rows_of_text(
    reader: ActivationReader,
    layer: str,
    sequence: int | Sequence[int],
    tokenizer: Any = None,
    steps: Selector = None,
) -> Rows:
    """The rows of a layer that belong to one text, in the order of its tokens.

    Those of several texts follow each other in the order of the texts' numbers that are given.

    Args:
        reader: the capture.
        layer: the layer's name.
        sequence: the number of the text in the capture, through all steps of a generation. If the
            capture does not have what the model was given: the number of a row of a batch, counted
            through all steps. Several: of several texts.
        tokenizer: its `decode` gives the texts of tokens.
        steps: the steps to read, as for `ActivationReader.select`; None: all.

    Raises:
        NotTokenAlignedError: the layer has no vector for each token.
        InvalidArgumentError: there is no such text.
        UnknownActivationError: there is no such layer.
    """
    rows, texts = rows_and_texts(reader, layer, tokenizer, steps)
    order = np.argsort(texts, kind="stable")
    chosen = np.atleast_1d(sequence)
    begins, ends = (np.searchsorted(texts, chosen, side, order) for side in ("left", "right"))
    missing = chosen[(begins == ends) | (chosen < 0)]  # -1: of no known text
    if len(missing):
        raise InvalidArgumentError(
            f"sequence = {missing[0]}: {layer!r} has the texts {texts.min(initial=0)} to "
            f"{texts.max(initial=0)}"
        )
    return rows[np.concatenate([order[a:b] for a, b in zip(begins, ends, strict=True)])]


def of_last_calls(rows: Rows) -> Rows:
    """The rows of the last call of a layer in each step; a model may repeat its layers."""
    calls, steps = rows.column("call"), rows.column("step")
    distinct, places = np.unique(steps, return_inverse=True)
    last = np.full(len(distinct), calls.min(initial=0), calls.dtype)  # it may be unsigned
    np.maximum.at(last, places, calls)
    kept = calls == last[places]
    return rows if kept.all() else rows[np.flatnonzero(kept)]


def rows_and_texts(
    reader: ActivationReader, layer: str, tokenizer: Any = None, steps: Selector = None
) -> tuple[Rows, npt.NDArray[np.int64]]:
    """All rows of a layer, and for each row the number of its text, as for `rows_of_text`.

    Raises:
        NotTokenAlignedError: the layer has no vector for each token.
        UnknownActivationError: there is no such layer, or it has no activation in these steps.
    """
    try:
        rows = reader.rows(layer, tokenizer=tokenizer, steps=steps)
        texts = rows.column("sequence")
    except NoCallsError:
        rows = reader.rows(layer, steps=steps, without_calls=True)
        texts = np.full(len(rows), -1)
    if (texts < 0).all():
        batches = np.stack([rows.column("step"), rows.column("call"), rows.column("batch_row")])
        texts = np.unique(batches, axis=1, return_inverse=True)[1].reshape(-1)
    return rows, texts


def _places(rows: Rows) -> Any:
    return np.stack([rows.column("step"), rows.column("batch_row"), rows.column("position")])


def token_labels(rows: Rows) -> tuple[str, ...]:
    """A label for each row: the token's text, or else its id, or else its position."""
    texts = rows.column("text") if rows._source.has_texts else [None] * len(rows)
    return labels(texts, rows.column("token_id").tolist(), rows.column("position").tolist())


def labels(
    texts: Iterable[str | None], ids: Sequence[int], positions: Iterable[int]
) -> tuple[str, ...]:
    """A label for each token: its text, or else its id, or else its position."""
    return tuple(
        text if text is not None else str(number) if number >= 0 else f"#{position}"
        for text, number, position in zip(texts, ids, positions, strict=True)
    )
