"""Snapshots at intervals, until someone says stop."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from ..errors import InvalidArgumentError

__all__ = ["collect"]


def collect(
    snapshot: Callable[[], dict[str, Any]],
    *,
    interval_s: float = 5.0,
    stop: threading.Event | None = None,
) -> Iterator[dict[str, Any]]:
    """A snapshot each ``interval_s`` seconds, and a last one for the rest when ``stop`` is set.

    Args:
        snapshot: gives one, as :meth:`BlockProbe.snapshot`.
        interval_s: seconds above 0 and below 10^9.
        stop: ends the collecting, from another thread or a signal handler.

    Raises:
        InvalidArgumentError: the interval.
    """
    if not 0 < interval_s < 1e9:  # NaN is neither; threads wait for no 10^10
        raise InvalidArgumentError(f"interval_s = {interval_s}: give seconds above 0, below 10^9")
    return _collect(snapshot, interval_s, stop or threading.Event())


def _collect(
    snapshot: Callable[[], dict[str, Any]], interval_s: float, stop: threading.Event
) -> Iterator[dict[str, Any]]:
    due = time.monotonic()
    while not stop.is_set():
        # To a beat, not after a rest: what a snapshot takes does not add up.
        due = max(due + interval_s, time.monotonic())
        stop.wait(due - time.monotonic())
        yield snapshot()
