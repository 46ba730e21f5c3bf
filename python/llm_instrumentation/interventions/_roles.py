"""Roles: spans of both texts of a pair, found by templates, or ranges of characters or tokens."""

from __future__ import annotations

import string
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from .._warn import warn
from ..errors import InvalidArgumentError, UnsupportedError

__all__ = [
    "Marked", "Range", "SpanError", "Unit", "check_roles", "filled", "marked", "span_masks",
    "tokens_of",
]  # fmt: skip

#: The span of the last token of each text.
END = "end"

Range: TypeAlias = "tuple[int, int | None]"
"""Begin and end, without the end. Negative numbers count from the end; None is the end."""
Unit: TypeAlias = Literal["characters", "tokens"]
"""What ranges count."""


class SpanError(InvalidArgumentError):
    """A span is missing in a text, or has other numbers of tokens in the two texts of a pair."""


class Marked(NamedTuple):
    """A text and the ranges of its spans.

    Attributes:
        text: the whole text.
        ranges: of each span; several if its tokens do not stand together.
        unit: what the ranges count.
    """

    text: str
    ranges: Mapping[str, Sequence[Range]]
    unit: Unit = "characters"


class _Located(NamedTuple):
    """The tokens of a text, and the columns of its spans."""

    columns: dict[str, list[int]]
    tokens: list[str]


def filled(template: str, fields: Mapping[str, str], what: str) -> Marked:
    """Fills a template. The spans are the characters of each field.

    Raises:
        InvalidArgumentError: the template has other fields than are given, or formats; a text is
            empty. The message begins with `what`.
    """
    text, ranges = "", dict[str, list[Range]]()
    try:
        parsed = list(string.Formatter().parse(template))
    except ValueError as error:
        raise InvalidArgumentError(f"{what}: {template!r} is no template: {error}") from error
    for literal, name, form, conversion in parsed:
        text += literal
        if name is None:
            continue
        if form or conversion or not name.isidentifier():
            raise InvalidArgumentError(
                f"{what}: {template!r} has the field {name!r}: give names alone, as {{subject}}"
            )
        value = fields.get(name)
        if not isinstance(value, str) or not value.strip():
            raise InvalidArgumentError(f"{what}: {name!r} is {value!r}: give a text for each field")
        ranges.setdefault(name, []).append((len(text), len(text) + len(value)))
        text += value
    if unknown := sorted(set(fields) - set(ranges)):
        raise InvalidArgumentError(f"{what}: the template {template!r} has no field {unknown[0]!r}")
    return Marked(text, ranges)


def marked(
    texts: Sequence[str], spans: Mapping[str, Sequence[Any]], unit: Unit, what: str
) -> list[Marked]:
    """The texts with the ranges that a caller gives for each of them.

    Raises:
        InvalidArgumentError: there is not a range for each text; the message begins with `what`.
    """
    for name, given in spans.items():
        if isinstance(given, str) or not isinstance(given, Sequence) or len(given) != len(texts):
            count = len(given) if isinstance(given, Sequence) else repr(given)
            raise InvalidArgumentError(
                f"{what}[{name!r}] has {count} for {len(texts)} texts: give a range for each, as "
                "(4, 8)"
            )
    return [
        Marked(
            text,
            {name: _ranges(given[n], f"{what}[{name!r}][{n}]") for name, given in spans.items()},
            unit,
        )
        for n, text in enumerate(texts)
    ]


def _ranges(given: Any, what: str) -> list[Range]:
    several = given if isinstance(given, list) else [given]
    for one in several:
        numbers = one if isinstance(one, tuple) and len(one) == 2 else (None, None)
        begin, end = numbers
        if not _whole(begin) or not (end is None or _whole(end)):
            raise InvalidArgumentError(
                f"{what} = {given!r}: give (begin, end), or a list of these; end may be None"
            )
    return several


def _whole(number: object) -> bool:
    return isinstance(number, int) and not isinstance(number, bool)


