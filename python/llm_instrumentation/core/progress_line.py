"""A line of progress that leaves what others write alone.

``sys.stdout`` and ``sys.stderr`` stay as they are, and what a user prints, in whole lines or token
by token, comes out as it would without the line.
"""

from __future__ import annotations

import os
import threading
import time
from typing import TextIO

__all__ = ["BottomLine", "Lines"]

# The sequences are those of the VT100, which terminals have in common.
_SAVE, _RESTORE = "\x1b7", "\x1b8"  # where the cursor is
_INDEX, _UP = "\x1bD", "\x1b[A"  # a row down, scrolling at the end; a row up; the column stays
_ALL_ROWS, _CLEAR = "\x1b[r", "\x1b[2K"

_LEAST_ROWS = 4
_SECONDS = 10.0  # from one line of a file to the next

_taken = threading.Lock()  # a terminal has one last row


class BottomLine:
    """Shows a text in the last row of a terminal until :meth:`close`.

    The terminal keeps that row for it: the rows above scroll as a terminal of a row less.
    Package managers show progress in this way. Nothing is shown where ``TERM`` is dumb or absent,
    where there are fewer than four rows, while another line is shown, and after the terminal has
    gone.
    """

    def __init__(self, terminal: int) -> None:
        """``terminal`` is a file descriptor. Nothing is written yet."""
        self._terminal = terminal
        self._shows = os.environ.get("TERM", "dumb") != "dumb" and _taken.acquire(blocking=False)
        self._size = (0, 0)  # rows and columns when the last row was taken

    def show(self, text: str) -> None:
        """Puts a text in place of the last one; what is too long is cut off."""
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
        except OSError:  # the terminal has gone, and with it whoever would read this
            self._size = (0, 0)
            self.close()

    def close(self) -> None:
        """Gives the last row back. A second call does nothing."""
        if not self._shows:
            return
        self._shows = False
        try:
            self._leave()
        except OSError:
            pass  # as in show
        finally:
            _taken.release()

    def _take(self, rows: int, columns: int) -> None:
        # The cursor may be in the last row: a row down scrolls then, and one up is above it. To
        # set the rows that scroll moves the cursor, so it is saved.
        self._write(f"{_INDEX}{_UP}{_SAVE}\x1b[1;{rows - 1}r{_RESTORE}")
        self._size = (rows, columns)

    def _leave(self) -> None:
        rows, _ = self._size
        if rows:
            self._size = (0, 0)
            self._write(f"{_SAVE}{_ALL_ROWS}\x1b[{rows}H{_CLEAR}{_RESTORE}")

    def _write(self, text: str) -> None:
        """At once, so that no other's text comes between."""
        data = text.encode()
        while data:
            data = data[os.write(self._terminal, data) :]


class Lines:
    """Writes a line every ten seconds, where someone wants progress in a file or a notebook."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._due = time.monotonic()

    def show(self, text: str) -> None:
        """Writes a text, unless the last one was not long ago."""
        if time.monotonic() >= self._due:
            self._due = time.monotonic() + _SECONDS
            print(text, file=self._stream, flush=True)

    def close(self) -> None:
        """Does nothing: what is written stays."""
