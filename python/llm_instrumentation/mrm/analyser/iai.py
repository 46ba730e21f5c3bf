"""Inter-access intervals: the gaps between accesses to one exact address."""

from __future__ import annotations

from typing import Any

from .._frames import TraceLike
from .metrics import some_tables


def compute_iai(trace: TraceLike, *, as_arrow: bool = False) -> Any:
    """``iai``, the inter-access intervals. Errors: those of :func:`compute_retention`."""
    return some_tables(trace, ["iai"], as_arrow)[0]
