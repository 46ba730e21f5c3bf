"""The distinct pages of each region."""

from __future__ import annotations

from typing import Any

from .._frames import TraceLike
from .metrics import some_tables


def compute_working_set(trace: TraceLike, *, as_arrow: bool = False) -> tuple[Any, Any]:
    """``working_set_per_region`` and ``working_set_summary``.

    Errors: those of :func:`compute_retention`.
    """
    names = ["working_set_per_region", "working_set_summary"]
    per_region, summary = some_tables(trace, names, as_arrow)
    return per_region, summary
