"""Which addresses are stored exactly once."""

from __future__ import annotations

from typing import Any

from .._frames import TraceLike
from .metrics import some_tables


def compute_write_once(trace: TraceLike, *, as_arrow: bool = False) -> Any:
    """``write_once``. Errors: those of :func:`compute_retention`."""
    return some_tables(trace, ["write_once"], as_arrow)[0]
