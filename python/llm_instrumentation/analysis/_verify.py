"""Reads every packet of a capture, and tells which of them are damaged."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import CorruptError, StrapError, StrapIOError, UnsupportedError
from .reader import ActivationReader

__all__ = ["DamagedPacket", "Verification", "verify"]

_CALL_ROWS = 4096  # that one call of the library decodes at most
_CALL_BYTES = 64 << 20


@dataclasses.dataclass(frozen=True)
class DamagedPacket:
    """A packet whose values cannot be read.

    Attributes:
        row: in `ActivationReader.index`.
        name: layer and path.
        step: None where unknown.
        offset: where the packet stands in the stream, in bytes.
        reason: what is wrong with it.
    """

    row: int
    name: str
    step: int | None
    offset: int
    reason: str


@dataclasses.dataclass(frozen=True)
class Verification:
    """What reading every packet found.

    Attributes:
        path: of the stream.
        intact: whether nothing is wrong: no damaged packet, and no `problem`.
        running: a process is still writing the stream; packets that its index does not list yet
            were not read.
        packets: how many were read.
        checksums: of these, the ones whose checksum the index has. The others were only decoded.
        bytes: of the packets, headers and names included.
        damaged: the packets whose checksum is wrong, or that cannot be read or decoded.
        problem: what is wrong with the stream or its index as a whole; "" when nothing is.
    """

    path: str
    intact: bool
    running: bool
    packets: int
    checksums: int
    bytes: int
    damaged: tuple[DamagedPacket, ...]
    problem: str


def verify(
    reader: ActivationReader, progress: Callable[[int, int], Any] | None = None
) -> Verification:
    """Reads and decodes every packet, and compares its checksum where the index has one.

    It takes 64 MiB of memory beside the index, or as much as the largest packet decodes to.

    Args:
        reader: of the capture.
        progress: called now and then with the bytes gone through and how many there are.
    """
    return _Reading(reader).verify(progress)


class _Reading:
    def __init__(self, reader: ActivationReader) -> None:
        self._reader = reader
        self._snapshot = reader._snapshot
        self._catalogue = self._snapshot.catalogue
        self._values = np.empty(_CALL_BYTES, np.uint8)

    def verify(self, progress: Callable[[int, int], Any] | None) -> Verification:
        rows = np.flatnonzero(self._catalogue.texts("error")[0] < 0)
        lengths = np.maximum(0, self._catalogue.numbers("length")[rows].astype(np.int64))
        total, done, gone = int(lengths.sum()), 0, 0
        damaged = []
        while done < len(rows):
            try:
                number = self._read(rows[done : done + _CALL_ROWS])
            except (CorruptError, StrapIOError, UnsupportedError) as error:
                damaged.append(self._damage(int(rows[done]), error))
                number = 1
            gone += int(lengths[done : done + number].sum())
            done += number
            if progress is not None:
                progress(gone, total)
        problem = self._reader.problem
        return Verification(
            path=self._reader.path,
            intact=not damaged and not problem,
            running=self._reader.info.live,
            packets=len(rows),
            checksums=int((self._catalogue.numbers("crc32c")[rows] >= 0).sum()),
            bytes=total,
            damaged=tuple(damaged),
            problem=problem,
        )

    def _read(self, rows: npt.NDArray[np.int64]) -> int:
        """Decodes the first of the rows, and as many others as one call takes; how many."""
        native = self._snapshot.native
        numbers, ends = rows.astype(np.uint64), np.empty(len(rows), np.uint64)
        while True:
            address, size = self._values.ctypes.data, len(self._values)
            if number := native.read_many(numbers, address, size, ends):
                return number
            self._values = np.empty(native.decoded_bytes(int(rows[0])), np.uint8)

    def _damage(self, row: int, error: StrapError) -> DamagedPacket:
        step = int(self._catalogue.numbers("step")[row])
        return DamagedPacket(
            row=row,
            name=self._catalogue.name(row),
            step=None if step < 0 else step,
            offset=int(self._catalogue.numbers("offset")[row]),
            reason=str(error),
        )
