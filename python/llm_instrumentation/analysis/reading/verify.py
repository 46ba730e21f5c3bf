"""Reads every packet of a capture and finds the damaged ones."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from ...errors import CorruptError, StrapError, StrapIOError, UnsupportedError
from ..reader import ActivationReader

__all__ = ["DamagedPacket", "Verification", "verify"]

_CALL_ROWS = 4096  # the most rows that one call of the library decodes
_CALL_BYTES = 64 << 20


@dataclasses.dataclass(frozen=True)
class DamagedPacket:
    """A packet whose values cannot be read.

    Attributes:
        row: the row in `ActivationReader.index`.
        name: layer and path.
        step: None if unknown.
        offset: of the packet in the stream, in bytes.
        reason: the error of reading it.
    """

    row: int
    name: str
    step: int | None
    offset: int
    reason: str


@dataclasses.dataclass(frozen=True)
class Verification:
    """The result of reading every packet.

    Attributes:
        path: path of the stream.
        intact: True if no packet is damaged and `problem` is empty.
        running: a process is still writing the stream; packets that its index does not list yet
            were not read.
        packets: number of packets that were read.
        checksums: number of these whose checksum the index has. The others were only decoded.
        bytes: size of the packets, with headers and names.
        damaged: the packets whose checksum is wrong, or that cannot be read or decoded.
        problem: the damage of the stream or its index as a whole; "" if there is none.
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
    """Reads and decodes every packet, and compares its checksum if the index has one.

    Besides the index it takes 64 MiB of memory, or the size of the largest decoded packet if that
    is more.

    Args:
        reader: the reader of the capture.
        progress: called from time to time with the bytes that were read and the total.
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
        if (streams := self._reader._streams) is not None and (wrong := streams.verify()):
            problem = f"{problem}; {wrong}" if problem else wrong
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
        """Decodes the first row and as many further rows as one call takes; returns how many."""
        packets = self._snapshot.packets
        numbers, ends = rows.astype(np.uint64), np.empty(len(rows), np.uint64)
        while True:
            address, size = self._values.ctypes.data, len(self._values)
            if number := packets.read_many(numbers, address, size, ends):
                return number
            self._values = np.empty(packets.decoded_bytes(int(rows[0])), np.uint8)

    def _damage(self, row: int, error: StrapError) -> DamagedPacket:
        step = int(self._catalogue.numbers("step")[row])
        return DamagedPacket(
            row=row,
            name=self._catalogue.name(row),
            step=None if step < 0 else step,
            offset=int(self._catalogue.numbers("offset")[row]),
            reason=str(error),
        )
