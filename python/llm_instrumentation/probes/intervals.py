"""Takes snapshots at intervals."""

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
    """Yields a snapshot every ``interval_s`` seconds, and a last one when ``stop`` is set.

    Args:
        snapshot: takes a snapshot, for example :meth:`BlockProbe.snapshot`.
        interval_s: seconds above 0 and below 10^9.
        stop: an event that ends the iteration; set it in another thread or a signal handler.

    Raises:
        InvalidArgumentError: the interval is out of its range.
    """
    if not 0 < interval_s < 1e9:  # also refuses NaN; Event.wait refuses 10^10
        raise InvalidArgumentError(f"interval_s = {interval_s}: give seconds above 0, below 10^9")
    return _collect(snapshot, interval_s, stop or threading.Event())


def _collect(
    snapshot: Callable[[], dict[str, Any]], interval_s: float, stop: threading.Event
) -> Iterator[dict[str, Any]]:
    due = time.monotonic()
    while not stop.is_set():
        # Due times are a fixed interval apart, so the time that a snapshot takes does not add up.
        due = max(due + interval_s, time.monotonic())
        stop.wait(due - time.monotonic())
        yield snapshot()
