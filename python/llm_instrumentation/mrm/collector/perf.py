"""Runs the program perf: records processes or commands, and turns recordings into text.

Times are CLOCK_MONOTONIC. Commands are lists of arguments, and no shell runs them.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import re
import select
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from ...errors import StrapIOError

__all__ = ["INSTALL_PERF", "PerfRecording", "find_perf", "lost_samples", "try_recording"]

INSTALL_PERF = (
    "perf is not installed: apt-get install linux-perf (Debian), "
    "linux-tools-$(uname -r) (Ubuntu) or dnf install perf (Fedora, RHEL)"
)

_READY_S = 20.0
_END_S = 60.0
_PARANOID = Path("/proc/sys/kernel/perf_event_paranoid")
# Lines that perf prints beside its error: usage, hints about its options, progress.
_NOISE = re.compile(
    r"(Usage:|or: perf|-\w, --|Run 'perf list'|\[ perf record:|Events (dis|en)abled|$)"
)


def find_perf() -> str | None:
    """The path of perf, or None."""
    return shutil.which("perf")


def perf_error(text: str | bytes) -> str:
    """The error in perf's output, on one line of at most 600 characters."""
    if isinstance(text, bytes):
        text = text.decode(errors="replace")
    lines = [" ".join(line.split()) for line in text.splitlines()]
    told = [line.replace("\\___ ", "") for line in lines if not _NOISE.match(line)]
    return " ".join(told)[:600] or "no error text"


def permission_advice(error: str) -> str:
    """How to give perf the permission that it lacks; "" if the error is another one."""
    if not re.search(r"permission|paranoid|EACCES|EPERM|not permitted", error, re.IGNORECASE):
        return ""
    with contextlib.suppress(OSError):
        level = _PARANOID.read_text().strip()
        return (
            f" (perf_event_paranoid is {level}; run as root, or: "
            "sysctl kernel.perf_event_paranoid=1)"
        )
    return ""


def try_recording(options: Sequence[str]) -> str | None:
    """Records a program that does nothing; returns perf's error, or None if it worked."""
    perf = find_perf()
    if perf is None:
        return INSTALL_PERF
    with tempfile.TemporaryDirectory(prefix="mrm-trace-") as folder:
        done = subprocess.run(
            [perf, "record", *options, "-o", os.path.join(folder, "perf.data"), "--", "true"],
            capture_output=True,
            timeout=_END_S,
            check=False,
            env=_environment(),
        )
    if done.returncode == 0:
        return None
    error = perf_error(done.stderr)
    return error + permission_advice(error)


def _environment() -> dict[str, str]:
    return {**os.environ, "LC_ALL": "C", "PERF_PAGER": "cat"}


