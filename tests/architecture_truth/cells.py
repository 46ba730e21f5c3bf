"""What is found of one feature with one model type."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable
from typing import Literal, TypeAlias

__all__ = ["Cell", "Different", "Verdict", "judged", "not_applicable", "refused", "works", "worst"]

Verdict: TypeAlias = Literal["works", "refused", "not applicable", "wrong"]


@dataclasses.dataclass(frozen=True)
class Cell:
    """A cell of the table.

    Attributes:
        verdict: what was found.
        reason: the text of the error that refuses it, why it does not apply, or what differs.
    """

    verdict: Verdict
    reason: str = ""


works = Cell("works")


def refused(reason: str) -> Cell:
    return Cell("refused", _one_line(reason))


def not_applicable(reason: str) -> Cell:
    return Cell("not applicable", _one_line(reason))


class Different(Exception):
    """Something differs from what plain hooks, or arithmetic, give."""


def worst(cells: Iterable[Cell]) -> Cell:
    """The cell of a feature that was tried in several ways."""
    order = ("wrong", "refused", "works", "not applicable")
    return min(cells, key=lambda cell: order.index(cell.verdict))


def judged(check: Callable[[], Cell], alone: Callable[[], object] = lambda: None) -> Cell:
    """The cell of a check that may raise.

    Args:
        check: uses the package.
        alone: does the same with the model and without the package. If it fails too, transformers
            cannot do it.
    """
    try:
        return check()
    except Different as error:
        return Cell("wrong", _one_line(str(error)))
    except Exception as error:
        if type(error).__module__.startswith("llm_instrumentation."):
            return refused(str(error))
        try:
            alone()
        except Exception as of_model:
            return not_applicable(f"transformers: {type(of_model).__name__}: {of_model}")
        return Cell("wrong", _one_line(f"{type(error).__name__}: {error}"))


def _one_line(text: str) -> str:
    """The first 300 characters, without what differs from run to run."""
    text = re.sub(r"0x[0-9a-f]{6,}", "0x...", " ".join(text.split()))
    text = re.sub(r"/\S*/", "", text)
    return text if len(text) <= 300 else f"{text[:299]}…"
