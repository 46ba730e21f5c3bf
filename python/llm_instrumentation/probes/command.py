"""Probes from the command line: ``scripts/tracepoints.py`` and ``scripts/system_metrics.py``."""

from __future__ import annotations

import argparse
import json
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack

from ..errors import (
    InvalidArgumentError,
    NotFoundError,
    StrapError,
    StrapPermissionError,
    UnsupportedError,
)
from .block import BlockProbe
from .collect import collect
from .jsonl import SnapshotWriter
from .probe import KernelProbe
from .system import SystemProbe

__all__ = ["system_metrics", "tracepoints"]

#: What is wrong, by the exit code; 1 is all else.
_EXIT_CODES = {
    InvalidArgumentError: 2,
    StrapPermissionError: 3,
    UnsupportedError: 4,
    NotFoundError: 5,
}


def tracepoints(arguments: Sequence[str] | None = None) -> int:
    """Requests to block devices, a line each interval until it is interrupted; the exit code."""
    parser = _parser(
        "tracepoints.py",
        "Latencies and queue depths of block devices, a line of JSON each interval.",
        "tracepoints.jsonl",
    )
    parser.add_argument(
        "--device", action="append", default=[], help="whole disk to follow; may be given again"
    )
    return _run(parser, arguments, lambda given: BlockProbe(devices=given.device))


def system_metrics(arguments: Sequence[str] | None = None) -> int:
    """Processes and pressure, a line each interval until it is interrupted; the exit code."""
    parser = _parser(
        "system_metrics.py",
        "Time off the cores, page faults and pressure, a line of JSON each interval.",
        "system_metrics.jsonl",
    )
    return _run(parser, arguments, lambda given: SystemProbe())


def _parser(name: str, description: str, output: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=name,
        description=description,
        epilog="Ends with 2 for a bad argument, 3 where the kernel takes no programs from this "
        "user, 4 where it cannot run them, 5 for a device that is not there, else 1 or 0.",
    )
    parser.add_argument("--interval", type=float, default=5.0, help="seconds (default: 5.0)")
    parser.add_argument("--output", default=output, help=f"file to append to (default: {output})")
    parser.add_argument(
        "--no-output", action="store_true", help="write to the standard output instead"
    )
    parser.add_argument(
        "--flush-every", type=int, default=12, help="lines written together (default: 12)"
    )
    parser.add_argument("--fsync", action="store_true", help="wait for the disk at each flush")
    return parser


def _run(
    parser: argparse.ArgumentParser,
    arguments: Sequence[str] | None,
    probe: Callable[[argparse.Namespace], KernelProbe],
) -> int:
    given = parser.parse_args(arguments)
    try:
        _collect(given, probe(given))
    except (StrapError, OSError) as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return next((code for kind, code in _EXIT_CODES.items() if isinstance(error, kind)), 1)
    return 0


def _collect(given: argparse.Namespace, probe: KernelProbe) -> None:
    stop = threading.Event()
    with ExitStack() as stack:
        snapshots = collect(probe.snapshot, interval_s=given.interval, stop=stop)
        writer = None
        if not given.no_output:
            writer = SnapshotWriter(given.output, flush_every=given.flush_every, fsync=given.fsync)
            stack.enter_context(writer)
        stack.enter_context(probe)
        for number in (signal.SIGINT, signal.SIGTERM):
            before = signal.signal(number, lambda *_: stop.set())
            stack.callback(signal.signal, number, before)
        for snapshot in snapshots:
            if writer is not None:
                writer.write(snapshot)
            else:
                print(json.dumps(snapshot, separators=(",", ":")), flush=True)
