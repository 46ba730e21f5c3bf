"""Read frequency: the loads and stores of each region."""

from __future__ import annotations

from typing import Any

from .._frames import TraceLike
from .metrics import some_tables


def compute_read_freq(trace: TraceLike, *, as_arrow: bool = False) -> Any:
    """The table ``read_freq``: the number of loads and stores per region.

    Arguments and errors: as for :func:`compute_retention`.
    """
    return some_tables(trace, ["read_freq"], as_arrow)[0]
