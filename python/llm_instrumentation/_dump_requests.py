"""Asks the flight recorders of another process for a dump, through a socket of that process.

The socket has an abstract name of Linux: it has no file, and ends with its process. In the name are
the process and its namespace of processes, so that containers which share a network do not meet.

A request is the reason in UTF-8, behind which the asking side ends its direction. The answer is a
JSON list with an object for each recorder: the fields of :class:`AskedDump`.
"""

from __future__ import annotations

import json
import os
import re
import socket
import struct
import sys
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from ._warn import warn
from .errors import (
    NotFoundError,
    StrapIOError,
    StrapPermissionError,
    StrapTimeoutError,
    UnsupportedError,
)

__all__ = ["AskedDump", "Listener", "request_dump"]

_MOST_REASON = 4096  # bytes
_SLOW_S = 10.0  # for the asking side to say its reason, and to take the answer
_CREDENTIALS = struct.Struct("3i")  # process, user, group


@dataclass(frozen=True)
class AskedDump:
    """A dump that another process has written on request.

    Attributes:
        path: its folder.
        first_step, last_step: its steps; None: it has none.
        problem: why it is not whole; "": it is.
    """

    path: Path
    first_step: int | None
    last_step: int | None
    problem: str = ""


def request_dump(
    pid: int, reason: str = "asked for by another process", *, timeout_s: float = 60.0
) -> tuple[AskedDump, ...]:
    """Has the flight recorders of another process write their steps now, and waits for the dumps.

    It works while the model hangs too, if Python's threads run: the steps until now are written,
    without steps behind them.

    Args:
        pid: the number of the process.
        reason: the reason of the trigger.
        timeout_s: how long to wait for the dumps, in seconds.

    Returns:
        a dump for each recorder of the process that runs.

    Raises:
        NotFoundError: (a FileNotFoundError) there is no such process, or no recorder runs in it.
        StrapPermissionError: (a PermissionError) the process is another user's.
        StrapTimeoutError: (a TimeoutError) there was no answer in time. The dumps may come yet.
        StrapIOError: (an OSError) a dump could not be written.
        UnsupportedError: (a TypeError) the system is not Linux.
    """
    if sys.platform != "linux":
        raise UnsupportedError("a dump of another process: this works on Linux alone")
    name = _name_of(pid)
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(timeout_s)
        try:
            connection.connect(name)
            if _peer(connection)[0] != pid:
                raise ConnectionRefusedError
            connection.sendall(reason.encode()[:_MOST_REASON])
            connection.shutdown(socket.SHUT_WR)
            with connection.makefile("rb") as answer:
                said = json.loads(answer.read())
        except ConnectionRefusedError:
            raise NotFoundError(
                f"no flight recorder runs in process {pid}. Of a process in a container, run "
                "strap dump in the container"
            ) from None
        except TimeoutError:
            raise StrapTimeoutError(
                f"process {pid} did not answer within {timeout_s:g} s"
            ) from None
        except (OSError, ValueError) as error:
            raise StrapIOError(f"process {pid} did not answer whole: it may have ended") from error
    dumps = tuple(AskedDump(Path(one.pop("path")), **one) for one in said["dumps"])
    if said["failed"]:
        raise StrapIOError(f"process {pid} could not write a dump: {'; '.join(said['failed'])}")
    return dumps


def _name_of(pid: int) -> bytes:
    """The name of the socket of a process, which must be there and ours."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
        user = os.stat(f"/proc/{pid}").st_uid
        if os.geteuid() not in (0, user):
            raise StrapPermissionError(f"process {pid} is of the user {user}, not of this one")
        inner = re.search(r"^NSpid:.*?(\d+)$", status, re.MULTILINE)
        return _name(os.stat(f"/proc/{pid}/ns/pid").st_ino, pid if inner is None else int(inner[1]))
    except (FileNotFoundError, ProcessLookupError):
        raise NotFoundError(f"there is no process {pid}") from None
    except PermissionError as error:
        if isinstance(error, StrapPermissionError):
            raise
        raise StrapPermissionError(f"process {pid} cannot be looked at: {error}") from error


def _name(namespace: int, pid: int) -> bytes:
    return f"\0llm_instrumentation/flight/{namespace}/{pid}".encode()


def _peer(connection: socket.socket) -> tuple[int, int]:
    """The process and the user at the other end."""
    said = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    process, user, _ = _CREDENTIALS.unpack(said)
    return process, user


class Listener:
    """A thread that answers requests of this user's processes, and of root's.

    Args:
        dump: is given the reason. It returns the dumps, and what went wrong with others.
    """

    def __init__(self, dump: Callable[[str], tuple[list[AskedDump], list[str]]]) -> None:
        self._dump = dump
        self._socket: socket.socket | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begins to listen. A system that refuses it is told in a warning."""
        if sys.platform != "linux":
            return
        listening = socket.socket(socket.AF_UNIX)
        try:
            listening.bind(_name(os.stat("/proc/self/ns/pid").st_ino, os.getpid()))
            listening.listen(4)
        except OSError as error:
            listening.close()
            warn(f"strap dump {os.getpid()} cannot reach this process: {error}")
            return
        self._socket = listening
        self._thread = threading.Thread(
            target=self._serve, args=(listening,), name="strap-flight-ask", daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        """Ends listening. It waits for a request that is being answered."""
        if self._socket is None or self._thread is None:
            return
        self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread
        if self._thread is not threading.current_thread():
            self._thread.join()
        self._socket.close()
        self._socket = self._thread = None

    def forget(self) -> None:
        """Closes the socket in a child after ``fork()``, which has no such thread."""
        if self._socket is not None:
            self._socket.close()
            self._socket = self._thread = None

    def _serve(self, listening: socket.socket) -> None:
        while True:
            try:
                connection, _ = listening.accept()
            except OSError:  # it is shut
                return
            with connection:
                try:
                    self._answer(connection)
                except OSError:  # the asking side has gone, or is too slow
                    continue

    def _answer(self, connection: socket.socket) -> None:
        if _peer(connection)[1] not in (0, os.geteuid()):
            return
        connection.settimeout(_SLOW_S)
        with connection.makefile("rb") as request:
            reason = request.read(_MOST_REASON).decode(errors="replace")
        dumps, failed = self._dump(reason)
        answer = {
            "dumps": [{**asdict(one), "path": os.path.abspath(one.path)} for one in dumps],
            "failed": failed,
        }
        connection.sendall(json.dumps(answer).encode())
