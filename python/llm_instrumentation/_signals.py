"""Signals that end a command."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator

__all__ = ["ended_by_sigterm"]


@contextlib.contextmanager
def ended_by_sigterm() -> Iterator[None]:
    """SIGTERM ends the block as Ctrl-C does. For the main thread."""

    def end(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
