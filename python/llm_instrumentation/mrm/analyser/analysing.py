"""The steps that all analyses of a trace share: options, rows, and why tables are empty."""

from __future__ import annotations

import os
import tempfile
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pyarrow as pa

from ..._cpus import usable_cpus
from ..._extras import extra
from ..._native import trace as native
from ...errors import InvalidArgumentError
from ..trace_reader import TraceLike, can_be_read_again, is_in_order, reader_of

#: The tables of :func:`compute_all`, in the order in which it returns them.
SUMMARY_TABLES = (
    "retention_per_region",
    "retention_summary",
    "write_once",
    "read_freq",
    "working_set_per_region",
    "working_set_summary",
    "locality_per_region",
    "locality_summary",
    "iai",
    "suitability",
)

READ_COLUMNS = (
    "timestamp_ns",
    "address",
    "address_page",
    "op_type",
    "region_type",
    "region_id",
    "length_bytes",
)


def analyse(
    trace: TraceLike,
    names: list[str],
    options: dict[str, Any],
    progress: native.Progress | None,
    changed: Callable[[pa.RecordBatchReader], pa.RecordBatchReader] = lambda reader: reader,
) -> tuple[dict[str, pa.Table], pa.Table]:
    """Analyses a trace, first as one in the order of time, then with sorting if it is not.

    Nearly all traces are in the order of time, and sorting would keep their rows in memory. A trace
    that can be read only once is sorted at once.

    Args:
        trace: the trace.
        names: the tables to compute.
        options: the options of libstrap.
        progress: called with the counts so far, or None.
        changed: maps the rows of the trace to the rows to analyse, in the same order.

    Returns:
        The tables by name, and a table with a reason for each table that is not supported.
    """
    if can_be_read_again(trace):
        reader = changed(reader_of(trace, READ_COLUMNS))
        try:
            return native.analyse(reader, names, {**options, "ordered": True}, progress)
        except InvalidArgumentError:
            if is_in_order(trace):
                raise
    return native.analyse(changed(reader_of(trace, READ_COLUMNS)), names, options, progress)


def converter(as_arrow: bool) -> Callable[[pa.Table], Any]:
    """A function that converts a table to a pandas frame, or returns it as it is if ``as_arrow``.

    Raises:
        MissingExtraError: pandas is not installed.
    """
    if as_arrow:
        return lambda table: table
    with extra("mrm", "A table as a pandas frame"):
        import pandas  # noqa: F401 - pyarrow imports it
    return lambda table: table.to_pandas()


def reasons_of_empty(support: pa.Table, names: Sequence[str]) -> dict[str, str]:
    """Why this kind of trace cannot give some of the tables, by their name."""
    reasons = {row["table"]: row["reason"] for row in support.to_pylist() if row["reason"]}
    return {name: reasons[name] for name in names if name in reasons}


def warn_of_empty(support: dict[str, str]) -> None:
    by_reason: dict[str, list[str]] = {}
    for name, reason in support.items():
        by_reason.setdefault(reason, []).append(name)
    for reason, names in by_reason.items():
        warnings.warn(f"{', '.join(names)}: empty, {reason}", stacklevel=3)


def options_of(
    memory_gb: float, workers: int | None, spill_dir: str | os.PathLike[str] | None
) -> dict[str, Any]:
    if not 0 < memory_gb <= 2**20:
        raise InvalidArgumentError(f"memory_gb = {memory_gb}: must be above 0, at most 2^20")
    return {
        "memory_bytes": int(memory_gb * 2**30),
        "workers": positive("workers", usable_cpus() if workers is None else workers),
        "spill_dir": os.fspath(tempfile.gettempdir() if spill_dir is None else spill_dir),
    }


def positive(name: str, value: int) -> int:
    if value < 1:
        raise InvalidArgumentError(f"{name} = {value}: must be at least 1")
    return value
