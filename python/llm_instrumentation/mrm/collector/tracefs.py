"""Records tracepoints of some processes into a text file, by an instance of the kernel's tracefs.

It needs root and a mounted tracefs. Only this program uses the instance, so other users of tracefs
are not disturbed. :meth:`TraceInstance.close` removes the instance.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import select
import threading
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from ...errors import StrapIOError, StrapPermissionError

__all__ = ["MOUNT_TRACEFS", "TraceInstance", "find_tracefs"]

MOUNT_TRACEFS = "mount -t tracefs tracefs /sys/kernel/tracing"

_PLACES = (Path("/sys/kernel/tracing"), Path("/sys/kernel/debug/tracing"))
_BUFFER_KB = 16 << 10  # for each processor
_CHUNK = 1 << 16
_PREFIX = "mrm-trace-"
_NOBODY = str(1 << 22)  # the kernel's PID_MAX_LIMIT: no process has this id


def find_tracefs() -> Path | None:
    """The folder at which tracefs is mounted, or None.

    Raises:
        StrapPermissionError: this process is not root, and cannot see it.
    """
    for place in _PLACES:
        try:
            if (place / "instances").exists():
                return place
        except PermissionError:
            break
    if os.geteuid() != 0:
        raise StrapPermissionError(errno.EACCES, "tracefs is for root alone; run as root")
    return None


class TraceInstance:
    """Writes tracepoints of processes to a text file until :meth:`close`.

    Times are CLOCK_MONOTONIC, printed to the microsecond. New threads and children of watched
    processes are watched too.

    Attributes:
        path: the folder of the instance.
        lost: how many events were lost because the kernel's buffer was full; set by ``close``.
        error: the error that ended the copying early, or None.
    """

    def __init__(self, events: Sequence[str], text: Path) -> None:
        """Makes the instance. No process is watched yet; see :meth:`watch` and :meth:`around`.

        Args:
            events: names of tracepoints, as ``exceptions/page_fault_user``.
            text: the file to write; an existing file is replaced.

        Raises:
            StrapIOError: tracefs is not mounted, lacks an event, or refuses a step.
            OSError: the text file cannot be written.
        """
        self.lost = 0
        self.error: OSError | None = None
        self._ending = threading.Event()
        place = find_tracefs()
        if place is None:
            raise StrapIOError(f"tracefs is not mounted; as root: {MOUNT_TRACEFS}")
        _remove_left_behind(place / "instances")
        self.path = place / "instances" / f"{_PREFIX}{os.getpid()}-{secrets.token_hex(4)}"
        try:
            self.path.mkdir()
        except OSError as error:
            raise StrapIOError(error.errno, f"{self.path}: {error.strerror}") from error
        with contextlib.ExitStack() as undo:
            undo.callback(_remove, self.path)
            self._set("trace_clock", "mono")
            self._set("buffer_size_kb", str(_BUFFER_KB))
            self._set("options/event-fork", "1")
            self._set("set_event_pid", _NOBODY)
            for event in events:
                self._set(f"events/{event}/enable", "1")
            self._pipe = os.open(self.path / "trace_pipe", os.O_RDONLY | os.O_NONBLOCK)
            undo.callback(os.close, self._pipe)  # before _remove: an open pipe keeps the instance
            self._out = undo.enter_context(open(text, "wb"))
            self._thread = threading.Thread(target=self._copy, name="tracefs", daemon=True)
            self._thread.start()
            undo.pop_all()

    def watch(self, pids: Iterable[int]) -> None:
        """Records these processes from now on, with all their threads.

        Raises:
            ProcessLookupError: one of the processes has ended.
        """
        for pid in pids:
            try:
                threads = os.listdir(f"/proc/{pid}/task")
            except FileNotFoundError:
                raise ProcessLookupError(errno.ESRCH, f"process {pid} has ended") from None
            for thread in threads:
                self._set("set_event_pid", thread, os.O_APPEND)

    def around(self, argv: Sequence[str]) -> list[str]:
        """The command that runs ``argv`` and has it recorded from its first instruction."""
        return ["sh", "-c", 'echo $$ >> "$0" && exec "$@"', str(self.path / "set_event_pid"), *argv]

    def _copy(self) -> None:
        try:
            while True:
                ending = self._ending.is_set()
                with contextlib.suppress(BlockingIOError):
                    while part := os.read(self._pipe, _CHUNK):
                        self._out.write(part)
                if ending:
                    return
                select.select([self._pipe], [], [], 0.05)
        except OSError as error:
            self.error = error

    def close(self) -> None:
        """Ends the recording and removes the instance."""
        self._set("tracing_on", "0")
        self._ending.set()
        self._thread.join()
        os.close(self._pipe)
        try:
            self._out.close()
        except OSError as error:
            self.error = self.error or error
        for stats in self.path.glob("per_cpu/cpu*/stats"):
            found = re.findall(r"^(?:overrun|dropped events): (\d+)", stats.read_text(), re.M)
            self.lost += sum(map(int, found))
        _remove(self.path)

    def _set(self, name: str, value: str, how: int = os.O_TRUNC) -> None:
        path = self.path / name
        try:
            control = os.open(path, os.O_WRONLY | how)
            try:
                os.write(control, value.encode())
            finally:
                os.close(control)
        except OSError as error:
            raise StrapIOError(error.errno, f"{path}: {error.strerror}") from error


def _remove(instance: Path) -> None:
    end = time.monotonic() + 5.0
    while True:  # EBUSY for a moment after its pipe was closed
        try:
            instance.rmdir()
            return
        except OSError as error:
            if error.errno != errno.EBUSY or time.monotonic() > end:
                raise StrapIOError(error.errno, f"{instance}: {error.strerror}") from error
            time.sleep(0.01)


def _remove_left_behind(instances: Path) -> None:
    """Removes the instances that killed programs left."""
    for instance in instances.glob(f"{_PREFIX}*"):
        pid = instance.name.removeprefix(_PREFIX).partition("-")[0]
        if not Path("/proc", pid).exists():
            with contextlib.suppress(StrapIOError):  # another program removed it first
                _remove(instance)
