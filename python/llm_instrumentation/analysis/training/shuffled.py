"""Rows on disk in a random order: each order of all rows is equally likely.

The rows are dealt to buckets: each row goes to a random one. The buckets stand one behind the other
in one file, and rows have a fixed width. A bucket fits into memory, and its rows are put in a
random order when it is read. So the rows are read once and written once, with little memory.
"""

from __future__ import annotations

import collections
import contextlib
import fcntl
import itertools
import json
import math
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from ..._atomic import typed_errors
from ..._files import replacing
from ..._json import load_json_file
from ..._pages import units
from ..._parsing import parsing
from ...errors import InvalidArgumentError, NoSpaceError
from ..reading.elements import torch_dtype
from ..token_rows.dataset_tokens import Batch
from .direct_file import BLOCK, DirectFile
from .recycled import Recycled

__all__ = ["Field", "ShuffledEpoch", "ShuffledRows", "void"]

_FORMAT, _VERSION = "libstrap.shuffled", 1
_WINDOW_BYTES = 8 << 20  # of rows that are dealt at once
_BUCKET_BYTES = 24 << 20  # of a bucket, on average
_PENDING_BYTES = 24 << 20  # of rows that wait for the rest of their blocks
_WRITING_BYTES = 8 << 20  # of blocks that wait for the disk
_WRITERS = 4  # threads; a disk that reads and writes at once is slower with fewer
_SAVED_BYTES = 1 << 30  # that are dealt before they are made durable
_GATHERED_BYTES = 256 << 10  # of rows in their order, which the processor's caches hold

Ints = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]


