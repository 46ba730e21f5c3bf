"""Block devices, watched from the command line: ``scripts/tracepoints.py``."""

from __future__ import annotations

import argparse
import json
import signal
import sys
import threading
from collections.abc import Sequence
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

__all__ = ["main"]

#: What is wrong, by the exit code; 1 is all else.
EXIT_CODES = {
    InvalidArgumentError: 2,
    StrapPermissionError: 3,
    UnsupportedError: 4,
    NotFoundError: 5,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Writes a line of JSON each interval until it is interrupted; the exit code."""
    parser = argparse.ArgumentParser(
        prog="tracepoints.py",
        description="Latencies and queue depths of block devices, a line of JSON each interval.",
        epilog="Ends with 2 for a bad argument, 3 where the kernel takes no programs from this "
        "user, 4 where it cannot run them, 5 for a device that is not there, else 1 or 0.",
    )
    parser.add_argument("--interval", type=float, default=5.0, help="seconds (default: 5.0)")
    parser.add_argument("--output", default="tracepoints.jsonl", help="file to append to")
    parser.add_argument(
        "--no-output", action="store_true", help="write to the standard output instead"
    )
    parser.add_argument(
        "--flush-every", type=int, default=12, help="lines written together (default: 12)"
    )
    parser.add_argument("--fsync", action="store_true", help="wait for the disk at each flush")
    parser.add_argument(
        "--device", action="append", default=[], help="whole disk to follow; may be given again"
    )
    given = parser.parse_args(arguments)
    try:
        _collect(given)
    except (StrapError, OSError) as error:
        print(f"tracepoints.py: {error}", file=sys.stderr)
        return next((code for kind, code in EXIT_CODES.items() if isinstance(error, kind)), 1)
    return 0


def _collect(given: argparse.Namespace) -> None:
    stop = threading.Event()
    with ExitStack() as stack:
        probe = BlockProbe(devices=given.device)
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
