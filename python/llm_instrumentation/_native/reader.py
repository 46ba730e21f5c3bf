"""Reads a capture: ``strap_reader_open`` to ``strap_reader_close``."""

from __future__ import annotations

import ctypes
import dataclasses
import os
from datetime import datetime, timezone
from typing import TYPE_CHECKING

from ..errors import InvalidArgumentError, InvalidStateError
from .library import (
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
    """An open stream: the `PacketReader` of `analysis.reading` says what the methods do.

    Thread-safe; close it or use it as a context manager.
    """

    _handle = 0

    def __init__(self, path: str | os.PathLike[str], *, ignore_index: bool = False) -> None:
        self.path = os.fspath(path)
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

    @property
    def fetched_bytes(self) -> int:
        return 0

    @property
    def written(self) -> datetime:
        return datetime.fromtimestamp(os.stat(self.path).st_mtime, timezone.utc)

    def fetch_calls(self) -> None:
        """The calls file of a stream on this machine is there, or nowhere."""

    def follow(self, first: int = 0) -> Reader | None:
        handle, error = ctypes.c_uint64(), Error()
        info = RawReaderInfo(struct_size=ctypes.sizeof(RawReaderInfo))
        self._check(self._lib.strap_reader_follow(self._handle, first, handle, info, error), error)
        if not handle.value:
            return None
        following = object.__new__(Reader)
        following.path, following._lib = self.path, self._lib
        following._handle, following.info = handle.value, _info(info)
        return following

    def decoded_bytes(self, row: int) -> int:
        raw, error = RawPacket(struct_size=ctypes.sizeof(RawPacket)), Error()
        self._check(self._lib.strap_reader_at(self._handle, row, raw, error), error)
        return int(raw.decoded_bytes)

    def read_into(self, row: int, address: int, size: int) -> None:
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
        if rows.dtype != "u8" or rows.ndim != 1 or not rows.flags.c_contiguous:
            raise InvalidArgumentError(
                f"rows: {rows.dtype} of shape {list(rows.shape)}: give C-contiguous uint64 of "
                "shape [n]"
            )
        error = Error()
        status = self._lib.strap_reader_prefetch(self._handle, rows.ctypes.data, len(rows), error)
        self._check(status, error)

    def index(self, *columns: str) -> pa.RecordBatchReader:
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
        if self._handle:
            self._lib.strap_reader_close(self._handle, None)
            self._handle = 0