class Field(NamedTuple):
    """A part of a row: the vector of a layer, or a column.

    Attributes:
        name: the layer or column.
        dtype: its type, by torch's name.
        shape: its shape.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * torch_dtype(self.dtype).itemsize


class ShuffledRows:
    """A folder with rows that are dealt to buckets.

    Args:
        folder: it is created. If it has these rows already, or a part of them, they are used.
        identity: what the rows are; a folder with other rows is refused.
        fields: the parts of a row.
        rows: how many rows.
        seed: of the order.

    Attributes:
        fields: as given.
        row_bytes: bytes of a row.

    Raises:
        InvalidArgumentError: the folder has something else.
    """

    def __init__(
        self,
        folder: Path,
        identity: Mapping[str, Any],
        fields: Sequence[Field],
        rows: int,
        seed: int,
    ) -> None:
        self._folder = folder
        self.fields = list(fields)
        self._rows = rows
        self._seed = seed
        self.row_bytes = sum(field.bytes for field in fields)
        self._window = max(1, _WINDOW_BYTES // self.row_bytes)
        self._manifest = {
            "format": _FORMAT,
            "version": _VERSION,
            "identity": dict(identity),
            "rows": rows,
            "record_bytes": self.row_bytes,
            "block_bytes": BLOCK,
            "window_rows": self._window,
            "fields": [[field.name, field.dtype, list(field.shape)] for field in fields],
        }
        self._buckets = max(1, math.ceil(rows * self.row_bytes / _BUCKET_BYTES))
        self._dealt = 0  # rows that are on disk
        self._counts: Ints = np.zeros(0, np.int64)  # rows of each bucket
        with typed_errors(f"cannot read {self._folder}"):
            self._check()

    @property
    def path(self) -> Path:
        """The file of all rows. Each row is the bytes of its fields, one after the other."""
        return self._folder / "rows.bin"

    @property
    def complete(self) -> bool:
        """Whether all rows are in the file."""
        return len(self._counts) > 0 and self._dealt == self._rows

    def _check(self) -> None:
        """Reads the progress of the folder."""
        manifest = self._folder / "manifest.json"
        if not manifest.exists():
            if self._folder.exists() and {one.name for one in self._folder.iterdir()} - {"lock"}:
                raise InvalidArgumentError(
                    f"{self._folder} has other files: give scratch= another folder"
                )
            return
        with parsing(manifest, "is no manifest of shuffled rows", kind=InvalidArgumentError):
            found = load_json_file(manifest)
            counts, dealt = np.array(found.pop("bucket_rows"), np.int64), found.pop("dealt")
        fits = counts.shape == (self._buckets,) and counts.sum() == self._rows
        fits &= type(dealt) is int and 0 <= dealt <= self._rows
        if found != json.loads(json.dumps(self._manifest)) or not fits or counts.min() < 0:
            raise InvalidArgumentError(
                f"{self._folder} has rows of another data set: remove it, or give scratch= another "
                "folder"
            )
        self._counts, self._dealt = counts, dealt

    def _save(self, dealt: int) -> None:
        self._dealt = dealt
        content = {**self._manifest, "bucket_rows": self._counts.tolist(), "dealt": dealt}
        with replacing(self._folder / "manifest.json") as partial:
            partial.write_text(json.dumps(content) + "\n")

    def _places(self) -> Ints:
        """The place of each bucket in the file, and the end of the file."""
        blocks = -(-self._counts * self.row_bytes // BLOCK)
        return np.append(0, np.cumsum(blocks * BLOCK))

    # ---- making ---------------------------------------------------------------

    def make(
        self,
        windows: Callable[[Iterable[Ints]], contextlib.AbstractContextManager[Iterator[Batch]]],
        told: Callable[[int, int], None] = lambda done, total: None,
    ) -> None:
        """Deals the rows to the buckets; goes on where it was stopped.

        Args:
            windows: given numbers of rows, window after window, iterates over the windows: dicts
                with a tensor for each field.
            told: receives how many bytes are written, and how many there will be.

        Raises:
            NoSpaceError: (an OSError) the disk has no room for the rows.
        """
        with typed_errors(f"cannot make the folder {self._folder}"):
            self._folder.mkdir(parents=True, exist_ok=True)
        with (
            typed_errors(f"cannot write to {self._folder}"),
            open(self._folder / "lock", "w") as lock,
        ):
            fcntl.flock(lock, fcntl.LOCK_EX)  # another process may be making the same rows
            self._check()
            if not len(self._counts):
                self._counts = self._count(self._rows)
                self._save(0)
            if not self.complete:
                self._make_room()
                self._deal(windows, told)

    def _windows(self, first: int, end: int) -> Iterator[tuple[int, int]]:
        """The windows of rows from `first`, the beginning of one, to `end`."""
        for begin in range(first, end, self._window):
            yield begin, min(begin + self._window, end)

    def _buckets_of(self, first: int, end: int) -> Ints:
        """The bucket of each row of a window."""
        random = np.random.default_rng((self._seed, first))
        return random.integers(self._buckets, size=end - first)

    def _count(self, end: int) -> Ints:
        """How many of the first rows are in each bucket."""
        counts = np.zeros(self._buckets, np.int64)
        for window in self._windows(0, end):
            counts += np.bincount(self._buckets_of(*window), minlength=self._buckets)
        return counts

    def _make_room(self) -> None:
        needed = int(self._places()[-1])
        there = self.path.stat().st_blocks * 512 if self.path.exists() else 0
        free = shutil.disk_usage(self._folder).free + there
        if needed > free:
            raise NoSpaceError(
                f"{self._folder} needs {units.size(needed)} for rows in a random order, "
                f"{units.size(free)} are free: give scratch= a folder on another disk"
            )

    def _deal(
        self,
        windows: Callable[[Iterable[Ints]], contextlib.AbstractContextManager[Iterator[Batch]]],
        told: Callable[[int, int], None],
    ) -> None:
        total = self._rows * self.row_bytes
        parts = list(self._windows(self._dealt, self._rows))
        filled = self._count(self._dealt) * self.row_bytes
        memory = Recycled()
        unsaved = 0
        with (
            _BucketWriter(self.path, self._places(), filled) as writer,
            windows(np.arange(*part) for part in parts) as found,
        ):
            for (first, end), window in zip(parts, found, strict=True):
                bucket = self._buckets_of(first, end)
                order = np.argsort(bucket, kind="stable")
                ordered = self._laid_out(window, order, memory)
                flat, at = ordered.reshape(-1), 0
                for k, count in enumerate(np.bincount(bucket).tolist()):
                    if count:
                        writer.add(k, flat[at : at + count * self.row_bytes])
                        at += count * self.row_bytes
                unsaved += len(flat)
                if unsaved >= _SAVED_BYTES or end == self._rows:
                    writer.flush()
                    self._save(end)
                    unsaved = 0
                told(end * self.row_bytes, total)

    def _laid_out(self, window: Batch, order: Ints, memory: Recycled) -> Bytes:
        """The bytes of the rows of a window in an order, [rows, bytes]."""
        count, size = len(order), self.row_bytes
        place = np.empty_like(order)  # of each row
        place[order] = np.arange(count)
        rows = memory.take(count * size).numpy()
        for field, column in zip(self.fields, self._columns(), strict=True):
            flat = window[field.name].reshape(count, -1).contiguous().view(torch.uint8).numpy()
            target = np.ndarray(count, f"V{field.bytes}", rows, column, size)
            target[place] = void(flat)
        return rows.reshape(count, size)

    def _columns(self) -> list[int]:
        """The place of each field in a row."""
        return list(itertools.accumulate((field.bytes for field in self.fields[:-1]), initial=0))

    # ---- reading --------------------------------------------------------------

    def pieces(self, first: int, rows: int) -> list[tuple[int, int]]:
        """Cuts rows, as they stand in the file, at the ends of the buckets.

        Returns:
            The first row and the number of rows of each piece.
        """
        ends = np.cumsum(self._counts)
        cuts = np.unique(np.concatenate([[first], ends, [first + rows]]))
        cuts = cuts[(cuts >= first) & (cuts <= first + rows)]
        return list(zip(cuts[:-1].tolist(), np.diff(cuts).tolist(), strict=True))

    def _place(self, first: int) -> int:
        """The place of a row in the file."""
        ends = np.cumsum(self._counts)
        k = int(np.searchsorted(ends, first, side="right"))
        before = int(ends[k] - self._counts[k])
        return int(self._places()[k]) + (first - before) * self.row_bytes

    def read(self, file: DirectFile, first: int, count: int, memory: Recycled) -> Bytes:
        """Reads a piece from the file at `path`: the bytes of its rows, [rows, bytes].

        Raises:
            InvalidArgumentError: the file is shorter than it was.
            StrapIOError: (an OSError) the disk cannot read it.
        """
        at, size = self._place(first), count * self.row_bytes
        begin, end = at // BLOCK * BLOCK, -(-(at + size) // BLOCK) * BLOCK
        # Pieces have memory of one size, so it is used again. From 1 MiB on it begins at a page.
        largest = int(self._counts.max()) * self.row_bytes + 2 * BLOCK
        room = memory.take(max(largest, 1 << 20)).numpy()[: end - begin]
        with typed_errors(f"cannot read {self.path}"):
            complete = file.read(room, begin)
        if not complete:
            raise InvalidArgumentError(f"{self.path} is cut off: remove {self._folder}")
        return room[at - begin : at - begin + size].reshape(count, self.row_bytes)

    def split(self, rows: Bytes, into: Mapping[str, torch.Tensor], begin: int) -> None:
        """Copies the fields of rows to their tensors, from row `begin` on."""
        for field, column in zip(self.fields, self._columns(), strict=True):
            target = into[field.name][begin : begin + len(rows)]
            raw = target.reshape(len(rows), -1).view(torch.uint8).numpy()
            raw[:] = rows[:, column : column + field.bytes]


class ShuffledEpoch:
    """The order of rows in one epoch: that of the buckets, and of the rows in each, is random.

    A thread reads a piece while the one before is used.

    Args:
        rows: the rows on disk.
        first, count: which of them.
        seed: numbers that seed the generator.

    Raises:
        StrapIOError: (an OSError) the file of the rows cannot be opened.
    """

    def __init__(self, rows: ShuffledRows, first: int, count: int, seed: tuple[int, ...]) -> None:
        self._rows = rows
        pieces = rows.pieces(first, count)
        order = np.random.default_rng(seed).permutation(len(pieces))
        self._pieces = [pieces[k] for k in order]
        self._ends = np.cumsum([size for _, size in self._pieces])
        self._seed = seed
        self._memory = Recycled()
        self._now = -1  # the piece in memory
        self._bytes: Bytes
        self._order: Ints
        with typed_errors("cannot read rows in a random order"):
            self._file = DirectFile(rows.path)
        self._thread = ThreadPoolExecutor(1, "strap-rows")
        self._coming: dict[int, Future[Bytes]] = {}  # the next piece

    def read(self, first: int, count: int) -> dict[str, torch.Tensor]:
        """Rows `first` to `first + count - 1` of the epoch; fast if they follow the last ones."""
        found = {}
        for field in self._rows.fields:
            room = self._memory.take(count * field.bytes)
            found[field.name] = room.view(torch_dtype(field.dtype)).view(count, *field.shape)
        done = 0
        while done < count:
            k = int(np.searchsorted(self._ends, first + done, side="right"))
            self._load(k)
            begin = first + done - int(self._ends[k]) + len(self._order)
            most = max(1, _GATHERED_BYTES // self._rows.row_bytes)
            places = self._order[begin : begin + min(count - done, most)]
            some = np.take(void(self._bytes), places)
            self._rows.split(some.view(np.uint8).reshape(len(places), -1), found, done)
            done += len(places)
        return found

    def _load(self, k: int) -> None:
        if k == self._now:
            return
        self._now = -1
        self._bytes = np.empty((0, 0), np.uint8)  # its memory is used again
        self._start(k)
        self._bytes = self._coming.pop(k).result()
        if k + 1 < len(self._pieces):
            self._start(k + 1)
        first, count = self._pieces[k]
        self._order = np.random.default_rng((*self._seed, first)).permutation(count)
        self._now = k

    def _start(self, k: int) -> None:
        if k not in self._coming:
            first, count = self._pieces[k]
            self._coming[k] = self._thread.submit(
                self._rows.read, self._file, first, count, self._memory
            )

    def __enter__(self) -> ShuffledEpoch:
        return self

    def __exit__(self, *exc: object) -> None:
        self._thread.shutdown()
        self._file.close()


class _BucketWriter:
    """Appends bytes to buckets, and writes them in blocks, past the page cache if it can.

    Threads write the blocks, while the next ones are filled.

    Args:
        path: the file; it is created, with room for all buckets.
        places: where each bucket begins, and the end of the file; multiples of a block.
        filled: the bytes that are in each bucket already.
    """

    def __init__(self, path: Path, places: Ints, filled: Ints) -> None:
        buckets = len(filled)
        room = _PENDING_BYTES // buckets // BLOCK * BLOCK
        self._room = min(max(room, BLOCK), 1 << 20)
        blocks = buckets + _WRITING_BYTES // self._room
        memory = Recycled().take(blocks * self._room).numpy().reshape(blocks, self._room)
        self._pending, self._free = list(memory[:buckets]), list(memory[buckets:])
        self._used = (filled % self._room).tolist()
        self._begins = (places[:-1] + filled // self._room * self._room).tolist()
        self._writing = collections.deque[tuple[Future[None], Bytes]]()
        self._threads = ThreadPoolExecutor(_WRITERS, "strap-shuffle")
        self._file = DirectFile(path, write=True)
        try:
            self._file.resize(int(places[-1]))
            with open(path, "rb") as file:
                for k, used in enumerate(self._used):
                    file.seek(self._begins[k])
                    self._pending[k][:used] = np.frombuffer(file.read(used), np.uint8)
        except BaseException:
            self._file.close()
            raise

    def add(self, k: int, data: Bytes) -> None:
        """Appends bytes to bucket k.

        Raises:
            OSError: these bytes, or some that were added before, cannot be written.
        """
        while len(data):
            used = self._used[k]
            some = data[: self._room - used]
            self._pending[k][used : used + len(some)] = some
            data = data[len(some) :]
            self._used[k] += len(some)
            if self._used[k] == self._room:
                self._hand_over(k)

    def _hand_over(self, k: int) -> None:
        """Lets a thread write the block of bucket k, and begins another one."""
        if not self._free:
            self._settle(len(self._writing) - 1)
        block = self._pending[k]
        written = self._threads.submit(self._file.write, block, self._begins[k])
        self._writing.append((written, block))
        self._pending[k] = self._free.pop()
        self._begins[k] += self._room
        self._used[k] = 0

    def _settle(self, most: int) -> None:
        """Waits until at most some blocks are not written yet."""
        while len(self._writing) > most:
            written, block = self._writing.popleft()
            written.result()
            self._free.append(block)

    def flush(self) -> None:
        """Makes durable what was appended.

        Raises:
            OSError: some of it cannot be written.
        """
        self._settle(0)
        for k, used in enumerate(self._used):
            if used:
                self._file.write(self._pending[k][: -(-used // BLOCK) * BLOCK], self._begins[k])
        self._file.sync()

    def __enter__(self) -> _BucketWriter:
        return self

    def __exit__(self, *exc: object) -> None:
        self._threads.shutdown(cancel_futures=True)
        self._file.close()


def void(rows: Bytes) -> npt.NDArray[np.void]:
    """Rows of bytes, each as one value, which numpy copies at once."""
    found: npt.NDArray[np.void] = rows.view(f"V{rows.shape[1]}").reshape(-1)
    return found
