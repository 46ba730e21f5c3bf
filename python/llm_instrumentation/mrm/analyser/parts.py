"""Analyses a trace in parts, in any process or on any machine, and merges the results.

A part is some consecutive row groups of the trace. docs/howto/traces-in-parts.md shows how to use
it, and docs/MEMORY_TRACES.md describes the files of partial analyses.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from ..._native import trace as native
from ...errors import InvalidArgumentError
from ...progress.bars import rows_bar
from ..trace_reader import reader_of_row_groups
from .analysing import (
    READ_COLUMNS,
    SUMMARY_TABLES,
    converter,
    options_of,
    reasons_of_empty,
    warn_of_empty,
)
from .row_groups import RowGroups

StrPath = str | os.PathLike[str]


def split_trace(trace: StrPath, parts: int) -> list[range]:
    """Cuts a trace into parts of whole row groups, with about equally many rows.

    Equal traces are cut at equal places. A trace with fewer row groups than ``parts`` has parts
    without rows.

    Args:
        trace: a Parquet file, or a folder with ``trace.parquet`` or other Parquet files.
        parts: the number of parts.

    Returns:
        For each part its row groups, for :func:`analyse_part`. They count over all files of a
        folder, in the order of their names.

    Raises:
        InvalidArgumentError: ``parts`` is below 1, or a column is missing.
        FileNotFoundError: there is no such file, or no Parquet file in the folder.
        CorruptError: a file is damaged.
    """
    if parts < 1:
        raise InvalidArgumentError(f"parts = {parts}: must be at least 1")
    return RowGroups.of(Path(trace)).split(parts)


def analyse_part(
    trace: StrPath,
    row_groups: range,
    output: StrPath,
    *,
    memory_gb: float = 0.5,
    workers: int | None = None,
    spill_dir: StrPath | None = None,
) -> int:
    """Writes a partial analysis: what :func:`merge_parts` needs of a part of a trace.

    Args:
        trace: as for :func:`split_trace`.
        row_groups: the row groups of the part, such as ``range(0, 8)``.
        output: the file to write. It appears when it is whole, and replaces one of that name.
        memory_gb: as for :func:`~llm_instrumentation.mrm.compute_all`.
        workers: as for :func:`~llm_instrumentation.mrm.compute_all`.
        spill_dir: as for :func:`~llm_instrumentation.mrm.compute_all`.

    Returns:
        The number of rows of the part.

    Raises:
        InvalidArgumentError: the trace does not have these row groups, or as for
            :func:`~llm_instrumentation.mrm.compute_all`.
        FileNotFoundError, CorruptError, NoSpaceError: as for
            :func:`~llm_instrumentation.mrm.compute_all`.
    """
    path = Path(trace)
    whole = RowGroups.of(path)
    number = len(whole.rows)
    if row_groups.step != 1 or not 0 <= row_groups.start <= row_groups.stop <= number:
        raise InvalidArgumentError(
            f"row_groups = {row_groups}: must ascend by 1, within the {number} of {path}"
        )
    options = {
        **options_of(memory_gb, workers, spill_dir),
        "trace": {
            "fingerprint": whole.fingerprint,
            "rows": whole.before(number),
            "bytes": whole.bytes,
        },
        "first_row": whole.before(row_groups.start),
        "end_row": whole.before(row_groups.stop),
        "rows_kept": whole.overlap,
    }
    with rows_bar("analysing", options["end_row"] - options["first_row"]) as progress:

        def write(ordered: bool) -> int:
            reader = reader_of_row_groups(path, row_groups, READ_COLUMNS)
            return native.partial(reader, output, {**options, "ordered": ordered}, progress)

        try:
            return write(ordered=True)
        except InvalidArgumentError:  # a row is late, or invalid: then this raises it again
            return write(ordered=False)


def merge_parts(
    parts: Sequence[StrPath],
    *,
    as_arrow: bool = False,
    memory_gb: float = 0.5,
    workers: int | None = None,
    spill_dir: StrPath | None = None,
) -> dict[str, Any]:
    """Computes all ten tables of a trace from the partial analyses of its parts.

    The tables equal those of :func:`~llm_instrumentation.mrm.compute_all`.

    Args:
        parts: the files that :func:`analyse_part` wrote for all parts of one trace, in any order.
        as_arrow: as for :func:`~llm_instrumentation.mrm.compute_all`.
        memory_gb: as for :func:`~llm_instrumentation.mrm.compute_all`.
        workers: as for :func:`~llm_instrumentation.mrm.compute_all`.
        spill_dir: as for :func:`~llm_instrumentation.mrm.compute_all`.

    Returns:
        A table for each name in :data:`SUMMARY_TABLES`, as for
        :func:`~llm_instrumentation.mrm.compute_all`.

    Raises:
        InvalidArgumentError: a part is missing, is given twice, overlaps another one, or is of
            another trace. The message names the files and rows.
        UnsupportedError: a file has another version of the format.
        CorruptError: a file is damaged, or is no partial analysis.
        FileNotFoundError: there is no such file.
        NoSpaceError: the disk of ``spill_dir`` is full.
        MissingExtraError: pandas is not installed, and ``as_arrow`` is False.
    """
    give = converter(as_arrow)
    tables, support = merged(parts, options_of(memory_gb, workers, spill_dir))
    warn_of_empty(reasons_of_empty(support, SUMMARY_TABLES))
    return {name: give(table) for name, table in tables.items()}


def merged(
    parts: Sequence[StrPath], options: dict[str, Any]
) -> tuple[dict[str, pa.Table], pa.Table]:
    """The ten tables by name, and the table ``support`` of libstrap."""
    with rows_bar("merging") as progress:
        paths = [os.fspath(part) for part in parts]
        return native.merge(paths, list(SUMMARY_TABLES), options, progress)
