"""Reads a capture: ``strap_reader_open`` to ``strap_reader_close``."""

from __future__ import annotations

import ctypes
import dataclasses
import os
from typing import TYPE_CHECKING

from ..errors import InvalidArgumentError, InvalidStateError
from .library import (
    CODECS,
    DTYPE_NAMES,
    ArrowArrayStream,
    Error,
    RawPacket,
    RawReaderInfo,
    ReaderOptions,
    check,
    library,
)

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import pyarrow as pa

_IGNORE_INDEX = 1
_SCHEMA_BYTES = 64 << 10  # at the beginning of an index; its schema takes less


@dataclasses.dataclass(frozen=True)
class ReaderInfo:
    """Facts that opening a stream found; ``strap_reader_info`` of strap.h describes each."""

    indexed: bool
    rows: int
    packets: int
    scanned: int
    file_bytes: int
    valid_bytes: int
    problem: str
    live: bool = False


@dataclasses.dataclass(frozen=True)
class Packet:
    """One row of a capture; ``strap_packet`` of strap.h describes each field.

    ``shape``, ``dtype`` and ``source_dtype`` are None if the packet was found by scanning.
    """

    row: int
    name: str
    dtype: str | None
    source_dtype: str | None
    codec: str
    shape: tuple[int, ...] | None
    step: int | None
    token: int | None
    call: int
    part: int
    parts: int
    offset: int
    payload_bytes: int
    decoded_bytes: int
    present: bool


