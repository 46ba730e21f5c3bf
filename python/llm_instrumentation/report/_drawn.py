"""Draws a figure of the analysis as SVG within the page."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .._pages import drawing, page

__all__ = ["drawn"]


def drawn(
    name: str, told: str, size: tuple[float, float], draw: Callable[[Any], None], caption: str = ""
) -> str:
    """A figure element.

    Args:
        name: unique in the page; letters, digits and hyphens.
        told: text for readers who do not see the figure.
        size: width and height in inches.
        draw: draws on the axes that it gets.
        caption: a text below the figure.
    """
    with drawing.figure(size) as figure:
        draw(figure.add_subplot())
        return page.figure(drawing.inline_svg(figure, name, told), caption, width_in=size[0])
