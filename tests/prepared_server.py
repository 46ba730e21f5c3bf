"""The server of `prepared.python`, and what the program that it names asks of the server.

One message asks for one process, with the file descriptors of the one that asks. The answer is the
exit status. A connection that ends ends its process, so a killed asker leaves none behind.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import socket
import sys
from types import FrameType
from typing import Any, NoReturn

LONGEST = 1 << 20
FIRST_FREE = 512  # above the numbers that a process gives its files


def ask(address: str, argv: list[str]) -> NoReturn:
    """Has the server run a program as this process would, and ends as that ends."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
        files = [number for number in map(int, os.listdir("/proc/self/fd")) if _is_open(number)]
        files.remove(server.fileno())
        server.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, LONGEST)
        server.connect(address)
        asked = {"argv": argv, "files": files, "cwd": os.getcwd(), "env": dict(os.environ)}
        socket.send_fds(server, [json.dumps(asked).encode()], files)
        process = int(server.recv(64))

        def pass_on(number: int, _: FrameType | None) -> None:
            os.kill(process, number)

        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
            signal.signal(number, pass_on)
        status = int(server.recv(64) or -signal.SIGKILL)
    if status < 0:
        if status != -signal.SIGKILL:
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


def serve(address: str) -> None:
    """Forks a process for each message, until standard input ends."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(address)
    listener.listen(64)
    events = selectors.DefaultSelector()
    events.register(sys.stdin, selectors.EVENT_READ)
    events.register(listener, selectors.EVENT_READ)
    running: dict[int, tuple[socket.socket, int]] = {}  # by pidfd
    asking: dict[socket.socket, int] = {}  # the pidfd of a connection
    print("ready", flush=True)
    while True:
        for key, _ in events.select():
            found: Any = key.fileobj
            if found is sys.stdin:
                for pidfd in running:
                    signal.pidfd_send_signal(pidfd, signal.SIGKILL)
                return
            if found is listener:
                connection, _ = listener.accept()
                child = _forked(connection, listener, events)
                pidfd = os.pidfd_open(child)
                running[pidfd], asking[connection] = (connection, child), pidfd
                events.register(pidfd, selectors.EVENT_READ)
                events.register(connection, selectors.EVENT_READ)
            elif found in asking:  # its other end is closed
                signal.pidfd_send_signal(asking.pop(found), signal.SIGKILL)
                events.unregister(found)
            else:
                events.unregister(found)
                connection, child = running.pop(found)
                status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
                os.close(found)
                if asking.pop(connection, None) is not None:
                    events.unregister(connection)
                    _say(connection, status)
                connection.close()


def _say(connection: socket.socket, number: int) -> None:
    with contextlib.suppress(OSError):  # the other end was killed
        connection.send(str(number).encode())


def _forked(
    connection: socket.socket, listener: socket.socket, events: selectors.BaseSelector
) -> int:
    message, received, *_ = socket.recv_fds(connection, LONGEST, 250)
    child = os.fork()
    if child:
        for number in received:
            os.close(number)
        _say(connection, child)
        return child
    status = 1
    try:
        events.close()
        listener.close()
        connection.close()
        status = _run(json.loads(message), received)
    finally:
        os._exit(status)


def _run(asked: dict[str, Any], received: list[int]) -> int:
    """Runs the program in this process as if it were a new one, and returns its exit status."""
    import atexit
    import fcntl
    import threading
    import traceback

    high = [fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, FIRST_FREE) for number in received]
    for number in received:
        os.close(number)
    for number, wanted in zip(high, asked["files"], strict=True):
        os.dup2(number, wanted)
        os.close(number)
    os.setsid()
    os.chdir(asked["cwd"])
    os.environ.clear()
    os.environ.update(asked["env"])
    sys.executable = asked["argv"][0]
    for number, stream in enumerate((sys.stdin, sys.stdout, sys.stderr)):
        mode, unbuffered = ("r", False) if number == 0 else ("w", "-u" in asked["argv"])
        name = stream.name.strip("<>")
        opened = open(number, mode, closefd=False)  # noqa: SIM115
        opened.reconfigure(line_buffering=unbuffered or number == 2 or opened.isatty())
        setattr(sys, name, opened)
        setattr(sys, f"__{name}__", opened)
    try:
        _program(asked["argv"][1:])
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        if status and not isinstance(end.code, int):
            print(end.code, file=sys.stderr)
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        traceback.print_exc()
        sys.stderr.flush()
        os.kill(os.getpid(), signal.SIGINT)
        raise
    except BaseException:
        traceback.print_exc()
        status = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            status = status or 120
    return status & 0xFF


def _program(arguments: list[str]) -> None:
    """What `python ARGUMENTS` runs: the options ``-u``, ``-W``, ``-c``, ``-m``, or a script."""
    import builtins
    import runpy
    import warnings

    sys.path[0:1] = [path for path in os.environ.get("PYTHONPATH", "").split(":") if path]
    while arguments[0] in ("-u", "-W"):
        option = arguments.pop(0)
        if option == "-W":
            action, _, category, module = arguments.pop(0).split(":")
            warnings.filterwarnings(action, category=getattr(builtins, category), module=module)
    kind, *rest = arguments
    if kind == "-c":
        sys.argv = ["-c", *rest[1:]]
        sys.path.insert(0, "")
        main = type(sys)("__main__")
        sys.modules["__main__"] = main
        exec(compile(rest[0], "<string>", "exec"), main.__dict__)
    elif kind == "-m":
        sys.argv = rest
        sys.path.insert(0, os.getcwd())
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        sys.path.insert(0, os.path.dirname(os.path.abspath(kind)))
        runpy.run_path(kind, run_name="__main__")


def _is_open(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError:
        return False
    return True


if __name__ == "__main__":
    import gc
    import importlib

    for name in sys.argv[2:]:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # else each collection in a forked process copies the pages of all these modules
    serve(sys.argv[1])
    os._exit(0)  # what is frozen would be told as a leak
