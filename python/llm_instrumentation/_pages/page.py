"""Makes the HTML page of a report. It needs no other file, and also prints well.

All text from outside this module is escaped, and the page's policy forbids scripts and foreign
resources. So a name in a trace cannot act as HTML.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from importlib import resources
from typing import Any
from urllib.parse import quote

from .._extras import extra

with extra("report", "A report"):
    import pandas as pd

from . import units
from .theme import css_root

__all__ = [
    "Cells",
    "Markup",
    "badge",
    "chip",
    "code_block",
    "contents",
    "definitions",
    "details",
    "figure",
    "formatter",
    "listing",
    "notice",
    "page",
    "paragraph",
    "section",
    "side_by_side",
    "table",
    "turned_table",
]

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"

_PIXELS_PER_IN = 92  # of figures that are shown at their size
_MARKS = {"good": "✓", "fair": "!", "bad": "✕", "plain": ""}


class Markup(str):
    """HTML that the functions of these modules made. It is not escaped again."""


def page(title: str, body: str, *, generator: str = "") -> str:
    """The whole HTML document.

    Args:
        title: plain text.
        body: HTML that the functions of this module made.
        generator: names the program, so that it knows its own pages; "" leaves it out.
    """
    made_by = f'<meta name="generator" content="{escape(generator)}">\n' if generator else ""
    css = css_root() + _style()
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f"{made_by}"
        f'<meta http-equiv="Content-Security-Policy" content="{escape(_POLICY)}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>\n{css}</style>\n</head>\n"
        f"<body>\n<main>\n{body}\n</main>\n</body>\n</html>\n"
    )


@functools.cache
def _style() -> str:
    return resources.files(__package__).joinpath("page.css").read_text(encoding="utf-8")


# ---- parts: the arguments are plain text, the results are escaped HTML -------------------


def section(title: str, *parts: str, anchor: str = "", level: int = 2) -> str:
    """A heading with parts below it; "" if all parts are empty. Links lead to its anchor."""
    inner = "\n".join(part for part in parts if part)
    name = f' id="{escape(anchor)}"' if anchor else ""
    heading = f"<h{level}{name}>{escape(title)}</h{level}>"
    return f"<section>\n{heading}\n{inner}\n</section>" if inner else ""


def contents(sections: Iterable[tuple[str, str]]) -> str:
    """Links to the sections of the page, each a heading and its anchor."""
    links = "".join(
        f'<li><a href="#{escape(anchor)}">{escape(heading)}</a></li>'
        for heading, anchor in sections
    )
    return f'<nav aria-label="Contents"><ul>{links}</ul></nav>'


#: The space between a number and its unit. paragraph makes it narrow and unbreakable.
_UNIT = re.compile(r"(?<=\d) (?=(?:[nµm]?s|min|h|[KMGTP]?i?B)\b|%)")
_NARROW = "\u202f"


def paragraph(text: str, css_class: str = "") -> str:
    attribute = f' class="{css_class}"' if css_class else ""
    return f"<p{attribute}>{_UNIT.sub(_NARROW, escape(text))}</p>"


def chip(label: str, value: str, tone: str = "plain") -> str:
    """A small fact in the head of a report."""
    mark = f"{_MARKS[tone]} " if _MARKS[tone] else ""
    style = ' style="color: var(--tone)"' if tone != "plain" else ""
    return (
        f'<span class="chip {tone}"><i>{escape(label)}</i>'
        f"<b{style}>{mark}{escape(value)}</b></span>"
    )


def badge(word: str, tone: str) -> str:
    """A word in the colour of its tone: good, fair, bad or plain."""
    mark = f"{_MARKS[tone]} " if _MARKS[tone] else ""
    return f'<span class="badge {tone}">{mark}{escape(word)}</span>'


def notice(tone: str, *lines: str) -> str:
    """Highlighted paragraphs. ``tone`` is good, fair, bad or plain."""
    return f'<div class="notice {tone}">{"".join(paragraph(line) for line in lines)}</div>'


def figure(svg: str, caption: str = "", *, width_in: float | None = None) -> str:
    """A figure with a caption.

    Args:
        svg: of `drawing.inline_svg`.
        caption: plain text.
        width_in: the width of a figure of many cells, in inches. It is shown at this size, and
            scrolls where a screen is narrower. None: it is as wide as the page.
    """
    below = f"<figcaption>{escape(caption)}</figcaption>" if caption else ""
    if width_in is None:
        return f"<figure>{svg}{below}</figure>"
    style = f"width: {round(width_in * _PIXELS_PER_IN)}px"
    return (
        f'<figure class="sized"><div class="across" tabindex="0"><div style="{style}">{svg}</div>'
        f"</div>{below}</figure>"
    )


def side_by_side(figures: Sequence[str]) -> str:
    """Figures of a given width, as many in a row as have room."""
    return f'<div class="row">{"".join(figures)}</div>' if figures else ""


def code_block(text: str) -> str:
    return f"<pre>{escape(text)}</pre>"


def details(summary: str, *parts: str) -> str:
    inner = "\n".join(part for part in parts if part)
    return f"<details><summary>{escape(summary)}</summary>\n{inner}\n</details>" if inner else ""


def definitions(pairs: Iterable[tuple[str, Any]]) -> str:
    """A list of names and values. Names without a value are left out."""
    rows = [
        f"<dt>{escape(name)}</dt><dd>{escape(_plain(value))}</dd>"
        for name, value in pairs
        if value not in (None, "", [], {})
    ]
    return f"<dl>{''.join(rows)}</dl>" if rows else ""


def _plain(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:.4g}"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, (list, tuple)):
        return ", ".join(map(_plain, value))
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_plain(item)}" for key, item in value.items())
    return str(value)


#: For some columns, the function that writes their cells as HTML.
Cells = Mapping[str, Callable[[Any], str]]


def table(
    rows: pd.DataFrame, columns: Sequence[str] | None = None, cells: Cells | None = None
) -> str:
    """A table of a frame. Numbers get the units that the column's name implies; see formatter.

    A cell may be a tuple of a text and the relative path that it links to; None is no link.

    Args:
        rows: the frame.
        columns: the columns to show; None: all.
        cells: writes the cells of some columns, but for missing values.
    """
    written = cells or {}
    names = list(rows.columns if columns is None else columns)
    if rows.empty:
        return ""
    css = {
        name: ' class="t"' if name in written
        else ' class="n"' if pd.api.types.is_numeric_dtype(rows[name])
        else ""
        for name in names
    }  # fmt: skip
    head = "".join(f"<th{css[name]}>{_breakable(str(name))}</th>" for name in names)
    body = []
    for row in rows[names].itertuples(index=False, name=None):
        told = [
            f"<td{css[name]}>{_cell(str(name), value, written)}</td>"
            for name, value in zip(names, row, strict=True)
        ]
        body.append(f"<tr>{''.join(told)}</tr>")
    return (
        f'<div class="scroll" tabindex="0"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(body)}</tbody></table></div>"
    )


def listing(heads: Sequence[str], rows: Iterable[Sequence[str]], *, texts: int = 1) -> str:
    """A table of cells that are already texts. Its first column has the names of the rows.

    Args:
        heads: the heads of the columns.
        rows: their cells: plain texts, which are escaped, or behind the first one `Markup`.
        texts: so many columns from the left are texts; the others are numbers, aligned right.
    """
    css = ["" if k < texts else ' class="n"' for k in range(len(heads))]
    top = "".join(
        f'<th scope="col"{one}>{escape(head)}</th>' for one, head in zip(css, heads, strict=True)
    )
    body = []
    for row in rows:
        name = _breakable(row[0])
        cells = [cell if isinstance(cell, Markup) else escape(cell) for cell in row[1:]]
        told = "".join(f"<td{one}>{cell}</td>" for one, cell in zip(css[1:], cells, strict=True))
        body.append(f'<tr><th scope="row">{name}</th>{told}</tr>')
    if not body:
        return ""
    return (
        f'<div class="scroll" tabindex="0"><table class="listing"><thead><tr>{top}</tr></thead>'
        f"<tbody>{''.join(body)}</tbody></table></div>"
    )


def _breakable(name: str) -> str:
    """A name that may be broken after each dot and underscore."""
    return escape(name).replace("_", "_<wbr>").replace(".", ".<wbr>")


def turned_table(rows: pd.DataFrame, heads: Sequence[str], cells: Cells | None = None) -> str:
    """A table of a frame with its rows as columns.

    Args:
        rows: the frame.
        heads: the head of each row as HTML.
        cells: see `table`.
    """
    if rows.empty:
        return ""
    written = cells or {}
    head = "".join(f'<th class="n">{one}</th>' for one in heads)
    body = []
    for name in rows.columns:
        told = "".join(
            f'<td class="n">{_cell(str(name), value, written)}</td>' for value in rows[name]
        )
        body.append(f"<tr><td>{_breakable(str(name))}</td>{told}</tr>")
    return (
        '<div class="scroll" tabindex="0"><table class="turned"><thead><tr><th></th>'
        f"{head}</tr></thead><tbody>{''.join(body)}</tbody></table></div>"
    )


def _cell(column: str, value: Any, written: Cells) -> str:
    if _missing(value):
        return units.UNKNOWN
    if column in written:
        return written[column](value)
    if isinstance(value, str):
        return escape(value)
    if isinstance(value, tuple):
        return _link(*value)
    return escape(formatter(column)(float(value)))


def _link(text: str, target: str | None) -> str:
    """A text, as a link if there is a target: a file beside the page."""
    if target is None:
        return escape(text)
    return f'<a href="{escape(quote(target))}">{escape(text)}</a>'


def formatter(column: str) -> Callable[[float], str]:
    """The function that writes the numbers of a column; it depends on the column's name."""
    return next((told for fits, told in _FORMATS if fits(column)), _number)


def _number(value: float) -> str:
    return units.count(value) if value.is_integer() else f"{value:,.4g}"


def _missing(value: Any) -> bool:
    return value is None or value is pd.NA or (isinstance(value, float) and math.isnan(value))


def _part_of(*words: str) -> Callable[[str], bool]:
    return lambda column: any(word in column for word in words)


#: (whether it fits a column's name, writes a number). The first that fits counts.
_FORMATS: tuple[tuple[Callable[[str], bool], Callable[[float], str]], ...] = (
    (_part_of("region_id", "_index"), lambda value: f"{value:.0f}"),
    (_part_of("_ns"), lambda value: units.seconds(value / 1e9)),
    (_part_of("_bytes"), units.size),
    (_part_of("_mb_"), lambda value: units.size(value * 2**20)),
    (_part_of("_ratio", "fraction"), units.ratio),
    (lambda column: column.endswith("_s") or "_s_" in column, units.seconds),
)
