"""The values of a query, checked. Each error names the value and what it may be."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from ..errors import InvalidArgumentError

__all__ = ["Query"]

_INTEGER = re.compile(r"[0-9]{1,15}")
_MOST_TEXT = 1000  # characters of a text


class Query:
    """The parameters of a request.

    Args:
        given: the parameters by name.
    """

    def __init__(self, given: Mapping[str, str]) -> None:
        self._given = given

    def integer(self, name: str, default: int | None = None, *, low: int = 0, high: int) -> int:
        """An integer from `low` to `high`. Without a default it must be given.

        Raises:
            InvalidArgumentError: it is missing, no integer, or out of its range.
        """
        given = self._given.get(name)
        if given is None and default is not None:
            return default
        if given is None or not _INTEGER.fullmatch(given) or not low <= int(given) <= high:
            said = "is missing" if given is None else f"= {given[:40]!r}"
            raise InvalidArgumentError(f"{name} {said}: give an integer from {low} to {high}")
        return int(given)

    def optional(self, name: str, *, high: int) -> int | None:
        """An integer from 0 to `high`, or None if it is not given.

        Raises:
            InvalidArgumentError: it is no integer, or out of its range.
        """
        return self.integer(name, high=high) if self._given.get(name) else None

    def integers(self, name: str, *, high: int) -> tuple[int, ...]:
        """Integers from 0 to `high` with commas between; none if it is not given.

        Raises:
            InvalidArgumentError: it is something else.
        """
        given = self.text(name).replace(" ", "")
        parts = given.split(",") if given else []
        if not all(_INTEGER.fullmatch(part) and int(part) <= high for part in parts):
            raise InvalidArgumentError(f"{name} = {given[:40]!r}: give integers, as 7 or 7,11")
        return tuple(sorted({int(part) for part in parts}))

    def text(self, name: str) -> str:
        """A text; "" if it is not given.

        Raises:
            InvalidArgumentError: it is too long.
        """
        given = self._given.get(name, "")
        if len(given) > _MOST_TEXT:
            raise InvalidArgumentError(
                f"{name} has {len(given)} characters: give at most {_MOST_TEXT}"
            )
        return given

    def choice(self, name: str, choices: Sequence[str]) -> str:
        """One of `choices`; the first if it is not given.

        Raises:
            InvalidArgumentError: it is another text.
        """
        given = self._given.get(name, choices[0])
        if given not in choices:
            raise InvalidArgumentError(
                f"{name} = {given[:40]!r}: choose one of {', '.join(choices)}"
            )
        return given
