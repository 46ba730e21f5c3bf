"""Small pieces of HTML that a notebook shows. They take its colours, so they fit light and dark."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

__all__ = ["block", "table"]


def block(title: str, *parts: str) -> str:
    """A title, which is plain text, and pieces of HTML below it."""
    return f"<div><div><b>{escape(title)}</b></div>{''.join(parts)}</div>"


def table(heads: Sequence[str], rows: Iterable[Sequence[str]], note: str = "") -> str:
    """A table of plain texts, and a line of plain text below it. The first column is to the left.

    It is as wide as its cells, and a notebook may scroll it.
    """
    sides = ["left", *["right"] * (len(heads) - 1)]

    def cells(tag: str, texts: Sequence[str]) -> str:
        return "".join(
            f'<{tag} style="text-align:{side}">{escape(text)}</{tag}>'
            for side, text in zip(sides, texts, strict=True)
        )

    top = cells("th", heads)
    body = "".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    below = f"<div>{escape(note)}</div>" if note else ""
    return (
        f'<div style="overflow-x:auto"><table><thead><tr>{top}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>{below}"
    )