def capture_id_of(path: str | os.PathLike[str]) -> str | None:
    """The id of the capture whose stream is at ``path``, or None if there is no index with an id.

    No other capture has the same id. This reads the beginning of the index only.

    Raises:
        InvalidArgumentError: the path contains a zero character.
    """
    if "\0" in os.fspath(path):
        raise InvalidArgumentError(f"path {os.fspath(path)!r} contains a zero character")
    try:
        descriptor = os.open(os.fspath(path) + ".index", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        beginning = os.pread(descriptor, _SCHEMA_BYTES, 0)
    except OSError:  # a folder, a pipe
        return None
    finally:
        os.close(descriptor)
    import pyarrow as pa

    try:
        with pa.ipc.open_stream(pa.py_buffer(beginning)) as index:
            metadata = index.schema.metadata or {}
    except (pa.ArrowException, OSError, ValueError):
        return None
    if metadata.get(b"format") != b"libstrap.index":
        return None
    return metadata.get(b"capture_id", b"").decode("ascii", "replace") or None


def _info(raw: RawReaderInfo) -> ReaderInfo:
    return ReaderInfo(
        indexed=bool(raw.indexed),
        rows=raw.rows,
        packets=raw.packets,
        scanned=raw.scanned,
        file_bytes=raw.file_bytes,
        valid_bytes=raw.valid_bytes,
        problem=raw.problem.decode("utf-8", "replace"),
        live=bool(raw.live),
    )


class Reader:
    """An open stream. Thread-safe; close it or use it as a context manager."""

    def __init__(self, path: str | os.PathLike[str], *, ignore_index: bool = False) -> None:
        self.path = os.fspath(path)
        self._handle = 0
        self._lib = library()
        name = os.fsencode(self.path)
        if b"\0" in name:
            raise InvalidArgumentError(f"path {self.path!r} contains a zero character")
        handle, error = ctypes.c_uint64(), Error()
        options = ReaderOptions(ctypes.sizeof(ReaderOptions), _IGNORE_INDEX if ignore_index else 0)
        info = RawReaderInfo(struct_size=ctypes.sizeof(RawReaderInfo))
        check(self._lib.strap_reader_open(name, options, handle, info, error), error)
        self._handle = handle.value
        self.info = _info(info)

    def follow(self, first: int = 0) -> Reader | None:
        """Opens a second reader, which also has the rows that were written since this one opened.

        Row 0 of the second reader is row ``first`` of this one. Close both.

        Returns:
            The second reader, or None if nothing changed.

        Raises:
            NotFoundError: the stream at the path is another one, or was cut back.
            InvalidArgumentError: ``first`` is after the rows that the index lists.
        """
        handle, error = ctypes.c_uint64(), Error()
        info = RawReaderInfo(struct_size=ctypes.sizeof(RawReaderInfo))
        self._check(self._lib.strap_reader_follow(self._handle, first, handle, info, error), error)
        if not handle.value:
            return None
        following = object.__new__(Reader)
        following.path, following._lib = self.path, self._lib
        following._handle, following.info = handle.value, _info(info)
        return following

    def packet(self, row: int) -> Packet:
        """Describes row ``row``.

        Raises:
            NotFoundError: there is no such row.
        """
        raw, error = RawPacket(struct_size=ctypes.sizeof(RawPacket)), Error()
        self._check(self._lib.strap_reader_at(self._handle, row, raw, error), error)
        name = ctypes.create_string_buffer(raw.name_bytes + 1)
        self._check(self._lib.strap_reader_name(self._handle, row, name, len(name), error), error)
        return Packet(
            row=row,
            name=name.raw[: raw.name_bytes].decode("utf-8"),
            dtype=DTYPE_NAMES.get(raw.dtype),
            source_dtype=DTYPE_NAMES.get(raw.source_dtype),
            codec=CODECS[raw.codec],
            shape=None if raw.ndim < 0 else tuple(raw.shape[: raw.ndim]),
            step=None if raw.step < 0 else raw.step,
            token=None if raw.token < 0 else raw.token,
            call=raw.call,
            part=raw.part,
            parts=raw.parts,
            offset=raw.offset,
            payload_bytes=raw.payload_bytes,
            decoded_bytes=raw.decoded_bytes,
            present=bool(raw.present),
        )

    def decoded_bytes(self, row: int) -> int:
        """The length of the decoded payload of row ``row``, in bytes."""
        raw, error = RawPacket(struct_size=ctypes.sizeof(RawPacket)), Error()
        self._check(self._lib.strap_reader_at(self._handle, row, raw, error), error)
        return int(raw.decoded_bytes)

    def read_into(self, row: int, address: int, size: int) -> None:
        """Verifies and decodes row ``row`` into ``size`` bytes at ``address``.

        Raises:
            InvalidArgumentError: ``size`` is not the row's decoded_bytes.
            CorruptError: the checksum or the frame is wrong.
        """
        error = Error()
        self._check(self._lib.strap_reader_read(self._handle, row, address, size, error), error)

    def read_many(
        self,
        rows: npt.NDArray[np.uint64],
        address: int,
        size: int,
        ends: npt.NDArray[np.uint64],
        *,
        alignment: int = 1,
    ) -> int:
        """Decodes rows one after the other into ``size`` bytes at ``address``, as many as fit.

        Args:
            ends: uint64, as long as ``rows``. It receives the end of each row's elements, in bytes
                from ``address``.
            alignment: a power of two. The elements of each row begin at a multiple of it.

        Returns:
            The number of decoded rows. If a row after the first has an error, the call stops
            before that row and does not raise.

        Raises:
            CorruptError: the checksum or frame of the first row is wrong.
        """
        done, error = ctypes.c_size_t(), Error()
        status = self._lib.strap_reader_read_many(
            self._handle,
            rows.ctypes.data,
            len(rows),
            alignment,
            address,
            size,
            ends.ctypes.data,
            done,
            error,
        )
        self._check(status, error)
        return done.value

    def read_ranges(self, ranges: npt.NDArray[np.uint64], address: int, size: int) -> int:
        """Decodes parts of packets to their places in ``size`` bytes at ``address``.

        A packet is decoded once for its ranges, and only as far as they need it. Its checksum is
        verified only where all of its payload is read.

        Args:
            ranges: uint64 of shape [n, 4], C-contiguous: of each range the row, the first byte and
                the number of bytes of the decoded packet, and the place of the first byte.

        Returns:
            The number of decoded ranges. If a range after the first has an error, the call stops
            before that range and does not raise.

        Raises:
            InvalidArgumentError: ``ranges`` is another array, or the first range reaches outside
                its packet or the ``size`` bytes.
            CorruptError: a payload that the first range needs is damaged.
        """
        if ranges.dtype != "u8" or ranges.shape[1:] != (4,) or not ranges.flags.c_contiguous:
            raise InvalidArgumentError(
                f"ranges: {ranges.dtype} of shape {list(ranges.shape)}: give C-contiguous uint64 "
                "of shape [n, 4]"
            )
        done, error = ctypes.c_size_t(), Error()
        status = self._lib.strap_reader_read_ranges(
            self._handle, ranges.ctypes.data, len(ranges), address, size, done, error
        )
        self._check(status, error)
        return done.value

    def prefetch(self, rows: npt.NDArray[np.uint64]) -> None:
        """Starts to read packets, and does not wait for them; see strap.h. It is advice.

        Without rows it gives back the memory for packets that were read ahead.

        Args:
            rows: uint64 of shape [n], C-contiguous. Rows without a packet are skipped.

        Raises:
            InvalidArgumentError: ``rows`` is another array.
            NotFoundError: there is no such row.
        """
        if rows.dtype != "u8" or rows.ndim != 1 or not rows.flags.c_contiguous:
            raise InvalidArgumentError(
                f"rows: {rows.dtype} of shape {list(rows.shape)}: give C-contiguous uint64 of "
                "shape [n]"
            )
        error = Error()
        status = self._lib.strap_reader_prefetch(self._handle, rows.ctypes.data, len(rows), error)
        self._check(status, error)

    def index(self, *columns: str) -> pa.RecordBatchReader:
        """The index in batches. docs/STREAM_FORMAT.md lists its columns.

        The result stays valid after the reader is closed. It copies a batch from libstrap's memory
        when the batch is read.

        Args:
            columns: the columns to read, as dictionaries if they are texts; none reads all.
        """
        import pyarrow as pa

        stream, error = ArrowArrayStream(), Error()
        if columns:
            names = ",".join(columns).encode()
            status = self._lib.strap_index_columns(self._handle, names, stream, error)
        else:
            status = self._lib.strap_index_export(self._handle, stream, error)
        self._check(status, error)
        return pa.RecordBatchReader._import_from_c(ctypes.addressof(stream))

    def close(self) -> None:
        if self._handle:
            handle, self._handle = self._handle, 0
            error = Error()
            check(self._lib.strap_reader_close(handle, error), error)

    def _check(self, status: int, error: Error) -> None:
        """As `check`; a reader that another thread has closed says so."""
        try:
            check(status, error)
        except InvalidStateError:
            if self._handle:
                raise
            raise InvalidStateError(f"the reader of {self.path} is closed") from None

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_handle", 0):
            self._lib.strap_reader_close(self._handle, None)
            self._handle = 0
