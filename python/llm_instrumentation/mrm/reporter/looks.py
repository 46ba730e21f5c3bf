"""How region types, suitability and validity look in figures and on pages.

A region type has the same colour in all figures.
"""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING, Any

from ..._pages import page
from ..._pages.theme import COLORS, MUTED

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

__all__ = [
    "badge", "card", "color", "css_color", "line", "panel_label", "swatch", "table", "tone_of",
    "turned_table",
]  # fmt: skip

#: For each region type: its colour of the theme, and its line style.
_LOOKS: dict[str, tuple[str, Any]] = {
    "weight": ("blue", "-"),
    "kv_cache": ("vermillion", (0, (6, 1.5))),
    "activation": ("green", (0, (3, 1.2))),
    "runtime": ("purple", (0, (6, 1.5, 1, 1.5))),
    "unknown": ("gray", (0, (1, 1.2))),
}
_OTHER = ("ochre", "-")
_SUITABILITY = {"high_mrm": "good", "medium_mrm": "fair", "low_mrm": "plain"}
_VALIDITY = {"clean": "good", "marginal": "fair", "contaminated": "bad"}


def color(region_type: str) -> str:
    """The colour of a region type on a white page."""
    return COLORS[_look(region_type)[0]][0]


def line(region_type: str) -> Any:
    """The line style of a region type. It tells lines apart in print without colour."""
    return _look(region_type)[1]


def css_color(region_type: str) -> str:
    """The CSS variable of a region type's colour."""
    return f"var(--{_look(region_type)[0]})"


def _look(region_type: str) -> tuple[str, Any]:
    return _LOOKS.get(region_type, _OTHER)


def panel_label(axes: Axes, region_type: str, remark: str) -> None:
    """Writes the region type, in its colour, and a remark above the left corner of a panel."""
    name = axes.annotate(
        region_type, (0, 1), xycoords="axes fraction", xytext=(0, 3), textcoords="offset points",
        color=color(region_type), fontweight="bold", va="bottom",
    )  # fmt: skip
    axes.annotate(
        remark, (1, 0), xycoords=name, xytext=(7, 0), textcoords="offset points",
        color=MUTED, va="bottom",
    )  # fmt: skip


def swatch(region_type: str) -> str:
    """A square in the colour of a region type."""
    return f'<span class="swatch" style="--kind: {css_color(region_type)}"></span>'


def card(region_type: str, corner: str, sentence: str, why: str) -> str:
    """A box about one region type. ``corner`` is HTML that these modules made."""
    return (
        f'<article class="card" style="--kind: {css_color(region_type)}">'
        f"<header><h3>{escape(region_type)}</h3>{corner}</header>"
        f"{page.paragraph(sentence)}{page.paragraph(why, 'why') if why else ''}</article>"
    )


def tone_of(validity: str | None) -> str:
    """The tone of a validity: good, fair or bad; plain if it is unknown."""
    return _VALIDITY.get(validity or "", "plain")


def badge(word: str) -> str:
    """A class of suitability or validity in its colour."""
    return page.badge(word, {**_SUITABILITY, **_VALIDITY}.get(word, "plain"))


def table(rows: pd.DataFrame, columns: list[str] | None = None) -> str:
    """As `page.table`, with region types and classes in their colours."""
    return page.table(rows, columns, _CELLS)


def turned_table(rows: pd.DataFrame) -> str:
    """A table of a frame with one row per region type. The table has one column per region type."""
    heads = [_type_cell(name) for name in rows["region_type"]]
    return page.turned_table(rows.drop(columns="region_type"), heads, _CELLS)


def _type_cell(region_type: Any) -> str:
    return f"{swatch(str(region_type))}{escape(str(region_type))}"


def _class_cell(word: Any) -> str:
    return badge(str(word))


_CELLS: page.Cells = {
    "region_type": _type_cell, "suitability": _class_cell, "validity": _class_cell,
}  # fmt: skip
