"""Parses the texts of options that several commands have."""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import InvalidArgumentError

__all__ = ["named_layers", "numbers", "renamed_layers", "selector", "units"]


def selector(option: str, text: str | None) -> slice | list[int] | None:
    """Parses the numbers of an option: "3", "0:10" or "1,5"."""
    if text is None:
        return None
    try:
        if ":" in text:
            return slice(*(int(part) if part else None for part in text.split(":")))
        return [int(part) for part in text.split(",")]
    except (TypeError, ValueError):
        raise InvalidArgumentError(
            f"{option} {text!r}: give a number, a half-open range as 0:10, or numbers as 1,5"
        ) from None


def numbers(option: str, text: str | None) -> list[int]:
    """The numbers of an option."""
    try:
        return [int(part) for part in text.split(",")] if text else []
    except ValueError:
        raise InvalidArgumentError(f"{option} {text!r}: give numbers as 0,1") from None


def named_layers(layers: Sequence[str] | None) -> list[str]:
    """The layers of --layer.

    Raises:
        InvalidArgumentError: there is none.
    """
    if not layers:
        raise InvalidArgumentError("--layer: name at least one; strap ls lists them")
    return list(layers)


def renamed_layers(given: Sequence[str] | None) -> dict[str, str]:
    """The layers of --map, by their names or patterns in the first capture.

    Raises:
        InvalidArgumentError: one has no equals sign.
    """
    return dict(map(_renamed, given or ()))


def _renamed(given: str) -> tuple[str, str]:
    pattern, equals, name = given.partition("=")
    if not equals:
        raise InvalidArgumentError(f"--map {given!r}: give it as 'model.layers.*=blocks.*'")
    return pattern, name


def units(given: Sequence[str] | None) -> list[tuple[str, int]]:
    """The layer and the number of each --unit.

    Raises:
        InvalidArgumentError: one is not LAYER:NUMBER.
    """
    return list(map(_unit, given or ()))


def _unit(given: str) -> tuple[str, int]:
    layer, colon, number = given.rpartition(":")
    if not colon or not number.isascii() or not number.isdecimal():
        raise InvalidArgumentError(
            f"--unit {given!r}: give it as LAYER:NUMBER, as model.layers.3.mlp.act_fn:7"
        )
    return layer, int(number)
