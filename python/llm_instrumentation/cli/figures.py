"""The files of figures that options name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..errors import InvalidArgumentError

__all__ = ["check_figure", "save_plot"]


def check_figure(option: str, path: Path | None) -> None:
    """Refuses a path that cannot become a figure, before the work begins."""
    if path is None:
        return
    from .._pages.drawing import FORMATS

    if path.suffix.removeprefix(".") not in FORMATS:
        raise InvalidArgumentError(f"{option} {path}: the name ends in .{', .'.join(FORMATS)}")


def save_plot(plot: Any, path: Path) -> None:
    """Writes a figure of matplotlib to the file of --figure.

    Raises:
        InvalidArgumentError: matplotlib does not know the kind of file.
    """
    try:
        plot.savefig(path)
    except ValueError as error:
        raise InvalidArgumentError(f"--figure {path}: {error}") from error
