"""Rows on disk in a random order: each order of all rows is equally likely.

Two passes over the rows, with little memory. The first deals each row to a random bucket, which is
a file. The second reads each bucket, puts its rows in a random order, and appends them to the file
of all rows. Rows have a fixed width there, so any of them can be read.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from .._files import replacing
from ..errors import InvalidArgumentError, NoSpaceError
from ._elements import torch_dtype

__all__ = ["Field", "ShuffledRows"]

_FORMAT, _VERSION = "libstrap.shuffled", 1
_BUCKET_BYTES = 64 << 20  # of a bucket, on average
_DEALT, _ORDERED = 1, 2  # the passes, in the seeds of their generators

Ints = npt.NDArray[np.int64]
Batch = Mapping[str, Any]


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
    """A folder with rows in a random order.

    Args:
        folder: it is created. If it has these rows already, or a part of them, they are used.
        identity: what the rows are; a folder with other rows is refused.
        fields: the parts of a row.
        rows: how many rows.
        seed: of the order.

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
        self._fields = list(fields)
        self._rows = rows
        self._seed = seed
        self.record_bytes = sum(field.bytes for field in fields)
        self.buckets = max(1, math.ceil(rows * self.record_bytes / _BUCKET_BYTES))
        self._manifest = {
            "format": _FORMAT,
            "version": _VERSION,
            "identity": dict(identity),
            "rows": rows,
            "record_bytes": self.record_bytes,
            "buckets": self.buckets,
            "fields": [[field.name, field.dtype, list(field.shape)] for field in fields],
        }
        self._progress = self._none()
        self._check()

    @property
    def path(self) -> Path:
        """The file of all rows. Each row is the bytes of its fields, one after the other."""
        return self._folder / "rows.bin"

    @property
    def complete(self) -> bool:
        """Whether all rows are in the file."""
        return bool(self._progress["ordered"] == self.buckets)

    def _none(self) -> dict[str, Any]:
        """The progress of a folder in which nothing is done.

        `read` rows are dealt to the buckets, which then have `sizes` bytes. If the machine was not
        booted since, these bytes are still there. Once the rows are `dealt`, they are on disk. Then
        the rows of the first `ordered` buckets are in the file of all rows.
        """
        sizes = [0] * self.buckets
        return {"read": 0, "sizes": sizes, "boot": _boot(), "dealt": False, "ordered": 0}

    def _check(self) -> None:
        """Reads the progress of the folder."""
        manifest = self._folder / "manifest.json"
        if not manifest.exists():
            if self._folder.exists() and {one.name for one in self._folder.iterdir()} - {"lock"}:
                raise InvalidArgumentError(
                    f"{self._folder} has other files: give scratch= another folder"
                )
            return
        try:
            found = json.loads(manifest.read_text())
            progress = found.pop("progress")
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise InvalidArgumentError(
                f"{manifest} is no manifest of shuffled rows: {error!r}"
            ) from error
        if found != json.loads(json.dumps(self._manifest)):
            raise InvalidArgumentError(
                f"{self._folder} has rows of another data set: remove it, or give scratch= another "
                "folder"
            )
        self._progress = progress
        if not progress["dealt"] and progress["boot"] != _boot():
            self._progress = self._none()

    def _save(self, *, durable: bool = True, **progress: Any) -> None:
        self._progress.update(progress)
        content = {**self._manifest, "progress": self._progress}
        # Where a file system orders its writes, to sync the manifest is to wait for all buckets.
        with replacing(self._folder / "manifest.json", durable=durable) as partial:
            partial.write_text(json.dumps(content, indent=1) + "\n")

    # ---- making ---------------------------------------------------------------

    def make(
        self,
        windows: Callable[[int], Any],
        told: Callable[[int, int], None] = lambda done, total: None,
    ) -> None:
        """Deals the rows to buckets and puts these in order; goes on where it was stopped.

        Args:
            windows: given the number of rows that were dealt before, iterates over the rest: dicts
                with a tensor for each field.
            told: receives how many bytes are written, and how many there will be.

        Raises:
            NoSpaceError: (an OSError) the disk has no room for the rows.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        with open(self._folder / "lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # another process may be making the same rows
            if (self._folder / "manifest.json").exists():
                self._check()
            else:
                self._save()
            if not self._progress["dealt"]:
                self._make_room()
                self._deal(windows, told)
            if not self.complete:
                self._order(told)

    def _make_room(self) -> None:
        needed = self._rows * self.record_bytes + _BUCKET_BYTES - sum(self._progress["sizes"])
        free = shutil.disk_usage(self._folder).free
        if needed > free:
            raise NoSpaceError(
                f"{self._folder} needs {needed / 1e9:.1f} GB for rows in a random order, "
                f"{free / 1e9:.1f} GB are free: give scratch= a folder on another disk"
            )

    def _bucket(self, k: int) -> Path:
        return self._folder / f"bucket-{k}.bin"

    def _deal(self, windows: Callable[[int], Any], told: Callable[[int, int], None]) -> None:
        total = 2 * self._rows * self.record_bytes
        read, sizes = self._progress["read"], list(self._progress["sizes"])
        files = [open(self._bucket(k), "ab", buffering=0) for k in range(self.buckets)]  # noqa: SIM115
        try:
            for file, size in zip(files, sizes, strict=True):
                file.truncate(size)  # what was written after the progress was saved
            for window in windows(read):
                records = self._records(window)
                random = np.random.default_rng((self._seed, _DEALT, read))
                bucket = random.integers(self.buckets, size=len(records))
                order = np.argsort(bucket, kind="stable")
                sorted_records = records[order]
                ends = np.searchsorted(bucket[order], np.arange(self.buckets + 1))
                for k, file in enumerate(files):
                    part = sorted_records[ends[k] : ends[k + 1]]
                    _write(file, part)
                    sizes[k] += part.nbytes
                read += len(records)
                self._save(durable=False, read=read, sizes=sizes)
                told(sum(sizes), total)
            for file in files:
                os.fsync(file.fileno())
            self._save(dealt=True)
        finally:
            for file in files:
                file.close()

    def _order(self, told: Callable[[int, int], None]) -> None:
        sizes = self._progress["sizes"]
        total = 2 * self._rows * self.record_bytes
        with open(self.path, "r+b" if self.path.exists() else "w+b", buffering=0) as file:
            for k in range(self._progress["ordered"], self.buckets):
                raw = np.fromfile(self._bucket(k), np.uint8)
                records = raw.reshape(-1, self.record_bytes)
                random = np.random.default_rng((self._seed, _ORDERED, k))
                file.seek(sum(sizes[:k]))
                _write(file, records[random.permutation(len(records))])
                os.fsync(file.fileno())
                self._save(ordered=k + 1)
                self._bucket(k).unlink()
                told(total // 2 + sum(sizes[: k + 1]), total)

    def _records(self, window: Batch) -> npt.NDArray[np.uint8]:
        parts = [_bytes(window[field.name]) for field in self._fields]
        return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1)

    # ---- reading --------------------------------------------------------------

    def read(self, first: int, count: int) -> dict[str, torch.Tensor]:
        """Reads rows that stand next to each other.

        Raises:
            InvalidArgumentError: the file is shorter than it was.
        """
        pin = torch.cuda.is_available()
        records = torch.empty((count, self.record_bytes), dtype=torch.uint8, pin_memory=pin)
        view = records.numpy().reshape(-1).data
        at, done = first * self.record_bytes, 0
        with open(self.path, "rb", buffering=0) as file:
            while done < len(view):
                got = os.preadv(file.fileno(), [view[done:]], at + done)
                if got == 0:
                    raise InvalidArgumentError(f"{self.path} is cut off: remove {self._folder}")
                done += got
        found, column = {}, 0
        for field in self._fields:
            part = records[:, column : column + field.bytes].contiguous()
            shape = (count, *field.shape)
            found[field.name] = part.view(torch_dtype(field.dtype)).reshape(shape)
            column += field.bytes
        return found


def _boot() -> str:
    """What names the running kernel since it was booted."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _bytes(values: torch.Tensor) -> npt.NDArray[np.uint8]:
    """The bytes of each row, [rows, bytes]."""
    flat = values.reshape(len(values), -1).contiguous()
    found: npt.NDArray[np.uint8] = flat.view(torch.uint8).numpy()
    return found


def _write(file: Any, data: npt.NDArray[np.uint8]) -> None:
    left = np.ascontiguousarray(data).reshape(-1).data
    while len(left):
        left = left[file.write(left) :]
