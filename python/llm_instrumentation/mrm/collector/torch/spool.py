r"""What a traced process leaves on disk while its model runs: rows, and notes about them.

A row is what the tracer knew at that moment. A note says what many rows share: an operator's name,
that a storage holds weights or a cache, when a token began. Rows and notes become a trace at the
end (:mod:`.trace`), when it is known what each storage was for.

The file is only appended to, and a note that rows need lies in front of them. So the file of a
process that was killed is a trace up to where it ends, wherever that is (:mod:`.recover`). All
numbers are little endian::

    file    "mrmspl1\n", record, record, ...
    record  kind (4 bytes), length of the payload (4), thread of the rows or 0 (8), payload

    kind    payload
    ROWS    rows of 40 bytes, see ROW
    STEP    time (ns), phase, token, context, 8 bytes each: what holds from that time on
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
from ....errors import CorruptError
from ...schema import Phase

__all__ = ["NONE", "PHASES", "ROW", "ROW_BYTES", "ROW_TYPE", "SPOOL", "Contents", "Spool"]

#: The suffix of a spool's name, beside the trace that is made of it.
SPOOL = ".spool"

#: time (ns), address, length (bytes), region (a word of :mod:`.regions`), and twice the
#: operator's number, one more for a store.
ROW = struct.Struct("<qQqqq")
ROW_BYTES = ROW.size
ROW_TYPE = np.dtype(
    [("time", "<i8"), ("address", "<u8"), ("length", "<i8"), ("region", "<i8"), ("code", "<i8")]
)

#: What the phase of a step is a position in.
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
        error: what the operating system said when something could not be written. The model
            goes on, later rows are left out, and notes stay in memory.
    """

    def __init__(self, beside: Path | None, **facts: Any) -> None:
        """Makes the file, locked while this process lives, and tells it ``facts``.

        Args:
            beside: the file lies beside this path; None: where temporary files go, without a name.
            facts: see :meth:`tell`.

        Raises:
            OSError: the file cannot be made, or has no room.
        """
        self.path: Path | None = None
        if beside is None:
            self._file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 - closed by close()
        else:
            self.path, descriptor = create_beside(beside, SPOOL)
            self._file = io.FileIO(descriptor, "r+")
        self._lock = threading.RLock()  # a finaliser may run an operator at any time
        # Appending takes no lock: a note may be made anywhere, in the middle of a write too.
        self._notes: deque[bytes] = deque()
        self._pid = os.getpid()
        self.error: OSError | None = None
        self.rows = 0
        self.tell(**facts)
        try:
            self._write_all(_MAGIC, self._take_notes())
        except OSError:
            self.close()
            raise

    def tell(self, **facts: Any) -> None:
        """Notes facts, as JSON has them. A later one replaces, or adds to, one of the same name.

        ``symbols`` and ``devices`` are names by number, ``unseen`` are counts of tensors without
        an address by recorder and operator, ``about`` is how the trace is made.
        """
        self._note(_FACTS, json.dumps(facts).encode())

    def mark_step(
        self, time_ns: int, phase: Phase | None, token: int | None, context: int | None
    ) -> None:
        """Notes what holds from ``time_ns`` on."""
        numbers = (
            time_ns,
            NONE if phase is None else PHASES.index(phase.value),
            NONE if token is None else token,
            NONE if context is None else context,
        )
        self._note(_STEP, struct.pack("<4q", *numbers))

    def mark_weight(self, word: int) -> None:
        """Notes that a storage holds weights."""
        self._note(_WEIGHT, struct.pack("<q", word))

    def mark_cache(self, word: int, region_id: int) -> None:
        """Notes that a storage is one of the cache. What is first said of it counts."""
        self._note(_CACHE, struct.pack("<2q", word, region_id))

    def _note(self, kind: int, payload: bytes) -> None:
        self._notes.append(_HEAD.pack(kind, len(payload), 0) + payload)

    def _take_notes(self) -> bytes:
        taken = []
        while self._notes:
            taken.append(self._notes.popleft())
        return b"".join(taken)

    def write(self, block: memoryview, thread: int) -> None:
        """Appends the notes so far, then the rows of ``block``, which may be reused at once."""
        if os.getpid() != self._pid:
            self._notes.clear()
            return  # a forked child, which shares the file and is not traced
        with self._lock:
            if self.error is not None or self._file.closed:
                return
            notes = self._take_notes()
            head = _HEAD.pack(_ROWS, len(block), thread) if block else b""
            try:
                self._write_all(notes, head, block)
            except OSError as error:
                self._notes.appendleft(notes)
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
        """What was written and noted so far."""
        with self._lock:
            return Contents(self._file, b"".join(self._notes))

    def close(self) -> None:
        """Removes the file, unless this is a forked child, whose parent writes it."""
        if self.path is not None and os.getpid() == self._pid:
            self.path.unlink(missing_ok=True)
        self._file.close()


class Contents:
    """What a spool holds, up to where it ends or makes no sense.

    Attributes:
        facts: see :meth:`Spool.tell`.
        steps: (steps, 4) in order of time: time (ns), position in :data:`PHASES`, token, context.
        weights: (storages,) words.
        cache: (storages, 2) words and region ids.
        threads: of all rows.
        unread_bytes: of the file's end, which are no whole row and no whole note.
    """

    def __init__(self, file: BinaryIO | io.FileIO, held: bytes = b"") -> None:
        """Reads the notes.

        Args:
            file: the spool; has to stay open while :meth:`blocks` is used.
            held: further notes, which are not in the file.

        Raises:
            CorruptError: it is no spool, or one that another version wrote.
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
        # A storage is often noted again, and a step whose write failed may be.
        steps = np.array(self._numbers[_STEP], np.int64).reshape(-1, 4)
        self.steps = steps[np.argsort(steps[:, 0], kind="stable")]
        self.weights = np.unique(np.array(self._numbers[_WEIGHT], np.int64))
        cache = np.array(self._numbers[_CACHE], np.int64).reshape(-1, 2)
        self.cache = cache[np.unique(cache[:, 0], return_index=True)[1]]
        self.threads = set(self._blocks[2::3])

    def _read(self, read: Callable[[int, int], bytes], at: int, end: int) -> int:
        """Takes the records between two offsets, and gives the end of the last whole one."""
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
                    facts = json.loads(read(length, start))
                except ValueError:
                    return at
                _merge(self.facts, facts)
            else:
                self._numbers[kind].frombytes(read(length, start))
            at = start + length
            if not whole:
                return at

    def blocks(self) -> Iterator[tuple[npt.NDArray[np.void], int]]:
        """The blocks in the order of their writing: rows of :data:`ROW_TYPE`, and a thread."""
        for at in range(0, len(self._blocks), 3):
            offset, length, thread = self._blocks[at : at + 3]
            yield np.frombuffer(os.pread(self._file.fileno(), length, offset), ROW_TYPE), thread


def _merge(into: dict[str, Any], facts: dict[str, Any]) -> None:
    for name, value in facts.items():
        if isinstance(value, dict):
            into.setdefault(name, {}).update(value)
        else:
            into[name] = value
