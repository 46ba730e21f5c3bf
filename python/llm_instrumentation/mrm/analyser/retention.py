"""Retention: the time from the first store to the last load of a region."""

from __future__ import annotations

from typing import Any

from .._frames import TraceLike
from .metrics import some_tables


def compute_retention(trace: TraceLike, *, as_arrow: bool = False) -> tuple[Any, Any]:
    """The tables ``retention_per_region`` (ns and s) and ``retention_summary`` (s).

    Args:
        trace: as for :func:`compute_all`.
        as_arrow: return pyarrow tables instead of pandas frames.

    Raises:
        InvalidArgumentError: as for :func:`compute_all`, or this kind of trace cannot give the
            table.
        CorruptError, NoSpaceError, MissingExtraError: as for :func:`compute_all`.
    """
    per_region, summary = some_tables(
        trace, ["retention_per_region", "retention_summary"], as_arrow
    )
    return per_region, summary
