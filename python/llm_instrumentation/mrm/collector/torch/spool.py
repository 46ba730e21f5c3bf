r"""The spool: the file that a traced process writes while its model runs.

It holds rows and marks. A row is what the tracer knew at that moment. A mark says what many rows
share: the name of an operator, that a storage holds weights or a cache, when a token began. At the
end, when the use of each storage is known, :mod:`.trace` turns them into a trace.

The file is only appended to, and a mark stands before the rows that need it. So the file of a
killed process makes a valid trace of everything before its end, at whatever byte it ends
(:mod:`.recover`). All numbers are little endian::

    file    "mrmspl1\n", record, record, ...
    record  kind (4 bytes), length of the payload (4), thread of the rows or 0 (8), payload

    kind    payload
    ROWS    rows of 40 bytes, see ROW
    STEP    time (ns), phase, token, context, 8 bytes each: they hold from that time on
    WEIGHT  the word of a storage, 8 bytes
    CACHE   the word of a storage and its region's id, 8 bytes each
    FACTS   a JSON object: see Spool.tell
"""

from __future__ import annotations

import io
import json
import os
import struct
import tempfile
import threading
from array import array
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from ...._files import create_beside
from ...._json import load_json
from ....errors import CorruptError
from ...schema import Phase

__all__ = ["NONE", "PHASES", "ROW", "ROW_BYTES", "ROW_TYPE", "SPOOL", "Contents", "Spool"]

#: The suffix of a spool's name. The spool lies beside the trace that is made from it.
SPOOL = ".spool"

#: time (ns), address, length (bytes), region (a word of :mod:`.regions`) and code: twice the
#: operator's number, plus 1 for a store.
ROW = struct.Struct("<qQqqq")
ROW_BYTES = ROW.size
ROW_TYPE = np.dtype(
    [("time", "<i8"), ("address", "<u8"), ("length", "<i8"), ("region", "<i8"), ("code", "<i8")]
)

#: The phase of a step is a position in this tuple.
PHASES = tuple(phase.value for phase in Phase)

#: A step without a phase, token or context.
NONE = -1

_MAGIC = b"mrmspl1\n"
_HEAD = struct.Struct("<iIq")
_ROWS, _STEP, _WEIGHT, _CACHE, _FACTS = range(1, 6)
_BYTES = {_ROWS: ROW_BYTES, _STEP: 32, _WEIGHT: 8, _CACHE: 16, _FACTS: 1}


class Spool:
    """The file of a traced process. Any thread may write.

    Attributes:
        path: the file; None: it has no name.
        error: the error of the first failed write, or None. After it the model goes on, further
            rows are dropped, and marks stay in memory.
        rows: how many rows were written.
    """

    def __init__(self, beside: Path | None, **facts: Any) -> None:
        """Makes the file, locked while this process lives, and writes ``facts`` to it.

        Args:
            beside: the file lies beside this path; None: a temporary file without a name.
            facts: see :meth:`tell`.

        Raises:
            OSError: the file cannot be made, or the disk is full.
        """
        self.path: Path | None = None
        if beside is None:
            self._file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 - closed by close()
        else:
            self.path, descriptor = create_beside(beside, SPOOL)
            self._file = io.FileIO(descriptor, "r+")
        self._lock = threading.RLock()  # reentrant: a finaliser may run an operator at any time
        # Appending takes no lock: a mark may come at any moment, even during a write.
        self._marks: deque[bytes] = deque()
        self._pid = os.getpid()
        self.error: OSError | None = None
        self.rows = 0
        self.tell(**facts)
        try:
            self._write_all(_MAGIC, self._take_marks())
        except OSError:
            self.close()
            raise

    def tell(self, **facts: Any) -> None:
        """Adds facts, any values of JSON. A later fact replaces an earlier one of the same name.

        Two dicts of the same name are merged. ``symbols`` and ``devices`` are names by number.
        ``unseen`` counts tensors without an address, and ``taken_whole`` calls whose chosen
        elements could not be found out, both by recorder and operator. ``about`` says how the trace
        is made, ``trace`` is the name of its file and ``run_id`` that of the run.
        """
        self._mark(_FACTS, json.dumps(facts).encode())

    def mark_step(
        self, time_ns: int, phase: Phase | None, token: int | None, context: int | None
    ) -> None:
        """Sets phase, token and context of the rows from ``time_ns`` on; None: there is none."""
        numbers = (
            time_ns,
            NONE if phase is None else PHASES.index(phase.value),
            NONE if token is None else token,
            NONE if context is None else context,
        )
        self._mark(_STEP, struct.pack("<4q", *numbers))

    def mark_weight(self, word: int) -> None:
        """Marks a storage as weights."""
        self._mark(_WEIGHT, struct.pack("<q", word))

    def mark_cache(self, word: int, region_id: int) -> None:
        """Marks a storage as cache. The first mark of a storage counts."""
        self._mark(_CACHE, struct.pack("<2q", word, region_id))

    def _mark(self, kind: int, payload: bytes) -> None:
        self._marks.append(_HEAD.pack(kind, len(payload), 0) + payload)

    def _take_marks(self) -> bytes:
        taken = []
        while self._marks:
            taken.append(self._marks.popleft())
        return b"".join(taken)

    def write(self, block: memoryview, thread: int) -> None:
        """Appends the marks so far, then the rows of ``block``; the caller may reuse ``block``."""
        if os.getpid() != self._pid:
            self._marks.clear()
            return  # a forked child shares the file and is not traced
        with self._lock:
            if self.error is not None or self._file.closed:
                return
            marks = self._take_marks()
            head = _HEAD.pack(_ROWS, len(block), thread) if block else b""
            try:
                self._write_all(marks, head, block)
            except OSError as error:
                self._marks.appendleft(marks)
                self.error = error
            else:
                self.rows += len(block) // ROW_BYTES

    def _write_all(self, *parts: bytes | memoryview) -> None:
        left = [memoryview(part) for part in parts if part]
        while left:
            written = os.writev(self._file.fileno(), left)
            while left and written >= len(left[0]):
                written -= len(left.pop(0))
            if left:
                left[0] = left[0][written:]

    def contents(self) -> Contents:
        """All rows and marks so far."""
        with self._lock:
            return Contents(self._file, b"".join(self._marks))

    def close(self) -> None:
        """Closes the file and removes it. A forked child only closes it: its parent writes it."""
        if self.path is not None and os.getpid() == self._pid:
            self.path.unlink(missing_ok=True)
        self._file.close()


