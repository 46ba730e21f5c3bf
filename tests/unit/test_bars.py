"""The progress line on a terminal."""

from __future__ import annotations

import io
import sys

from llm_instrumentation._native.trace import Counts
from llm_instrumentation.progress import bars


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_name_of_a_file_is_shown_as_it_is(monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(bars, "_PATIENCE_S", -1.0)
    monkeypatch.setenv("COLUMNS", "100")
    with bars.rows_bar("parsing runs:x:[red]smile:smile:.txt") as show:
        show(Counts(False, 1234, 0, 0, 0, 0, 0, 0))
    assert "parsing runs:x:[red]smile:smile:.txt" in terminal.getvalue()
    assert "1,234 rows" in terminal.getvalue()


def test_without_a_terminal_there_is_no_line(monkeypatch):
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    with bars.rows_bar("parsing") as show:
        assert show is None
