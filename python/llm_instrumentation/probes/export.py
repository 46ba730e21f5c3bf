"""Converts a file of snapshots to a Parquet table."""

from __future__ import annotations

import os
from pathlib import Path

from ..errors import InvalidArgumentError
from .jsonl import read_snapshots

__all__ = ["export_snapshots"]


def export_snapshots(source: str | os.PathLike[str], target: str | os.PathLike[str]) -> int:
    """Writes the snapshots of a file as Parquet, compressed with zstd.

    The snapshots are of block devices or of processes, all of one kind. docs/PROBES.md lists the
    columns for each. Few rows are in memory at a time. ``target`` appears, or is replaced, when it
    is complete.

    Returns:
        The number of rows of the table.

    Raises:
        InvalidArgumentError: there are no snapshots; or ``target`` is ``source``, or exists and is
            no regular file.
        CorruptError: a snapshot is of neither kind, or of another kind than the first.
        OSError: a file cannot be read or written.
    """
    from .parquet import write_parquet

    source, target = Path(source), Path(target)
    if target.exists() and (target.samefile(source) or not target.is_file()):
        raise InvalidArgumentError(
            f"{target}: it would be replaced; give a new file, or one to replace"
        )
    return write_parquet(read_snapshots(source), target)
