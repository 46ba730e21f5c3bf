"""Templates of texts: where the text of each field stands."""

from __future__ import annotations

import string
from collections.abc import Mapping

from ..errors import InvalidArgumentError
from ._roles import Marked, Range

__all__ = ["filled"]


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
