"""Inter-access intervals: the times between accesses to the same address."""

from __future__ import annotations

from typing import Any

from .._frames import TraceLike
from .metrics import some_tables


def compute_iai(trace: TraceLike, *, as_arrow: bool = False) -> Any:
    """The table ``iai``: times in ns between consecutive accesses to an address, per region type.

    Arguments and errors: as for :func:`compute_retention`.
    """
    return some_tables(trace, ["iai"], as_arrow)[0]
