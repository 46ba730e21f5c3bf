"""Writes snapshots as lines of JSON, and reads them from JSON or Parquet."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from .._json import load_json
from ..errors import CorruptError, InvalidArgumentError

__all__ = ["SnapshotWriter", "read_snapshots"]


class SnapshotWriter:
    """Appends snapshots to a file as lines of JSON.

    A killed program loses at most the lines since the last flush. A full disk can leave an
    incomplete last line. Opening the file again ends that line, so that readers skip only it.

    Args:
        path: the file; created if it is missing.
        flush_every: number of lines that are written together.
        fsync: wait at each flush until the lines are on the disk.

    Raises:
        InvalidArgumentError: ``flush_every`` is below 1.
        OSError: the file cannot be opened.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, flush_every: int = 12, fsync: bool = False
    ) -> None:
        if flush_every < 1:
            raise InvalidArgumentError(f"flush_every = {flush_every}: give 1 or more lines")
        self._every, self._fsync = flush_every, fsync
        self._lines: list[bytes] = []
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        end = os.lseek(self._fd, 0, os.SEEK_END)
        if end > 0 and os.pread(self._fd, 1, end - 1) != b"\n":
            self._lines.append(b"\n")

    def write(self, snapshot: Mapping[str, Any]) -> None:
        """Adds a line.

        Raises:
            OSError: the disk is full or failing. The lines stay in memory, without a limit, and the
                next flush tries them again. Close the writer to prevent that.
        """
        self._lines.append(json.dumps(snapshot, separators=(",", ":")).encode() + b"\n")
        if len(self._lines) >= self._every:
            self.flush()

    def flush(self) -> None:
        """Writes the lines that are in memory.

        Raises:
            OSError: as for :meth:`write`.
        """
        left = b"".join(self._lines)
        try:
            while left:
                left = left[os.write(self._fd, left) :]
        finally:
            self._lines = [left] if left else []
        if self._fsync:
            os.fsync(self._fd)

    def close(self) -> None:
        """Flushes and closes the file. A second call does nothing.

        Raises:
            OSError: the lines could not be written; the file is closed nevertheless.
        """
        if self._fd < 0:
            return
        try:
            self.flush()
        finally:
            fd, self._fd = self._fd, -1
            os.close(fd)

    def __enter__(self) -> SnapshotWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def read_snapshots(path: str | os.PathLike[str]) -> Iterator[dict[str, Any]]:
    """The snapshots of a file, in its order: lines of JSON, or Parquet of ``export_snapshots``.

    Lines that are no complete snapshot are skipped, for example those of a killed writer. A warning
    gives their number and the first of them.

    Raises:
        CorruptError: the file has lines, but none of them is a snapshot; or it is Parquet, but not
            of snapshots.
        OSError: the file cannot be read.
    """
    bad: list[int] = []
    good = 0
    with Path(path).open("rb") as file:
        if file.peek(4)[:4] == b"PAR1":
            from .parquet import read_parquet

            yield from read_parquet(Path(path))
            return
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                snapshot = load_json(line)
            except ValueError:
                snapshot = None
            if not isinstance(snapshot, dict) or "timestamp" not in snapshot:
                bad.append(number)
                continue
            good += 1
            yield snapshot
    if bad and not good:
        raise CorruptError(f"{path}: none of its {len(bad)} lines is a snapshot")
    if bad:
        warnings.warn(
            f"{path}: {len(bad)} lines are no snapshots, the first of them line {bad[0]}",
            stacklevel=2,
        )
