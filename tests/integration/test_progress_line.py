"""The progress line of a capture on a terminal, together with output of the user's program.

pyte emulates the terminal: it interprets the escape sequences, and its screen has the text that a
user would see.
"""

from __future__ import annotations

import fcntl
import os
import pty
import struct
import subprocess
import termios
import time
from collections.abc import Callable
from pathlib import Path

import prepared
import pyte
import pytest
from llm_instrumentation.progress.terminal import BottomLine

ROWS, COLUMNS = 12, 100

# This program writes tokens to one line, as a model does, until the test tells it to stop.
STREAMS = """
import os, sys, time, torch
from llm_instrumentation import InstrumentationConfig, capture_activations
path, stop, lines, options = sys.argv[1:]
config = InstrumentationConfig.fast_capture().with_progress(eval(options))
before = sys.stdout, sys.stderr
model = torch.nn.Linear(8, 8)
for number in range(int(lines)):
    print("line", number)
with capture_activations(model, path, config=config):
    assert (sys.stdout, sys.stderr) == before
    while not os.path.exists(stop):
        model(torch.zeros(1, 8))
        print("t", end="", flush=True)
        time.sleep(0.05)
print("|end")
"""


class Terminal:
    """A child process on a terminal, and the terminal's screen."""

    def __init__(
        self, tmp_path: Path, lines: int = 2, term: str = "xterm-256color", **streams
    ) -> None:
        self.written = ""
        self.screen = pyte.Screen(COLUMNS, ROWS)
        self._parser = pyte.ByteStream(self.screen)
        self._stop = tmp_path / "stop"
        self.master, slave = pty.openpty()
        self.resize(ROWS, COLUMNS)
        python = prepared.python(prepared.TORCH)
        self.child = subprocess.Popen(
            [python, "-c", STREAMS, tmp_path / "a.stream", self._stop, str(lines), "None"],
            **{"stdin": slave, "stdout": slave, "stderr": slave, **streams},
            env={**os.environ, "TERM": term},
        )  # fmt: skip
        os.close(slave)

    def resize(self, rows: int, columns: int) -> None:
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        self.screen.resize(rows, columns)

    def read(self) -> bool:
        """Shows the next output of the child. Returns False at the end of the output."""
        try:
            data = os.read(self.master, 1 << 16)
        except OSError:  # the child has closed the terminal
            return False
        self.written += data.decode()
        self._parser.feed(data)
        return bool(data)

    def until(self, seen: Callable[[], bool]) -> None:
        while not seen():
            assert self.read(), self.text()

    def end(self) -> int:
        self._stop.touch()
        while self.read():
            pass
        os.close(self.master)
        return self.child.wait(60)

    def text(self) -> list[str]:
        return [line.rstrip() for line in self.screen.display]

    def tokens(self, lines: int) -> str:
        """The text between the last of the first lines and the terminal's last row."""
        shown = self.text()[:-1]
        return "".join(shown[shown.index(f"line {lines - 1}") + 1 :])

    def scrolls_whole(self) -> bool:
        margins = self.screen.margins
        return margins is None or (margins.top, margins.bottom) == (0, self.screen.lines - 1)

    def has_progress(self) -> bool:
        return "packets" in self.text()[-1]


@pytest.mark.parametrize("lines", [2, 30])  # the cursor is above the last row, or in it
def test_tokens_are_written_above_the_line(tmp_path, lines):
    terminal = Terminal(tmp_path, lines)
    terminal.until(terminal.has_progress)
    first = terminal.text()[-1]
    terminal.until(lambda: terminal.has_progress() and terminal.text()[-1] != first)
    assert set(terminal.tokens(lines)) == {"t"}
    assert terminal.end() == 0
    assert not any("packets" in line for line in terminal.text())
    assert terminal.tokens(lines).strip("t") == "|end"
    assert terminal.scrolls_whole()


def test_output_to_a_file_is_what_was_printed(tmp_path):
    with open(tmp_path / "out", "w") as out:
        terminal = Terminal(tmp_path, stdout=out)
        terminal.until(terminal.has_progress)
        assert terminal.end() == 0
    assert (tmp_path / "out").read_text().replace("t", "") == "line 0\nline 1\n|end\n"
    assert not any(terminal.text())


def test_a_terminal_that_changes_its_size_keeps_the_line_in_its_last_row(tmp_path):
    terminal = Terminal(tmp_path)
    terminal.until(terminal.has_progress)
    terminal.resize(ROWS + 4, COLUMNS - 50)
    terminal.until(terminal.has_progress)
    assert len(terminal.text()) == ROWS + 4
    terminal.resize(3, COLUMNS)  # with so few rows the line is not shown
    assert terminal.end() == 0
    assert terminal.scrolls_whole()


def test_a_terminal_that_understands_no_sequences_gets_none(tmp_path):
    terminal = Terminal(tmp_path, term="dumb")
    time.sleep(1.5)  # three intervals of the monitor
    assert terminal.end() == 0
    assert "\x1b" not in terminal.written
    assert "packets" not in terminal.written


def test_a_terminal_that_goes_away_ends_no_capture(tmp_path):
    with open(tmp_path / "out", "w") as out:
        terminal = Terminal(tmp_path, stdout=out, stdin=subprocess.DEVNULL, start_new_session=True)
        terminal.until(terminal.has_progress)
        os.close(terminal.master)
        time.sleep(1.5)
        (tmp_path / "stop").touch()
        assert terminal.child.wait(60) == 0
    assert (tmp_path / "out").read_text().endswith("|end\n")


def test_one_of_two_captures_has_the_line():
    own, slave = pty.openpty()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TERM", "xterm")
        fcntl.ioctl(own, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
        first, second = BottomLine(slave), BottomLine(slave)
        second.show("second")
        first.show("first")
        second.close()
        first.show("first again")
        first.close()
        third = BottomLine(slave)
        third.show("third")
        third.close()
    shown = ""
    while "third" not in shown:  # output to a terminal may come in several pieces
        shown += os.read(own, 1 << 16).decode()
    assert "second" not in shown
    assert shown.index("first") < shown.index("first again") < shown.index("third")
    os.close(own)
    os.close(slave)


@pytest.mark.parametrize(("options", "wanted"), [("None", False), ("True", True)])
def test_progress_in_a_file_is_whole_lines_on_request(tmp_path, options, wanted):
    python = prepared.python(prepared.TORCH)
    with open(tmp_path / "err", "w+") as err:
        child = subprocess.Popen(
            [python, "-c", STREAMS, tmp_path / "a.stream", tmp_path / "stop", "1", options],
            stderr=err, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert child.stdout is not None
        child.stdout.readline()  # "line 0"
        while wanted and not (tmp_path / "err").stat().st_size:
            time.sleep(0.1)
        time.sleep(1.5)  # three intervals of the monitor
        (tmp_path / "stop").touch()
        child.communicate(timeout=60)
        assert child.returncode == 0
        err.seek(0)
        lines = err.read().splitlines()
    assert len(lines) == wanted  # the next line is due after ten seconds
    assert all("packets" in line for line in lines)
