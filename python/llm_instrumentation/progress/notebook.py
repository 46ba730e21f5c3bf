"""Shows progress in a notebook: a line and a bar below the cell, replaced in place.

They are HTML in a display with an id, which IPython's kernel updates. JupyterLab, VS Code and Colab
show it without a widget package, and a saved notebook has its last state.
"""

from __future__ import annotations

import importlib
import time
from html import escape
from typing import Any

__all__ = ["NotebookLine", "NotebookProgress"]

_PATIENCE_S = 0.4  # shorter work shows nothing
_INTERVAL_S = 0.2  # between two updates


class NotebookLine:
    """A line below the cell that runs. Work that ends soon shows none.

    A thread may show it, too: it then stands below the cell that runs at that time.
    """

    def __init__(self) -> None:
        self._due = time.monotonic() + _PATIENCE_S
        self._handle: Any = None  # IPython's, once something is shown

    def show(self, text: str, bar: str = "") -> None:
        """Replaces the shown text, unless it was replaced just before.

        Args:
            text: plain text.
            bar: HTML to show before it.
        """
        now = time.monotonic()
        if now < self._due:
            return
        self._due = now + _INTERVAL_S
        if self._handle is None:
            display = importlib.import_module("IPython.display").display
            self._handle = display(_page(text, bar), raw=True, display_id=True)
        else:
            self._handle.update(_page(text, bar), raw=True)

    def close(self, text: str) -> None:
        """Replaces what is shown, if anything is, by a last text."""
        if self._handle is not None:
            self._handle.update(_page(text), raw=True)
            self._handle = None


class NotebookProgress:
    """A bar below the cell that runs; at the end, a line that says what was done in which time.

    Args:
        what: the work.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._line = NotebookLine()
        self._began = time.monotonic()
        self._done = ""

    def show(self, done: str, share: float | None, remark: str = "") -> None:
        """Shows how far the work is.

        Args:
            done: what is done, as text.
            share: the share of the work that is done, 0 to 1; None: it is unknown.
            remark: a text behind it.
        """
        passed = time.monotonic() - self._began
        left = f"{passed * (1 - share) / share:.0f} s left" if share else ""
        value = "" if share is None else f' value="{share:.3f}"'
        self._done = ", ".join(filter(None, (done, remark)))
        self._line.show(
            f"{self._what}: " + ", ".join(filter(None, (done, left, remark))),
            f'<progress aria-label="{escape(self._what)}"{value}></progress> ',
        )

    def close(self) -> None:
        """Leaves a line with what was done."""
        self._line.close(f"{self._what}: {self._done} in {time.monotonic() - self._began:.1f} s")


def _page(text: str, bar: str = "") -> dict[str, str]:
    return {"text/html": f"<div>{bar}{escape(text)}</div>", "text/plain": text}