class PerfRecording:
    """A run of ``perf record``, around a command or on running processes.

    Args:
        options: options of perf record, without the output file.
        data: the recording; an existing file is removed.

    Attributes:
        data: the path of the recording.
        warnings: what went wrong so far, a text each.
    """

    def __init__(self, options: Sequence[str], data: Path) -> None:
        self.data = data
        self._options = ["--clockid", "mono", *options, "-o", str(data)]
        self._process: subprocess.Popen[bytes] | None = None
        self.warnings: list[str] = []
        data.parent.mkdir(parents=True, exist_ok=True)
        data.unlink(missing_ok=True)

    def around(self, argv: Sequence[str]) -> list[str]:
        """The command that runs ``argv`` and records it from its first instruction.

        Raises:
            StrapIOError: perf is not installed.
        """
        return [_perf(), "record", *self._options, "--", *argv]

    def attach(self, pids: Iterable[int]) -> None:
        """Begins to record processes, with the threads and children that they start later.

        It returns once perf records.

        Raises:
            StrapIOError: perf is not installed, ended or does not answer.
        """
        perf, targets = _perf(), ",".join(map(str, pids))
        with contextlib.ExitStack() as perfs, contextlib.ExitStack() as own:
            order_read, order_write = os.pipe()
            perfs.callback(os.close, order_read)
            own.callback(os.close, order_write)
            answer_read, answer_write = os.pipe()
            perfs.callback(os.close, answer_write)
            own.callback(os.close, answer_read)
            # A file, because a pipe could fill: perf may print much in a long run.
            self._told = own.enter_context(tempfile.TemporaryFile())
            self._process = subprocess.Popen(
                [
                    perf, "record", *self._options, "-p", targets,
                    "--delay", "-1", "--control", f"fd:{order_read},{answer_write}",
                ],
                stdin=subprocess.DEVNULL,
                stdout=self._told,
                stderr=self._told,
                pass_fds=(order_read, answer_write),
                start_new_session=True,  # Ctrl-C reaches only this process, which then ends perf
                env=_environment(),
            )  # fmt: skip
            # Closed by _end: perf 6.1 miscounts its descriptors if the pipes close before it ends.
            self._own = own.pop_all()
        with contextlib.suppress(BrokenPipeError):
            os.write(order_write, b"enable\n")
        if not self._enabled(answer_read):
            complaint = self._end() or f"no answer in {_READY_S:.0f} s"
            raise StrapIOError(f"perf record: {complaint}")

    @staticmethod
    def _enabled(answers: int) -> bool:
        """Waits for perf's ``ack``; returns False if perf ends or does not answer in time."""
        end = time.monotonic() + _READY_S
        heard = b""
        while b"ack\n" not in heard:
            if not select.select([answers], [], [], max(0.0, end - time.monotonic()))[0]:
                return False
            part = os.read(answers, 64)
            if not part:
                return False
            heard += part
        return True

    def _end(self) -> str:
        """Ends perf if it runs; returns its error, or "" if there was none."""
        process, self._process = self._process, None
        if process is None:
            return ""
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
        try:
            process.wait(_END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            self.warnings.append(f"perf did not end within {_END_S:.0f} s and was killed")
        self._told.seek(0)
        text = self._told.read()
        self._own.close()
        if process.returncode not in (0, 130, -signal.SIGINT):
            error = perf_error(text)
            return error + permission_advice(error)
        return ""

    def finish(self) -> None:
        """Ends the recording and adds perf's errors to :attr:`warnings`."""
        complaint = self._end()
        if complaint:
            self.warnings.append(f"perf record: {complaint}")
        if not self.data.exists() or not self.data.stat().st_size:
            self.warnings.append(f"perf wrote no {self.data.name}: it recorded nothing")

    def script(self, text: Path, *field_lists: str) -> str | None:
        """Writes the recording as text.

        Args:
            text: the file to write.
            field_lists: lists of fields, each a comma-separated text. The first list that perf can
                print is used.

        Returns:
            The list that was used. None: perf could print none, and :attr:`warnings` says why.
        """
        errors: list[str] = []
        for fields in field_lists:
            with open(text, "wb") as out:
                done = subprocess.run(
                    [
                        _perf(), "script", "-i", str(self.data), "--ns", "--show-lost-events",
                        "-F", fields,
                    ],
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=subprocess.PIPE,
                    check=False,
                    env=_environment(),
                )  # fmt: skip
            if done.returncode == 0:
                if errors:
                    self.warnings.append(f"perf script: some fields are missing: {errors[-1]}")
                return fields
            errors.append(perf_error(done.stderr))
        self.warnings.append(f"perf script: {errors[-1]}")
        return None


def _perf() -> str:
    perf = find_perf()
    if perf is None:
        raise StrapIOError(INSTALL_PERF)
    return perf


_LOST = re.compile(rb"PERF_RECORD_(LOST|LOST_SAMPLES) lost (\d+)")


def lost_samples(text: Path) -> int:
    """The number of lost samples, from perf's text with ``--show-lost-events``.

    The kernel reports samples that found no room in its buffer as LOST. Newer kernels report their
    total again as LOST_SAMPLES, so the larger sum counts.
    """
    if not text.exists() or not text.stat().st_size:
        return 0
    counts = {b"LOST": 0, b"LOST_SAMPLES": 0}
    with open(text, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as whole:
        for found in _LOST.finditer(whole):
            counts[found[1]] += int(found[2])
    return max(counts.values())