def span_masks(
    tokenizer: Any,
    clean: Sequence[Marked],
    corrupted: Sequence[Marked] | None,
    last_token: Collection[str] = (),
) -> tuple[dict[str, Tensor], dict[str, Tensor] | None]:
    """The tokens of each span, and the last token as "end" if no span has it.

    Args:
        tokenizer: of transformers.
        clean: the clean texts.
        corrupted: the corrupted ones; None: their spans are in the same columns.
        last_token: spans that are cut to their last token, in all texts.

    Returns:
        booleans [examples, tokens] by name, of the clean and of the corrupted texts. Texts begin in
        column 0. None: the tokens of both texts of each pair are in the
        same columns.

    Raises:
        SpanError: a span is missing, or has other numbers of tokens in the two texts of a pair; the
            message shows the tokens.
        InvalidArgumentError: a token is in two spans; a range is out of its text.
        UnsupportedError: the tokenizer does not tell the characters of tokens.
    """
    names = list(clean[0].ranges)
    if unknown := sorted(set(last_token) - {*names, END}):
        raise InvalidArgumentError(
            f"last_token has {unknown[0]!r}, and the spans are {', '.join(map(repr, names))}"
        )
    sides = [clean] if corrupted is None else [clean, corrupted]
    located: list[list[_Located]] = []
    for side in sides:
        located.append([])
        for number, one in enumerate(side):
            if set(one.ranges) != set(names):
                raise SpanError(
                    f"example {number} has the spans {sorted(one.ranges)}, example 0 has "
                    f"{sorted(names)}: all templates and texts need the same fields or spans"
                )
            found = _located(tokenizer, one, f"example {number}")
            for name in last_token:
                if name in found.columns:
                    found.columns[name] = found.columns[name][-1:]
            located[-1].append(found)
    if corrupted is not None:
        for number, (own, other) in enumerate(zip(*located, strict=True)):
            _check_pair(own, other, names, f"example {number}")
    every = [text for side in located for text in side]
    if END not in names and not any(
        len(text.tokens) - 1 in columns for text in every for columns in text.columns.values()
    ):
        for text in every:
            text.columns[END] = [len(text.tokens) - 1]
    length = max(len(text.tokens) for text in every)
    masks = [_masks(side, list(every[0].columns), length) for side in located]
    if len(masks) == 1:
        return masks[0], None
    lengths = [[len(one.tokens) for one in side] for side in located]
    same = all(torch.equal(masks[0][name], masks[1][name]) for name in masks[0])
    return masks[0], None if same and lengths[0] == lengths[1] else masks[1]


def _check_pair(own: _Located, other: _Located, names: Sequence[str], what: str) -> None:
    for name in names:
        if len(own.columns[name]) != len(other.columns[name]):
            raise SpanError(
                f"{what}: {name!r} is {_shown(own.tokens, own.columns[name])} in the clean text "
                f"and {_shown(other.tokens, other.columns[name])} in the corrupted one: choose "
                f"texts of as many tokens, or take its last token alone, with "
                f"last_token=[{name!r}]"
            )


def _masks(side: Sequence[_Located], names: Sequence[str], length: int) -> dict[str, Tensor]:
    masks = {name: torch.zeros(len(side), length, dtype=torch.bool) for name in names}
    for number, one in enumerate(side):
        for name in names:
            masks[name][number, one.columns[name]] = True
    return masks


def _located(tokenizer: Any, given: Marked, what: str) -> _Located:
    """The columns of each span in a text, and the tokens of the text."""
    places: Sequence[tuple[int, int]]
    if given.unit == "tokens":
        ids = tokenizer(given.text)["input_ids"]
        places = [(at, at + 1) for at in range(len(ids))]
        size = len(ids)
    else:
        ids, places = _with_places(tokenizer, given.text)
        size = len(given.text)
    tokens = [str(one) for one in tokenizer.convert_ids_to_tokens(ids)]
    taken: dict[int, str] = {}
    columns: dict[str, list[int]] = {}
    for name, ranges in given.ranges.items():
        exact = [_bounds(one, size, given, f"{what}: {name!r}") for one in ranges]
        columns[name] = [
            column for column, (first, last) in enumerate(places)
            if any(first < end and begin < last for begin, end in exact)
        ]  # fmt: skip
        for column in columns[name]:
            other = taken.setdefault(column, name)
            if other != name:
                raise InvalidArgumentError(
                    f"{what}: the token {tokens[column]!r} in {column} is of {other!r} and of "
                    f"{name!r}: divide the spans of {given.text!r}"
                )
        if not columns[name]:
            raise SpanError(f"{what}: {name!r} has no token in {given.text!r}: {tokens}")
    return _Located(columns, tokens)


def _bounds(given: Range, size: int, of: Marked, what: str) -> tuple[int, int]:
    """The begin and the end of a range, from 0. White space around characters does not count."""
    begin, end = given
    begin = begin + size if begin < 0 else begin
    end = size if end is None else end + size if end < 0 else end
    if not 0 <= begin < end <= size:
        raise SpanError(
            f"{what} is {given}, and {of.text!r} has {size} {of.unit}: give a begin and a later end"
        )
    if of.unit == "tokens":
        return begin, end
    text = of.text[begin:end]
    begin += len(text) - len(text.lstrip())
    return begin, max(begin, end - (len(text) - len(text.rstrip())))


