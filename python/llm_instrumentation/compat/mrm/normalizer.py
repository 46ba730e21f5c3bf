"""Completes rows: dicts with every column of a trace."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from ...errors import InvalidArgumentError
from ...mrm.schema import ALL_COLUMNS, PAGE_BYTES, REQUIRED_COLUMNS

__all__ = ["ALL_COLUMNS", "REQUIRED_COLUMNS", "normalise_rows"]

_DEFAULTS: dict[str, Any] = dict.fromkeys(ALL_COLUMNS) | {
    "symbol": "",
    "dso": "",
    "region_type": "unknown",
    "region_id": 0,
}


def normalise_rows(rows: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The rows with exactly the columns of a trace, in their documented order.

    A missing value gets its default. An ``address_page`` of 0 or None is computed from the address.

    Raises:
        InvalidArgumentError: a row lacks a required column, or its address is no integer; the
            message names row and column.
    """
    for number, row in enumerate(rows):
        missing = sorted(REQUIRED_COLUMNS - row.keys())
        if missing:
            raise InvalidArgumentError(
                f"row {number} lacks the required columns {', '.join(missing)}; it has "
                f"{', '.join(map(str, row)) or 'none'}"
            )
        whole = _DEFAULTS | row
        if not whole["address_page"] and whole["address"]:
            try:
                whole["address_page"] = whole["address"] // PAGE_BYTES
            except TypeError as error:
                raise InvalidArgumentError(
                    f"row {number}: address = {whole['address']!r}: must be an integer"
                ) from error
        yield {column: whole[column] for column in ALL_COLUMNS}
