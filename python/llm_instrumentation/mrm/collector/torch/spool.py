"""Rows of a traced process on their way to disk, forty bytes each.

While the model runs a row is what the tracer knew at that moment and nothing is computed from
it. Only at the end is it known which storages held weights and which the cache, so that is
when the rows become a trace (:mod:`.trace`).
"""

from __future__ import annotations

import os
import struct
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

__all__ = ["ROW", "ROW_BYTES", "ROW_TYPE", "Spool"]

#: time (ns), address, length (bytes), region (a word of :mod:`.regions`), and twice the
#: operator's number, one more for a store.
ROW = struct.Struct("<qQqqq")
ROW_BYTES = ROW.size
ROW_TYPE = np.dtype(
    [("time", "<i8"), ("address", "<u8"), ("length", "<i8"), ("region", "<i8"), ("code", "<i8")]
)


class Spool:
    """A file without a name for rows, in blocks of one thread each. Any thread may write.

    Attributes:
        error: what the operating system said when a block could not be written. The model
            goes on; ``dropped_rows`` counts.
    """

    def __init__(self, folder: Path | None) -> None:
        """Makes the file on the disk of a folder; None: where temporary files go."""
        self._file: BinaryIO = tempfile.TemporaryFile(  # noqa: SIM115 - closed by close()
            buffering=0, dir=folder
        )
        self._lock = threading.RLock()  # a finaliser may run an operator at any time
        self._blocks: list[tuple[int, int]] = []  # bytes, thread
        self._pid = os.getpid()
        self.error: OSError | None = None
        self.dropped_rows = 0

    @property
    def rows(self) -> int:
        return sum(length for length, _ in self._blocks) // ROW_BYTES

    def write(self, block: memoryview, thread: int) -> None:
        """Appends the rows of ``block``, which may be reused at once."""
        if os.getpid() != self._pid:
            return  # a forked child, which shares the file and is not traced
        with self._lock:
            if self.error is None and not self._file.closed:
                try:
                    self._write_all(block)
                except OSError as error:
                    self.error = error
                else:
                    self._blocks.append((len(block), thread))
                    return
            self.dropped_rows += len(block) // ROW_BYTES

    def _write_all(self, block: memoryview) -> None:
        while block:
            block = block[self._file.write(block) :]

    def blocks(self) -> Iterator[tuple[npt.NDArray[np.void], int]]:
        """The blocks in the order of their writing: rows of :data:`ROW_TYPE`, and a thread."""
        offset = 0
        for length, thread in list(self._blocks):
            yield np.frombuffer(os.pread(self._file.fileno(), length, offset), ROW_TYPE), thread
            offset += length

    def close(self) -> None:
        """Gives the file's room back."""
        self._file.close()
