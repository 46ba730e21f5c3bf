"""Locality: the strides in bytes between consecutive accesses to a region."""

from __future__ import annotations

from typing import Any

from .._frames import TraceLike
from .metrics import some_tables


def compute_locality(trace: TraceLike, *, as_arrow: bool = False) -> tuple[Any, Any]:
    """The tables ``locality_per_region`` and ``locality_summary``: strides in bytes.

    Arguments and errors: as for :func:`compute_retention`.
    """
    per_region, summary = some_tables(trace, ["locality_per_region", "locality_summary"], as_arrow)
    return per_region, summary
