"""Templates of texts: which tokens the text of each field becomes."""

from __future__ import annotations

import string
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import InvalidArgumentError, UnsupportedError

__all__ = ["END", "Filled", "filled", "spans_of_pairs"]

#: The span of the last token of each text.
END = "end"


class Filled(NamedTuple):
    """A template with texts in its fields.

    Attributes:
        text: the whole text.
        ranges: the characters of each field, (begin, end); several if the field is there again.
    """

    text: str
    ranges: dict[str, list[tuple[int, int]]]


def filled(template: str, fields: Mapping[str, str], what: str) -> Filled:
    """Fills a template.

    Raises:
        InvalidArgumentError: the template has other fields than are given, or formats; a text is
            empty. The message begins with `what`.
    """
    text, ranges = "", dict[str, list[tuple[int, int]]]()
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
        # The space before a word is no part of it, though it may be of its token.
        begin = len(text) + len(value) - len(value.lstrip())
        text += value
        ranges.setdefault(name, []).append((begin, len(text)))
    if unknown := sorted(set(fields) - set(ranges)):
        raise InvalidArgumentError(f"{what}: the template {template!r} has no field {unknown[0]!r}")
    return Filled(text, ranges)


def spans_of_pairs(
    tokenizer: Any, clean: Sequence[Filled], corrupted: Sequence[Filled]
) -> dict[str, Tensor]:
    """The tokens of each field, and the last token as "end" if no field has it.

    Returns:
        booleans [examples, tokens] by name. Texts begin in column 0.

    Raises:
        InvalidArgumentError: a field stands in other columns of the corrupted text, or shares a
            token with another one; the message shows the tokens. The templates of the examples have
            different fields.
        UnsupportedError: the tokenizer does not tell the characters of tokens.
    """
    names = list(clean[0].ranges)
    found = []
    for number, pair in enumerate(zip(clean, corrupted, strict=True)):
        if set(pair[0].ranges) != set(names):
            raise InvalidArgumentError(
                f"example {number} has the fields {sorted(pair[0].ranges)}, example 0 has "
                f"{sorted(names)}: all templates need the same fields"
            )
        (own, tokens), (others, other_tokens) = (
            _columns(tokenizer, text, f"example {number}") for text in pair
        )
        for name in names:
            if own[name] != others[name]:
                raise InvalidArgumentError(
                    f"example {number}: {name!r} is {_shown(tokens, own[name])} in the clean text "
                    f"and {_shown(other_tokens, others[name])} in the corrupted one: choose texts "
                    "of as many tokens at the same places"
                )
        found.append((own, len(tokens) - 1))
    length = max(last for _, last in found) + 1
    masks = {name: torch.zeros(len(found), length, dtype=torch.bool) for name in names}
    end = torch.zeros(len(found), length, dtype=torch.bool)
    for number, (own, last) in enumerate(found):
        for name in names:
            masks[name][number, own[name]] = True
        end[number, last] = True
    in_fields = torch.stack(list(masks.values())).any(0) if masks else torch.zeros_like(end)
    if END not in masks and not (in_fields & end).any():
        masks[END] = end
    return masks


def _columns(tokenizer: Any, given: Filled, what: str) -> tuple[dict[str, list[int]], list[str]]:
    """The columns of each field in a text, and the tokens of the text."""
    if not getattr(tokenizer, "is_fast", False):
        raise UnsupportedError(
            f"{type(tokenizer).__name__} does not tell which characters a token has: use a fast "
            "tokenizer, or give spans as masks"
        )
    encoded = tokenizer(given.text, return_offsets_mapping=True)
    tokens = tokenizer.convert_ids_to_tokens(encoded["input_ids"])
    places = encoded["offset_mapping"]
    taken: dict[int, str] = {}
    columns: dict[str, list[int]] = {}
    for name, ranges in given.ranges.items():
        columns[name] = [
            column for column, (first, last) in enumerate(places)
            if any(first < end and begin < last for begin, end in ranges)
        ]  # fmt: skip
        for column in columns[name]:
            other = taken.setdefault(column, name)
            if other != name:
                raise InvalidArgumentError(
                    f"{what}: the token {tokens[column]!r} in {column} is of {other!r} and of "
                    f"{name!r}: divide the fields of {given.text!r}"
                )
        if not columns[name]:
            raise InvalidArgumentError(f"{what}: {name!r} has no token in {given.text!r}")
    return columns, tokens


def _shown(tokens: Sequence[str], columns: Sequence[int]) -> str:
    texts = ", ".join(f"{tokens[column]!r} at {column}" for column in columns)
    return f"[{texts}]"
