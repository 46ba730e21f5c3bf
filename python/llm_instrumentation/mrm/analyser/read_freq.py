"""Loads and stores of each region."""

from __future__ import annotations

from typing import Any

from .._frames import TraceLike
from .metrics import some_tables


def compute_read_freq(trace: TraceLike, *, as_arrow: bool = False) -> Any:
    """``read_freq``. Errors: those of :func:`compute_retention`."""
    return some_tables(trace, ["read_freq"], as_arrow)[0]
