"""Writes results to the standard output, and errors and warnings to the standard error.

Colours appear on terminals only. A line is never cut or broken, so that output can be
searched and copied.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape

from .._json import to_json

__all__ = [
    "UNKNOWN", "counted", "dimensions", "err", "error", "facts", "or_unknown", "out", "print_json",
    "shown", "table", "warning",
]  # fmt: skip

UNKNOWN = "-"

out = Console(soft_wrap=True, highlight=False, emoji=False)
err = Console(stderr=True, soft_wrap=True, highlight=False, emoji=False)


def error(message: str) -> None:
    """Prints in one line why a command failed."""
    _say(f"[red]error:[/red] {escape(_one_line(message))}")


def warning(message: str) -> None:
    """Prints a warning in one line."""
    _say(f"[yellow]warning:[/yellow] {escape(_one_line(message))}")


def print_json(value: Any) -> None:
    """Writes one JSON object; `to_json` describes the values that it takes."""
    sys.stdout.write(to_json(value))


def shown(name: str) -> str:
    """A name from a file, safe for a terminal: in quotes if it is empty or not printable."""
    return name if name and name.isprintable() else repr(name)


def counted(number: int, what: str) -> str:
    """A number of things: ``1 run``, ``3 runs``."""
    return f"{number} {what}{'' if number == 1 else 's'}"


def or_unknown(number: int | None) -> str:
    return UNKNOWN if number is None else str(number)


def dimensions(shape: Sequence[int | None] | None) -> str:
    """A shape as ``2x*x768``, with a star for sizes that differ."""
    if shape is None:
        return UNKNOWN
    return "x".join("*" if size is None else str(size) for size in shape) or "scalar"


def facts(found: Mapping[str, str]) -> None:
    """Writes one line for each fact: its name, then its value."""
    width = max(map(len, found))
    for name, value in found.items():
        out.print(f"[bold]{name:<{width}}[/bold]  {escape(value)}")


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Writes a table. The last column is aligned left, all others right.

    Args:
        heads: the heads of the columns.
        rows: iterated twice: for the widths, then for the lines. Only one row is kept in memory at
            a time.
    """
    widths = [len(head) for head in heads]
    for row in rows:
        widths = [max(width, len(cell)) for width, cell in zip(widths, row, strict=True)]

    def line(cells: Sequence[str]) -> str:
        *numbers, last = cells
        padded = [cell.rjust(width) for cell, width in zip(numbers, widths, strict=False)]
        return "  ".join([*padded, last])

    out.print(line(heads), style="bold", markup=False)
    for row in rows:
        sys.stdout.write(line(row) + "\n")


def _say(line: str) -> None:
    sys.stdout.flush()  # keeps the order of lines if both go to one file
    err.print(line)


def _one_line(message: str) -> str:
    return " ".join(message.split())
