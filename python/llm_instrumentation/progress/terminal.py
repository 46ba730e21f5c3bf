"""Shows progress without disturbing other output.

``sys.stdout`` and ``sys.stderr`` are not replaced. Text that the user prints, in whole lines or
token by token, appears as it would without the progress line.
"""

from __future__ import annotations

import os
import threading
import time
from typing import TextIO

__all__ = ["BottomLine", "Lines"]

# Escape sequences of the VT100, which all common terminals understand.
_SAVE, _RESTORE = "\x1b7", "\x1b8"  # the position of the cursor
# The cursor moves down a row (in the last row the terminal scrolls), and up a row. The column
# stays.
_INDEX, _UP = "\x1bD", "\x1b[A"
_ALL_ROWS, _CLEAR = "\x1b[r", "\x1b[2K"  # scroll all rows; clear the cursor's row

_LEAST_ROWS = 4
_SECONDS = 10.0  # between two lines in a file

_taken = threading.Lock()  # held while a line uses the last row of the terminal


class BottomLine:
    """Shows a text in the last row of a terminal until :meth:`close`.

    The terminal reserves the last row and scrolls only the rows above it, as package managers do
    for their progress. Nothing is shown if ``TERM`` is dumb or absent, if there are fewer than four
    rows, while another line is shown, and after the terminal has gone.
    """

    def __init__(self, terminal: int) -> None:
        """
        Args:
            terminal: a file descriptor. The constructor writes nothing to it.
        """
        self._terminal = terminal
        self._shows = os.environ.get("TERM", "dumb") != "dumb" and _taken.acquire(blocking=False)
        self._size = (0, 0)  # rows and columns when the last row was reserved; (0, 0): it is not

    def show(self, text: str) -> None:
        """Replaces the shown text. A text that is too long is cut."""
        if not self._shows:
            return
        try:
            columns, rows = os.get_terminal_size(self._terminal)
            if self._size != (rows, columns):
                self._leave()
                if rows < _LEAST_ROWS:
                    return
                self._take(rows, columns)
            self._write(f"{_SAVE}\x1b[{rows}H{_CLEAR}{text[: columns - 1]}{_RESTORE}")
        except OSError:  # the terminal has gone
            self._size = (0, 0)
            self.close()

    def close(self) -> None:
        """Clears the last row and frees it. A second call does nothing."""
        if not self._shows:
            return
        self._shows = False
        try:
            self._leave()
        except OSError:
            pass  # the terminal has gone
        finally:
            _taken.release()

    def _take(self, rows: int, columns: int) -> None:
        # If the cursor is in the last row, _INDEX scrolls and _UP puts the cursor above that row.
        # Setting the rows that scroll moves the cursor, so its position is saved and restored.
        self._write(f"{_INDEX}{_UP}{_SAVE}\x1b[1;{rows - 1}r{_RESTORE}")
        self._size = (rows, columns)

    def _leave(self) -> None:
        rows, _ = self._size
        if rows:
            self._size = (0, 0)
            self._write(f"{_SAVE}{_ALL_ROWS}\x1b[{rows}H{_CLEAR}{_RESTORE}")

    def _write(self, text: str) -> None:
        """Writes a text with one system call if possible, so that no other output comes between."""
        data = text.encode()
        while data:
            data = data[os.write(self._terminal, data) :]


class Lines:
    """Writes a line every ten seconds, for files."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._due = time.monotonic()

    def show(self, text: str) -> None:
        """Writes a text, if the last one was at least ten seconds ago."""
        if time.monotonic() >= self._due:
            self._due = time.monotonic() + _SECONDS
            print(text, file=self._stream, flush=True)

    def close(self) -> None:
        """Does nothing: the written lines stay."""
