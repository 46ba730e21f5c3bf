"""How long regions keep what is stored in them."""

from __future__ import annotations

from typing import Any

from .._frames import TraceLike
from .metrics import some_tables


def compute_retention(trace: TraceLike, *, as_arrow: bool = False) -> tuple[Any, Any]:
    """``retention_per_region`` and ``retention_summary``.

    Raises:
        InvalidArgumentError: as for :func:`compute_all`, or this kind of trace cannot
            tell retention.
    """
    per_region, summary = some_tables(
        trace, ["retention_per_region", "retention_summary"], as_arrow
    )
    return per_region, summary
