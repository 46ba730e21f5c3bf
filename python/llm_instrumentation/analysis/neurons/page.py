"""Contexts, effects and histograms as HTML, for the report and for notebooks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from html import escape
from typing import TYPE_CHECKING

from ..._html import block
from ..._pages import page, small

if TYPE_CHECKING:
    from ..sae.logits import TokenEffect
    from ..token_rows.contexts import TokenContext
    from ._units import Unit
    from .scans import RelatedUnit, UnitPage

__all__ = ["contexts_list", "effects_line", "histogram_line", "notebook_html", "unit_parts"]

_EFFECTS = 8  # tokens that a feature or a unit raises or lowers
_STRONGEST = 40  # percent of the colour that the largest value gets
_SHOWN = 10  # contexts of a unit in a notebook


def unit_parts(found: UnitPage, note: str = "") -> Iterator[str]:
    """A unit with its histogram, effects on logits, related units, and contexts.

    Args:
        found: the unit.
        note: a sentence below its effects, as why they are unknown; "": none.
    """
    unit = found.unit
    yield (
        '<article class="feature">'
        f"<h3>{escape(unit.title)}</h3>"
        + page.paragraph(f"{unit.summary()}.")
        + _histogram(unit)
        + effects_line("promotes", unit.promoted)
        + effects_line("suppresses", unit.suppressed)
        + (page.paragraph(note) if note else "")
        + _related(found.related)
        + _headed("Highest", contexts_list(unit.contexts, unit.maximum))
        + _headed("Lowest", contexts_list(unit.lowest, unit.minimum))
        + "</article>"
    )


def _related(found: Sequence[RelatedUnit]) -> str:
    if not found:
        return ""
    listed = ", ".join(f"{one.unit} ({one.correlation:+.2f})" for one in found)
    return page.paragraph(f"Its values correlate with those of the units {listed}")


def notebook_html(found: Iterable[Unit]) -> str:
    """Units in the colours of a notebook."""

    def shaded(text: str, share: int) -> str:
        return f'<span style="background:rgba(213,94,0,{share / 100:g})">{text}</span>'

    def listed(what: str, contexts: Sequence[TokenContext], extreme: float) -> str:
        lines = "".join(
            f"<div>{one.value:.3g} &nbsp; {_tokens(one, extreme, shaded)}</div>"
            for one in contexts[:_SHOWN]
        )
        style = "font-family:monospace;white-space:pre-wrap;overflow-wrap:anywhere"
        return f'<div>{what}</div><div style="{style}">{lines}</div>' if lines else ""

    return "".join(
        block(
            unit.title,
            f"<div>{escape(unit.summary())}</div>",
            _histogram(unit),
            effects_line("promotes", unit.promoted),
            effects_line("suppresses", unit.suppressed),
            listed("highest", unit.contexts, unit.maximum),
            listed("lowest", unit.lowest, unit.minimum),
        )
        for unit in found
    )


def _headed(heading: str, inner: str) -> str:
    return f"<h4>{heading}</h4>{inner}" if inner else ""


def _histogram(unit: Unit) -> str:
    if not any(unit.histogram):
        return ""
    return histogram_line(
        unit.histogram, f"{unit.edges[0]:.3g}", f"{unit.edges[-1]:.3g}", "Histogram of its values"
    )


def histogram_line(counts: Sequence[int], begin: str, end: str, told: str) -> str:
    """A small histogram between its ends.

    Args:
        counts: of the bins.
        begin, end: the first and the last edge.
        told: what it shows, for readers who do not see it.
    """
    bars = small.bars(counts, f"{told} from {begin} to {end}", width=220, height=36)
    return f'<p class="bars">{escape(begin)} {bars} {escape(end)}</p>'


def effects_line(what: str, effects: Sequence[TokenEffect] | None) -> str:
    """The tokens that a feature or a unit promotes or suppresses."""
    if not effects:
        return ""
    listed = ", ".join(f"{effect} {effect.value:.2g}" for effect in effects[:_EFFECTS])
    return page.paragraph(f"It {what} {listed}")


def contexts_list(contexts: Sequence[TokenContext], extreme: float) -> str:
    """Contexts below each other. The nearer a value is to the extreme one, the stronger its colour.

    Args:
        contexts: the contexts.
        extreme: the largest value, or the smallest one.
    """

    def shaded(text: str, share: int) -> str:
        return f'<mark style="--share: {share}%">{text}</mark>'

    items = "".join(
        f"<li><b>{context.value:.3g}</b> <span>{_tokens(context, extreme, shaded)}</span></li>"
        for context in contexts
    )
    return f'<ol class="contexts">{items}</ol>' if items else ""


def _tokens(context: TokenContext, extreme: float, shaded: Callable[[str, int], str]) -> str:
    told = []
    for number, (word, value) in enumerate(zip(context.words(), context.values, strict=True)):
        text = escape(word)
        if number == context.peak:
            text = f"<u>{text}</u>"
        if extreme and value / extreme > 0:  # of the same sign; NaN is not
            text = shaded(text, round(_STRONGEST * min(1.0, value / extreme)))
        told.append(text)
    return "".join(told)
