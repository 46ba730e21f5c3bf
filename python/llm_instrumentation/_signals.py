"""Handles signals that end a command."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator

__all__ = ["ended_by_sigterm"]


@contextlib.contextmanager
def ended_by_sigterm() -> Iterator[None]:
    """Lets SIGTERM raise KeyboardInterrupt in the block, as Ctrl-C does. Main thread only."""

    def end(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
