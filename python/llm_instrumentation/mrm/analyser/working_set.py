"""Working set: the distinct pages of each region that are accessed."""

from __future__ import annotations

from typing import Any

from .._frames import TraceLike
from .metrics import some_tables


def compute_working_set(trace: TraceLike, *, as_arrow: bool = False) -> tuple[Any, Any]:
    """The tables ``working_set_per_region`` and ``working_set_summary``: pages and bytes.

    A page has 4,096 bytes. Arguments and errors: as for :func:`compute_retention`.
    """
    names = ["working_set_per_region", "working_set_summary"]
    per_region, summary = some_tables(trace, names, as_arrow)
    return per_region, summary
