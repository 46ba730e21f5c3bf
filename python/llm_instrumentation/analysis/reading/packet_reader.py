"""What reads the packets of a capture, wherever the capture is."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

from ..._native import ReaderInfo

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["PacketReader"]

_Numbers = npt.NDArray[np.uint64]


class PacketReader(Protocol):
    """The rows of an index, and the packets that they list. Thread-safe.

    `Reader` reads a stream on this machine, `RemoteReader` a stream in a store, `JoinedReader` the
    streams of a run folder. All methods but `close` raise InvalidStateError after `close`.

    Attributes:
        path: the stream or run folder; of a stream in a store its copy on this machine.
        info: facts that opening it found.
    """

    path: str
    info: ReaderInfo

    @property
    def written(self) -> datetime:
        """When a stream was last written, in UTC."""

    @property
    def fetched_bytes(self) -> int:
        """Bytes that were received from a store until now."""

    def fetch_calls(self) -> None:
        """Brings the calls files to this machine. A second call does nothing."""

    def follow(self, first: int = 0) -> PacketReader | None:
        """Opens a second reader, which also has the rows that were written since this one opened.

        Row 0 of the second reader is row `first` of this one. Close both.

        Returns:
            The second reader, or None if nothing changed.

        Raises:
            NotFoundError: the stream at the path is another one, or was cut back.
            InvalidArgumentError: `first` is after the rows that the index lists.
        """

    def index(self, *columns: str) -> pa.RecordBatchReader:
        """The index in batches. docs/STREAM_FORMAT.md lists its columns.

        The result stays valid after the reader is closed. Its memory is copied batch by batch.

        Args:
            columns: the columns to read, as dictionaries if they are texts; none reads all.
        """

    def decoded_bytes(self, row: int) -> int:
        """The length of the decoded payload of a row, in bytes.

        Raises:
            NotFoundError: there is no such row.
        """

    def read_into(self, row: int, address: int, size: int) -> None:
        """Verifies and decodes one row into `size` bytes at `address`.

        It takes less than half the time of `read_many` for a small packet.

        Raises:
            InvalidArgumentError: `size` is not the row's `decoded_bytes`.
            CorruptError: the checksum or the frame is wrong.
        """

    def read_many(
        self, rows: _Numbers, address: int, size: int, ends: _Numbers, *, alignment: int = 1
    ) -> int:
        """Verifies and decodes rows one after the other into `size` bytes, as many as fit.

        Args:
            rows: the rows.
            address: where to write.
            size: bytes from `address` on that are written at most.
            ends: as long as `rows`. It receives the end of each row's elements, in bytes from
                `address`.
            alignment: a power of two. The elements of each row begin at a multiple of it.

        Returns:
            The number of decoded rows. If a row after the first has an error, the call stops
            before that row and does not raise.

        Raises:
            CorruptError: the checksum or frame of the first row is wrong.
        """

    def read_ranges(self, ranges: _Numbers, address: int, size: int) -> int:
        """Decodes parts of packets to their places in `size` bytes at `address`.

        A packet is decoded once for its ranges, and only as far as they need it. Its checksum is
        verified only where all of its payload is read.

        Args:
            ranges: of shape [n, 4], C-contiguous: of each range the row, the first byte and the
                number of bytes of the decoded packet, and the place of the first byte.
            address: where to write.
            size: bytes from `address` on that are written at most.

        Returns:
            The number of decoded ranges. If a range after the first has an error, the call stops
            before that range and does not raise.

        Raises:
            InvalidArgumentError: `ranges` is another array, or the first range reaches outside its
                packet or the `size` bytes.
            CorruptError: a payload that the first range needs is damaged.
        """

    def prefetch(self, rows: _Numbers) -> None:
        """Starts to read packets, and does not wait for them. It is advice.

        Without rows it gives back the memory for packets that were read ahead.

        Args:
            rows: of shape [n], C-contiguous. Rows without a packet are skipped.

        Raises:
            InvalidArgumentError: `rows` is another array.
            NotFoundError: there is no such row.
        """

    def close(self) -> None:
        """Closes the files. A second call does nothing."""
