"""A sparse file in place of a remote stream: packets that were read, and holes for the rest."""

from __future__ import annotations

import os
import struct
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from .._atomic import typed_errors
from .._extras import extra
from ..errors import InvalidStateError
from ._bucket import Bucket, Facts
from ._errors import StorageError
from ._holes import punch_hole
from ._options import StorageOptions
from ._urls import Location

__all__ = ["HEADER", "NO_PACKETS", "PacketTable", "SparseCopy"]

Ints = npt.NDArray[np.int64]

HEADER = struct.Struct("!HI")  # bytes of the name, bytes of the payload
_REQUEST_BYTES = 8 << 20  # at most, of one request
_SHORT_HEADER = 4 << 10  # has most names
_LARGEST_GAP = 64 << 10
_GAPS = 0.05  # of the wanted bytes: so much more is fetched, to save requests
_ATTEMPTS = 5  # to fetch a packet with the right checksum
_CHECKED_BYTES = 1 << 20  # at a time


class PacketTable(NamedTuple):
    """Where the packets of a stream are; one row for each row of the reader.

    Attributes:
        offset: the first byte; -1: the row has no packet.
        length: in bytes: header, name and payload.
        checksum: CRC-32C of the payload; -1: unknown.
    """

    offset: Ints
    length: Ints
    checksum: Ints


NO_PACKETS = PacketTable(*(np.empty(0, np.int64) for _ in range(3)))


class SparseCopy:
    """A file as long as the stream, which has those of its packets that were asked for.

    Packets come in few requests, are checked before anyone reads them, and go again when the copy
    has its limit of bytes. Those that were not used for longest go first. Thread-safe.

    Args:
        path: the file, which it creates.
        bucket: the store.
        location: the stream there.
        facts: what identifies it.
        options: connections and the limit.

    Attributes:
        packets: where they are; the reader sets it.
        limit: the most bytes of packets.
    """

    def __init__(
        self, path: Path, bucket: Bucket, location: Location, facts: Facts, options: StorageOptions
    ) -> None:
        with extra("storage", "Object storage"):
            from google_crc32c import extend

        self._crc32c = extend
        self._path, self._bucket, self._location, self._facts = path, bucket, location, facts
        self.limit = options.cache_bytes
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        os.ftruncate(self._file, facts.size)
        self._pool = ThreadPoolExecutor(options.connections, "strap-fetch")
        self._lock = threading.Lock()  # of what is where
        self._fetching = threading.Lock()  # one thread fetches at a time, over many connections
        self._clock = 0
        self._bytes = 0
        self.set_packets(NO_PACKETS)

    def set_packets(self, packets: PacketTable) -> None:
        """Tells where the packets are. Those that are there already are forgotten."""
        self.packets = packets
        rows = len(packets.offset)
        self._there = np.zeros(rows, bool)
        self._used = np.zeros(rows, np.int64)  # the clock at the last use
        self._held = np.zeros(rows, np.int32)  # readings under way
        self._order = np.argsort(packets.offset, kind="stable")

    def adopt(self, packets: PacketTable) -> None:
        """Takes the rows of the reader, when those that it read at its opening are there.

        Packets that the rows before did not have were found by scanning, so they are there too.
        """
        before, there = self.packets.offset, self.packets.offset[self._there]
        self.set_packets(packets)
        found = np.isin(packets.offset, there) | ~np.isin(packets.offset, before)
        self._there = found & (packets.offset >= 0)
        self._bytes = int(packets.length[self._there].sum())

    def close(self) -> None:
        """Waits for the requests under way, and closes the file. No more packets come."""
        with self._fetching:
            self._pool.shutdown()
            if self._file >= 0:
                os.close(self._file)
                self._file = -1

    def fetch_unlisted(self, begin: int, end: int) -> None:
        """Fetches bytes that no index lists, so that no checksum is known."""
        if begin < end:
            self._fetch(_pieces(begin, end), [(begin, end)])

    def fetch_header(self, offset: int, length: int) -> None:
        """Fetches header and name of a packet of `length` bytes."""
        short = min(length, _SHORT_HEADER)
        self.fetch_unlisted(offset, offset + short)
        name, _ = HEADER.unpack(os.pread(self._file, HEADER.size, offset))
        if short < HEADER.size + name <= length:
            self.fetch_unlisted(offset + short, offset + HEADER.size + name)

    def fitting(self, rows: Ints, most_bytes: Ints | None = None, room: int = 0) -> int:
        """How many of the first rows can be read at a time: at least one.

        Args:
            rows: in the order of reading; a row may come several times in turn.
            most_bytes: of each row, the bytes that the caller takes for it; None: not limited.
            room: bytes that the caller has for them.
        """
        length = self.packets.length[rows]
        again = np.append(False, rows[1:] == rows[:-1])
        fits = np.cumsum(np.where(again, 0, length)) <= self.limit // 2
        if most_bytes is not None:
            fits &= np.cumsum(most_bytes) <= room
        return max(1, int(np.count_nonzero(fits)))

    @contextmanager
    def held(self, rows: Ints) -> Iterator[None]:
        """A block in which the packets of these rows are in the file.

        Raises:
            ObjectChangedError: the stream is another one now.
            StorageError: the packets did not come, or not with the right checksum.
            InvalidStateError: the copy is closed.
        """
        rows = np.unique(rows)
        rows = rows[self.packets.offset[rows] >= 0]
        with self._lock:
            self._held[rows] += 1
            self._clock += 1
            self._used[rows] = self._clock
            there = bool(self._there[rows].all())
        try:
            if not there:
                with self._fetching:
                    if self._file < 0:
                        raise InvalidStateError(f"the reader of {self._location.url} is closed")
                    self._bring(rows)
            yield
        finally:
            with self._lock:
                self._held[rows] -= 1

    def _bring(self, rows: Ints) -> None:
        with self._lock:
            missing = rows[~self._there[rows]]
            missing = missing[np.argsort(self.packets.offset[missing], kind="stable")]
            self._make_room(int(self.packets.length[missing].sum()))
        wrong, seen = missing, np.full(len(missing), -1, np.int64)
        for _ in range(_ATTEMPTS):
            if not len(wrong):
                break
            self._fetch(*_requests(self.packets.offset[wrong], self.packets.length[wrong]))
            found = np.array([self._checksum_of(row) for row in wrong.tolist()], np.int64)
            # The same wrong bytes twice are what the store has. The reader then tells the damage.
            bad = (found >= 0) & (found != seen)
            wrong, seen = wrong[bad], found[bad]
        if len(wrong):
            first = int(self.packets.offset[wrong[0]])
            raise StorageError(
                f"{self._location.url}: {len(wrong)} packets, the first at byte {first:,}, came "
                f"{_ATTEMPTS} times, each time with other bytes: the network changes them; try "
                "again"
            )
        with self._lock:
            self._there[missing] = True
            self._bytes += int(self.packets.length[missing].sum())

    def _checksum_of(self, row: int) -> int:
        """The checksum of a packet's payload if it is wrong, or of the header; -1: it is right."""
        offset, length = int(self.packets.offset[row]), int(self.packets.length[row])
        header = os.pread(self._file, HEADER.size, offset)
        name, payload = HEADER.unpack(header)
        if HEADER.size + name + payload != length:
            return int(self._crc32c(0, header))
        begin, end, sum_ = offset + HEADER.size + name, offset + length, 0
        while begin < end:
            block = os.pread(self._file, min(_CHECKED_BYTES, end - begin), begin)
            sum_, begin = self._crc32c(sum_, block), begin + len(block)
        expected = int(self.packets.checksum[row])
        return -1 if expected in (-1, sum_) else sum_

    def _fetch(self, requests: list[tuple[int, int]], wanted: list[tuple[int, int]]) -> None:
        """Fetches ranges, and writes those parts of them that are wanted, which lie in order."""
        begins = [begin for begin, _ in wanted]

        def one(request: tuple[int, int]) -> None:
            begin, end = request
            content = memoryview(self._bucket.read_range(self._location, begin, end, self._facts))
            first = max(0, int(np.searchsorted(begins, begin, "right")) - 1)
            for k in range(first, len(wanted)):
                low, high = max(wanted[k][0], begin), min(wanted[k][1], end)
                if low >= end:
                    break
                if low < high:
                    with typed_errors(f"cannot write to {self._path}"):
                        _write(self._file, content[low - begin : high - begin], low)

        requested = [self._pool.submit(one, request) for request in requests]
        try:
            for request in requested:
                request.result()
        finally:
            # After an error too no request may write later, over packets that came again.
            for request in requested:
                request.cancel()
            wait(requested)

    def _make_room(self, wanted: int) -> None:
        """Frees the packets that were not used for longest, until the limit has room."""
        if self._bytes + wanted <= self.limit:
            return
        free = np.flatnonzero(self._there & (self._held == 0))
        free = free[np.argsort(self._used[free], kind="stable")]
        # A quarter more than needed, so that the next packets find room too.
        goal = self._bytes + wanted - self.limit + self.limit // 4
        length = self.packets.length[free]
        gone = free[: int(np.searchsorted(np.cumsum(length), goal)) + 1]
        if not len(gone):
            return
        self._there[gone] = False
        self._bytes -= int(self.packets.length[gone].sum())
        self._punch(gone)

    def _punch(self, gone: Ints) -> None:
        """Punches the whole holes that freed packets are in, because blocks have many packets."""
        there = self._order[self._there[self._order]]
        begin, end = self.packets.offset[there], self.packets.offset[there]
        end = end + self.packets.length[there]
        # Hole k lies before packet k of those that are there.
        holes = np.unique(np.searchsorted(begin, self.packets.offset[gone]))
        low = np.append(0, end)[holes]
        high = np.append(begin, self._facts.size)[holes]
        for first, last in zip(low.tolist(), high.tolist(), strict=True):
            punch_hole(self._file, first, last - first, str(self._path))


