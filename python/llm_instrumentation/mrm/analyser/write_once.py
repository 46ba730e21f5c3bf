"""Write-once: the part of the stored addresses that are stored exactly once."""

from __future__ import annotations

from typing import Any

from .._frames import TraceLike
from .metrics import some_tables


def compute_write_once(trace: TraceLike, *, as_arrow: bool = False) -> Any:
    """The table ``write_once``: the write-once ratio per region, from 0 to 1.

    Arguments and errors: as for :func:`compute_retention`.
    """
    return some_tables(trace, ["write_once"], as_arrow)[0]