class Contents:
    """The content of a spool, up to its end or to the first record that is not valid.

    Attributes:
        facts: see :meth:`Spool.tell`.
        steps: (steps, 4) int64, sorted by time: time (ns), position in :data:`PHASES`, token,
            context; :data:`NONE` stands for none.
        weights: (storages,) int64: words, sorted.
        cache: (storages, 2) int64: words, sorted by them, and region ids.
        threads: the ids of the threads that have rows.
        unread_bytes: how many bytes at the end of the file are no whole row or mark.
    """

    def __init__(self, file: BinaryIO | io.FileIO, held: bytes = b"") -> None:
        """Reads the marks, and where the rows are.

        Args:
            file: the spool; it has to stay open while :meth:`blocks` is used.
            held: further marks, which are not in the file.

        Raises:
            CorruptError: the file is no spool, or another version wrote it.
        """
        self._file = file
        self._blocks = array("q")  # offset, bytes, thread; three numbers for each block
        self.facts: dict[str, Any] = {}
        self._numbers = {kind: array("q") for kind in (_STEP, _WEIGHT, _CACHE)}
        descriptor = file.fileno()
        end = os.fstat(descriptor).st_size
        magic = os.pread(descriptor, len(_MAGIC), 0)
        if magic != _MAGIC:
            raise CorruptError(f"begins with {magic!r} and not with {_MAGIC!r}")
        at = len(_MAGIC)
        self.unread_bytes = end - self._read(lambda n, at: os.pread(descriptor, n, at), at, end)
        self._read(lambda n, at: held[at : at + n], 0, len(held))
        # A storage is often marked again; a step may be there twice after a failed write.
        steps = np.array(self._numbers[_STEP], np.int64).reshape(-1, 4)
        self.steps = steps[np.argsort(steps[:, 0], kind="stable")]
        self.weights = np.unique(np.array(self._numbers[_WEIGHT], np.int64))
        cache = np.array(self._numbers[_CACHE], np.int64).reshape(-1, 2)
        self.cache = cache[np.unique(cache[:, 0], return_index=True)[1]]
        self.threads = set(self._blocks[2::3])

    def _read(self, read: Callable[[int, int], bytes], at: int, end: int) -> int:
        """Takes the records between two offsets; returns the end of the last whole record."""
        while True:
            head = read(_HEAD.size, at)
            if len(head) < _HEAD.size:
                return at
            kind, length, thread = _HEAD.unpack(head)
            start, unit = at + _HEAD.size, _BYTES.get(kind)
            if unit is None or length % unit:
                return at
            whole = start + length <= end
            if kind == _ROWS:
                length = min(length, end - start) // ROW_BYTES * ROW_BYTES
                self._blocks.extend((start, length, thread))
            elif not whole:
                return at
            elif kind == _FACTS:
                try:
                    _merge(self.facts, load_json(read(length, start)))
                except ValueError:
                    return at
            else:
                self._numbers[kind].frombytes(read(length, start))
            at = start + length
            if not whole:
                return at

    def blocks(self) -> Iterator[tuple[npt.NDArray[np.void], int]]:
        """The blocks in the order of writing: rows of :data:`ROW_TYPE`, and their thread's id."""
        for at in range(0, len(self._blocks), 3):
            offset, length, thread = self._blocks[at : at + 3]
            yield np.frombuffer(os.pread(self._file.fileno(), length, offset), ROW_TYPE), thread


def _merge(into: dict[str, Any], facts: Any) -> None:
    """
    Raises:
        ValueError: the facts have other types than those before them.
    """
    if not isinstance(facts, dict):
        raise ValueError(f"{facts!r} is no object")
    for name, value in facts.items():
        if isinstance(into.get(name, value), dict) != isinstance(value, dict):
            raise ValueError(f"{name!r} is {value!r}")
        if isinstance(value, dict):
            into.setdefault(name, {}).update(value)
        else:
            into[name] = value