def _requests(offset: Ints, length: Ints) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """The ranges to fetch for packets in the order of the stream, and those that are wanted.

    Small gaps between packets are fetched too, the smallest first.
    """
    end = offset + length
    gaps = offset[1:] - end[:-1]
    order = np.argsort(gaps, kind="stable")
    within = np.cumsum(gaps[order]) <= _GAPS * length.sum()
    joined = np.zeros(len(gaps), bool)
    joined[order[within & (gaps[order] <= _LARGEST_GAP)]] = True
    requests = []
    for low, high in _runs(offset, end, joined):
        requests += _pieces(low, high)
    return requests, _runs(offset, end, gaps == 0)


def _pieces(begin: int, end: int) -> list[tuple[int, int]]:
    """Splits a range into requests."""
    return [(at, min(at + _REQUEST_BYTES, end)) for at in range(begin, end, _REQUEST_BYTES)]


def _runs(begin: Ints, end: Ints, joined: npt.NDArray[np.bool_]) -> list[tuple[int, int]]:
    """Joins ranges to the ones before them where `joined` says so."""
    first = np.append(True, ~joined)
    last = np.append(~joined, True)
    return list(zip(begin[first].tolist(), end[last].tolist(), strict=True))


def _write(descriptor: int, content: memoryview, offset: int) -> None:
    while len(content):
        written = os.pwrite(descriptor, content, offset)
        content, offset = content[written:], offset + written