def _with_places(tokenizer: Any, text: str) -> tuple[list[int], list[tuple[int, int]]]:
    """The token ids of a text, and the characters of each.

    Raises:
        UnsupportedError: the tokenizer does not tell them.
    """
    if not getattr(tokenizer, "is_fast", False):
        raise UnsupportedError(
            f"{type(tokenizer).__name__} does not tell which characters a token has: use a fast "
            "tokenizer, or give spans as ranges of tokens or as masks"
        )
    encoded = tokenizer(text, return_offsets_mapping=True)
    return list(encoded["input_ids"]), list(encoded["offset_mapping"])


def tokens_of(tokenizer: Any, text: str) -> list[str]:
    """The tokens of a text as texts, without special ones."""
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    return [str(one) for one in tokenizer.convert_ids_to_tokens(ids)]


def warn_of_end(tokenizer: Any, text: str) -> None:
    """Warns if a tokenizer puts a special token behind texts, as [SEP] of BERT or </s> of T5.

    Metrics read the last token of a text, and the model predicts an answer behind the text itself.
    """
    ids = tokenizer(text)["input_ids"]
    plain = tokenizer(text, add_special_tokens=False)["input_ids"]
    special = getattr(tokenizer, "all_special_ids", ())
    if not ids or ids[-1] not in special or (plain and plain[-1] == ids[-1]):
        return
    end = tokenizer.convert_ids_to_tokens([ids[-1]])[0]
    warn(
        f"{type(tokenizer).__name__} puts {end!r} behind each text, and metrics read the answer at "
        f"the last token, which it is: take a tokenizer without it, as with add_eos_token=False, "
        "or give the metric a position"
    )


def _shown(tokens: Sequence[str], columns: Sequence[int]) -> str:
    texts = ", ".join(f"{tokens[column]!r} at {column}" for column in columns)
    return f"[{texts}]"


def check_roles(
    spans: Mapping[str, Tensor], corrupted: Mapping[str, Tensor], real: Sequence[Tensor]
) -> None:
    """Refuses spans of pairs that have no counterpart in the other text.

    Args:
        spans: of the clean texts, booleans [examples, tokens] by name.
        corrupted: of the corrupted ones.
        real: which tokens are no padding, of the clean and of the corrupted texts.

    Raises:
        SpanError: a span is missing in a text, or has padding, or other numbers of tokens in a
            pair.
        InvalidArgumentError: spans are no masks, or share a token.
    """
    if spans.keys() != corrupted.keys() or not spans:
        raise SpanError(
            f"spans are {sorted(spans)}, corrupted_spans are {sorted(corrupted)}: give the same "
            "ones"
        )
    for what, side, there in zip(("clean", "corrupted"), (spans, corrupted), real, strict=True):
        taken = torch.zeros_like(there)
        for name, mask in side.items():
            if mask.dtype != torch.bool or mask.shape != there.shape:
                raise InvalidArgumentError(
                    f"the span {name!r} of the {what} texts is {mask.dtype} {list(mask.shape)}: "
                    f"give booleans {list(there.shape)}"
                )
            mask = mask.to(there.device)
            for wrong, why in (
                (mask & ~there, "has padding"), (mask & taken, "shares a token with another span"),
            ):  # fmt: skip
                if wrong.any():
                    example, column = wrong.nonzero()[0].tolist()
                    raise InvalidArgumentError(
                        f"example {example}: {name!r} of the {what} text {why}, in column {column}"
                    )
            taken |= mask
            if not (some := mask.any(1)).all():
                raise SpanError(
                    f"example {int((~some).nonzero()[0])}: the {what} text has no token of {name!r}"
                )
    for name, mask in spans.items():
        counts = mask.sum(1), corrupted[name].to(mask.device).sum(1)
        if (differs := counts[0] != counts[1]).any():
            example = int(differs.nonzero()[0])
            raise SpanError(
                f"example {example}: {name!r} has {int(counts[0][example])} tokens in the clean "
                f"text, in columns {mask[example].nonzero()[:, 0].tolist()}, and "
                f"{int(counts[1][example])} in the corrupted one, in columns "
                f"{corrupted[name][example].nonzero()[:, 0].tolist()}: choose as many in both"
            )
