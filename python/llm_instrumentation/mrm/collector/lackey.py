"""Records every access of a tiny program with Valgrind's lackey."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import select
import shutil
import signal
import subprocess
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

import pyarrow as pa

from ...errors import InvalidArgumentError, InvalidStateError
from ..parser.text import parse_lackey
from ..schema import Kind
from .base import BaseCollector, CollectorMeta, CollectorUnavailableError, Mode, PhaseBoundaries
from .rows import reader_of_text

__all__ = ["Lackey"]

_log = logging.getLogger(__name__)

_CHUNK = 1 << 20
_WAIT_MS = 100
_INSTALL = "valgrind is not installed: apt-get install valgrind or dnf install valgrind"


class Lackey(BaseCollector):
    """Runs a program under ``valgrind --tool=lackey --trace-mem=yes``, a hundred times slower.

    The text goes through a pipe to ``raw/lackey.txt``. When it reaches ``max_bytes`` (a line is
    about 17 bytes), the program is killed, because it could go on for hours without being recorded.
    A warning says so, and the accesses up to then are the trace. Rows have no time:
    ``timestamp_ns`` is the row's place in the order, so rows have no phase either.

    Other programs that the program starts are not recorded.
    """

    name = "lackey"
    kind = Kind.ACCESSES
    modes = frozenset({Mode.WRAP})
    gives = "every load and store of a tiny program, in order, without times"
    use_instead = "access traces C and C++ programs that can be rebuilt, at a tenth of the cost"

    def __init__(self, max_bytes: int = 4 << 30) -> None:
        if max_bytes <= 0:
            raise InvalidArgumentError(f"max_bytes = {max_bytes}: must be positive")
        self._max_bytes = max_bytes
        self._fifo: Path | None = None
        self._text: Path | None = None
        self._thread: threading.Thread | None = None
        self._ending = threading.Event()
        self._limit_reached = False
        self._error: OSError | None = None

    def unavailable_reason(self) -> str | None:
        error = _tried()
        return None if error is None else f"{error}. {self.use_instead}"

    def start(self, target_pids: list[int], output_dir: Path) -> None:
        if self._thread is not None:
            raise InvalidStateError("lackey is running; stop it first")
        reason = self.unavailable_reason()
        if reason is None and target_pids:
            reason = "valgrind cannot attach to a process; start the program under it"
        if reason is not None:
            raise CollectorUnavailableError(self.name, reason)
        output_dir.mkdir(parents=True, exist_ok=True)
        self._limit_reached, self._error = False, None
        self._text = output_dir / "lackey.txt"
        self._fifo = output_dir / "lackey.fifo"
        self._fifo.unlink(missing_ok=True)
        os.mkfifo(self._fifo, 0o600)
        pipe = os.open(self._fifo, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        self._ending.clear()
        self._thread = threading.Thread(
            target=self._copy, args=(pipe, self._text), name="lackey", daemon=True
        )
        self._thread.start()

    def command_prefix(self, argv: Sequence[str]) -> list[str]:
        valgrind = shutil.which("valgrind")
        if self._thread is None or valgrind is None:
            raise InvalidStateError("lackey was not started")
        return [
            valgrind, "--tool=lackey", "--trace-mem=yes", "--basic-counts=no",
            f"--log-file={os.path.abspath(self._fifo or '')}", *argv,
        ]  # fmt: skip

    def _copy(self, pipe: int, text: Path) -> None:
        try:
            with open(text, "wb") as out:
                self._copy_to(out, pipe)
        except OSError as error:
            self._error = error
        finally:
            os.close(pipe)

    def _copy_to(self, out: BinaryIO, pipe: int) -> None:
        """Copies until the program ends, or until ``stop`` if it never began or still runs."""
        waiting = select.poll()
        waiting.register(pipe, select.POLLIN)
        size = 0
        while True:
            ending = self._ending.is_set()
            if not waiting.poll(_WAIT_MS):
                if ending:
                    return
                continue
            part = os.read(pipe, _CHUNK)
            if not part:  # hung up: the program had opened the pipe and has ended
                return
            if self._limit_reached:
                continue
            room = self._max_bytes - size
            if len(part) > room:
                out.write(part[: part.rfind(b"\n", 0, room) + 1])
                self._limit_reached = True
                self._end(pipe)
                continue
            out.write(part)
            size += len(part)

    def _end(self, pipe: int) -> None:
        _log.warning("%s", self._limit_warning())
        for pid in _others_with_open(pipe):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _limit_warning(self) -> str:
        return (
            f"lackey's text reached max_bytes ({self._max_bytes}): the program was ended there, "
            "and the trace holds what it did before. Raise max_bytes, or trace a smaller program"
        )

    def stop(self) -> CollectorMeta:
        if self._thread is None or self._fifo is None or self._text is None:
            raise InvalidStateError("lackey was not started")
        self._ending.set()
        self._thread.join()
        self._thread = None
        self._fifo.unlink(missing_ok=True)
        size = self._text.stat().st_size if self._text.exists() else 0
        warnings = []
        if self._limit_reached:
            warnings.append(self._limit_warning())
        if self._error is not None:
            warnings.append(f"the text ends early: {self._error}")
        if not size:
            warnings.append("valgrind wrote nothing: the program was not run under it")
        return CollectorMeta(
            collector_type=self.name,
            available=True,
            used=True,
            fallback_reason=self.fallback_reason,
            event_strings=["lackey --trace-mem=yes"],
            sample_period=1,
            output_file=str(self._text),
            output_file_size_bytes=size,
            parse_success=size > 0 and self._error is None,
            dropped_samples=0,
            warnings=warnings,
            extra={"limit_reached": self._limit_reached},
        )

    def trace(
        self, run_id: str, phase_boundaries: PhaseBoundaries | None = None
    ) -> pa.RecordBatchReader:
        """The rows; ``phase_boundaries`` cannot be applied to rows without times."""
        if self._text is None or self._thread is not None or not self._text.exists():
            raise InvalidStateError("lackey has recorded nothing")
        return reader_of_text(
            parse_lackey(self._text, run_id), "the row's place in the order, no time"
        )


def _others_with_open(pipe: int) -> set[int]:
    """The processes, without this one, that hold a named pipe open: programs under valgrind.

    Valgrind's text names its process too, but not if VALGRIND_OPTS has ``-q``.
    """
    name, found = os.readlink(f"/proc/self/fd/{pipe}"), set()
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):  # the process has ended, or is another user's
            for descriptor in os.listdir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):  # it was closed meanwhile
                    if os.readlink(f"/proc/{pid}/fd/{descriptor}") == name:
                        found.add(int(pid))
    return found - {os.getpid()}


@functools.cache
def _tried() -> str | None:
    """Runs a program that does nothing under valgrind; returns the error, or None."""
    valgrind = shutil.which("valgrind")
    if valgrind is None:
        return _INSTALL
    command = [valgrind, "--tool=lackey", "--log-file=/dev/null", "true"]
    done = subprocess.run(command, capture_output=True, timeout=60, check=False)
    if done.returncode == 0:
        return None
    return f"valgrind: {done.stderr.decode(errors='replace').strip()[:300] or done.returncode}"
