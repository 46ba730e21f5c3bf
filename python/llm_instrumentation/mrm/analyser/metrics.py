"""Computes the tables of a trace, all together or some by name."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, Literal

import pyarrow as pa

from ...errors import InvalidArgumentError
from ...progress.bars import rows_bar
from ..trace_reader import TraceLike
from .analysing import (
    SUMMARY_TABLES,
    analyse,
    converter,
    options_of,
    positive,
    reasons_of_empty,
    warn_of_empty,
)

#: The tables of :func:`compute_distributions`.
DISTRIBUTION_TABLES = (
    "retention_histogram",
    "retention_cdf",
    "reuse_histogram",
    "reuse_distance_histogram",
    "working_set_over_time",
    "bandwidth_over_time",
    "top_regions",
)


def compute_all(
    trace: TraceLike,
    *,
    engine: Literal["local", "ray"] = "local",
    as_arrow: bool = False,
    memory_gb: float = 0.5,
    workers: int | None = None,
    spill_dir: str | os.PathLike[str] | None = None,
) -> dict[str, Any]:
    """Computes all ten tables of a labelled trace.

    Args:
        trace: a pandas or polars frame, a pyarrow table or reader, a DuckDB relation, a
            Parquet file, or a folder with ``trace.parquet`` or other Parquet files. The rows may
            be in any order; rows in the order of time are read faster.
        engine: "local" analyses in this process. "ray" analyses parts of the trace in tasks of
            Ray, on the cluster that ``ray.init`` was called with, or else on this machine. The
            trace must be a path that all nodes can read. The tables are the same.
        as_arrow: return pyarrow tables instead of pandas frames.
        memory_gb: memory for the values that exact quantiles need, in units of 2^30 bytes. Values
            that do not fit are written to ``spill_dir``. The tables of distinct regions and
            addresses need further memory. With Ray each task has as much.
        workers: the number of threads; by default one per core. With Ray the number of parts; by
            default one per CPU of the cluster.
        spill_dir: a folder on a disk with free space; by default the system's temporary folder.

    Returns:
        A table for each name in :data:`SUMMARY_TABLES`. A table that this kind of trace cannot
        give has its columns but no rows, and a warning says why.

    Raises:
        InvalidArgumentError: a column is missing or holds an invalid value; the message names
            column, row and value. Or the engine is unknown, or "ray" and the trace no path.
        CorruptError: a file is damaged.
        NoSpaceError: the disk of ``spill_dir`` is full.
        MissingExtraError: pandas is not installed, and ``as_arrow`` is False; or Ray is not.
    """
    give = converter(as_arrow)
    names = list(SUMMARY_TABLES)
    if engine == "ray":
        from ._on_ray import compute_on_ray

        tables, support = compute_on_ray(trace, memory_gb, workers, spill_dir)
        reasons = reasons_of_empty(support, names)
    elif engine == "local":
        tables, reasons = _compute(trace, names, options_of(memory_gb, workers, spill_dir))
    else:
        raise InvalidArgumentError(f'engine = {engine!r}: choose "local" or "ray"')
    warn_of_empty(reasons)
    return {name: give(table) for name, table in tables.items()}


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
    per_region, summary = _some(trace, ["retention_per_region", "retention_summary"], as_arrow)
    return per_region, summary


def compute_write_once(trace: TraceLike, *, as_arrow: bool = False) -> Any:
    """The table ``write_once``: the part of the stored addresses that are stored exactly once.

    The ratio of each region is from 0 to 1. Arguments and errors: as for :func:`compute_retention`.
    """
    return _some(trace, ["write_once"], as_arrow)[0]


def compute_read_freq(trace: TraceLike, *, as_arrow: bool = False) -> Any:
    """The table ``read_freq``: the number of loads and stores per region.

    Arguments and errors: as for :func:`compute_retention`.
    """
    return _some(trace, ["read_freq"], as_arrow)[0]


def compute_working_set(trace: TraceLike, *, as_arrow: bool = False) -> tuple[Any, Any]:
    """The tables ``working_set_per_region`` and ``working_set_summary``: pages and bytes.

    They count the distinct pages that are accessed. A page has 4,096 bytes. Arguments and errors:
    as for :func:`compute_retention`.
    """
    per_region, summary = _some(trace, ["working_set_per_region", "working_set_summary"], as_arrow)
    return per_region, summary


def compute_locality(trace: TraceLike, *, as_arrow: bool = False) -> tuple[Any, Any]:
    """The tables ``locality_per_region`` and ``locality_summary``: strides in bytes.

    A stride lies between consecutive accesses to a region. Arguments and errors: as for
    :func:`compute_retention`.
    """
    per_region, summary = _some(trace, ["locality_per_region", "locality_summary"], as_arrow)
    return per_region, summary


def compute_iai(trace: TraceLike, *, as_arrow: bool = False) -> Any:
    """The table ``iai``: times in ns between consecutive accesses to an address, per region type.

    Arguments and errors: as for :func:`compute_retention`.
    """
    return _some(trace, ["iai"], as_arrow)[0]


def compute_distributions(
    trace: TraceLike,
    *,
    bins: int = 100,
    cdf_points: int = 1000,
    windows: int = 200,
    top: int = 20,
    tables: Sequence[str] | None = None,
    as_arrow: bool = False,
    memory_gb: float = 0.5,
    workers: int | None = None,
    spill_dir: str | os.PathLike[str] | None = None,
) -> dict[str, Any]:
    """Computes histograms, CDFs and tables over time of a labelled trace.

    Args:
        trace: as for :func:`compute_all`.
        bins: the number of bins of the retention histogram.
        cdf_points: the most points of the retention CDF per region type.
        windows: the least number of windows in the tables over time; there are at most twice as
            many. The width of a window is a power of two, in ns.
        top: how many regions ``top_regions`` lists, those with the most accesses.
        tables: names of :data:`DISTRIBUTION_TABLES`; all by default. ``reuse_distance_histogram``
            takes the most time.
        as_arrow: return pyarrow tables instead of pandas frames.
        memory_gb: as for :func:`compute_all`.
        workers: as for :func:`compute_all`.
        spill_dir: as for :func:`compute_all`.

    Returns:
        The tables by name. A table that this kind of trace cannot give has no rows, and a warning
        says why.

    Raises:
        InvalidArgumentError: as for :func:`compute_all`, or a name in ``tables`` is unknown.
        CorruptError, NoSpaceError, MissingExtraError: as for :func:`compute_all`.
    """
    names = list(DISTRIBUTION_TABLES if tables is None else tables)
    if unknown := sorted(set(names) - set(DISTRIBUTION_TABLES)):
        raise InvalidArgumentError(
            f"tables {', '.join(unknown)}: choose from {', '.join(DISTRIBUTION_TABLES)}"
        )
    give = converter(as_arrow)
    options = {
        **options_of(memory_gb, workers, spill_dir),
        "bins": positive("bins", bins),
        "cdf_points": positive("cdf_points", cdf_points),
        "windows": positive("windows", windows),
        "top": positive("top", top),
    }
    found, support = _compute(trace, names, options)
    warn_of_empty(support)
    return {name: give(table) for name, table in found.items()}


def compute_all_and_distributions(
    trace: TraceLike, *, bins: int = 100, cdf_points: int = 1000
) -> dict[str, Any]:
    """The tables of :func:`compute_all` and of :func:`compute_distributions`.

    The trace is read once for all of them. Arguments, warnings and errors: as for these functions.
    """
    give = converter(as_arrow=False)
    options = {
        **options_of(0.5, None, None),
        "bins": positive("bins", bins),
        "cdf_points": positive("cdf_points", cdf_points),
        "windows": 200,
        "top": 20,
    }
    tables, reasons = _compute(trace, [*SUMMARY_TABLES, *DISTRIBUTION_TABLES], options)
    for names in (SUMMARY_TABLES, DISTRIBUTION_TABLES):
        warn_of_empty({name: reasons[name] for name in names if name in reasons})
    return {name: give(table) for name, table in tables.items()}


def _compute(
    trace: TraceLike, names: list[str], options: dict[str, Any]
) -> tuple[dict[str, pa.Table], dict[str, str]]:
    """The tables by name, and why this kind of trace cannot give some of them, by name too."""
    with rows_bar("analysing") as progress:
        tables, support = analyse(trace, names, options, progress)
    return tables, reasons_of_empty(support, names)


def _some(trace: TraceLike, names: list[str], as_arrow: bool) -> list[Any]:
    """The tables of these names, in their order.

    Raises:
        InvalidArgumentError: as for :func:`compute_all`, or this kind of trace cannot give one.
    """
    give = converter(as_arrow)
    tables, support = _compute(trace, names, options_of(0.5, None, None))
    for name in names:
        if name in support:
            raise InvalidArgumentError(f"{name}: {support[name]}")
    return [give(tables[name]) for name in names]
