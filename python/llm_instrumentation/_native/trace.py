"""Memory traces: ``strap_trace_parse`` to ``strap_trace_close``.

Batches go in and out as :class:`pyarrow.RecordBatchReader`; nothing is copied into
Python objects on the way.
"""

from __future__ import annotations

import ctypes
import dataclasses
import json
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pyarrow as pa

from ..errors import InvalidArgumentError, StrapError
from .library import ERR_TIMEOUT, ArrowArrayStream, Error, RawTraceCounts, c_string, check, library

#: How long one call works before Python looks at signals and progress again.
_SLICE_MS = 100

Progress = Callable[["Counts"], None]


@dataclasses.dataclass(frozen=True)
class Counts:
    """How far the work has come; see ``strap_trace_counts_t``."""

    done: bool
    rows: int
    skipped: int
    malformed: int
    bytes: int
    total_bytes: int
    unaddressed: int
    renumbered: int


class Trace:
    """A handle on the work over one stream. Thread-safe; close it or use ``with``."""

    def __init__(self, handle: int) -> None:
        self._handle = handle
        self._lib = library()

    def counts(self) -> Counts:
        """The counts so far.

        Raises:
            StrapError: what the work failed with.
        """
        raw, error = RawTraceCounts(struct_size=ctypes.sizeof(RawTraceCounts)), Error()
        check(self._lib.strap_trace_counts(self._handle, raw, error), error)
        return _counts(raw)

    def last_counts(self) -> Counts:
        """The counts so far, also of work that failed."""
        raw, error = RawTraceCounts(struct_size=ctypes.sizeof(RawTraceCounts)), Error()
        self._lib.strap_trace_counts(self._handle, raw, error)
        return _counts(raw)

    def table(self, name: str) -> pa.Table:
        """The table of this name.

        Raises:
            NotFoundError, InvalidStateError: as for :meth:`batches`.
        """
        return self.batches(name).read_all()

    def batches(self, name: str) -> pa.RecordBatchReader:
        """The table of this name, of which large ones are made as they are read.

        Raises:
            NotFoundError: the work makes no such table.
            InvalidStateError: it is not done.
        """
        stream, error = ArrowArrayStream(), Error()
        text = c_string(name, "table")
        check(self._lib.strap_trace_table(self._handle, text, stream, error), error)
        return _reader(stream)

    def run(self, progress: Progress | None = None) -> None:
        """Works to the end; a Python signal handler runs at least every 0.1 s or batch."""
        error = Error()
        while (status := self._lib.strap_trace_run(self._handle, _SLICE_MS, error)) == ERR_TIMEOUT:
            if progress is not None:
                progress(self.counts())
        check(status, error)
        if progress is not None:
            progress(self.counts())

    def close(self) -> None:
        handle, self._handle = self._handle, 0
        if handle:
            error = Error()
            check(self._lib.strap_trace_close(handle, error), error)

    def __enter__(self) -> Trace:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __del__(self) -> None:
        handle, self._handle = getattr(self, "_handle", 0), 0
        if handle:
            self._lib.strap_trace_close(handle, None)


def parse(
    format: str,  # noqa: A002 - the word of strap.h
    path: str | os.PathLike[str],
    options: Mapping[str, Any] | None = None,
) -> tuple[pa.RecordBatchReader, Trace]:
    """Rows of the text at ``path``, parsed as they are read; see ``strap_trace_parse``."""
    out, handle, error = ArrowArrayStream(), ctypes.c_uint64(), Error()
    status = library().strap_trace_parse(
        c_string(format, "format"), _path(path), _options(options), out, handle, error
    )
    check(status, error)
    trace = Trace(handle.value)
    return _typed(_reader(out), trace), trace


def label(
    source: pa.RecordBatchReader, options: Mapping[str, Any] | None = None
) -> tuple[pa.RecordBatchReader, Trace]:
    """Rows with region_type and region_id, as they are read; see ``strap_trace_label``."""
    guard = _Guard(source)
    out, handle, error = ArrowArrayStream(), ctypes.c_uint64(), Error()
    status = library().strap_trace_label(guard.stream(), _options(options), out, handle, error)
    guard.check(status, error)
    trace = Trace(handle.value)
    return _typed(_reader(out), trace, guard), trace


def analyse(
    source: pa.RecordBatchReader,
    names: list[str],
    options: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
) -> tuple[dict[str, pa.Table], pa.Table]:
    """The tables ``names`` of a labelled trace, and ``support`` (table, reason).

    ``reason`` says why a trace of this kind cannot tell the table, null where it can.
    See ``strap_trace_analyse``.
    """
    guard = _Guard(source)
    handle, error = ctypes.c_uint64(), Error()
    status = library().strap_trace_analyse(
        guard.stream(), _options({**(options or {}), "tables": names}), handle, error
    )
    guard.check(status, error)
    with Trace(handle.value) as trace:
        guard.run(trace, progress)
        return {name: trace.table(name) for name in names}, trace.table("support")


def write_parquet(
    source: pa.RecordBatchReader,
    path: str | os.PathLike[str],
    options: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
) -> int:
    """Writes a Parquet file, which appears when it is whole; gives its rows."""
    guard = _Guard(source)
    handle, error = ctypes.c_uint64(), Error()
    status = library().strap_trace_write_parquet(
        guard.stream(), _path(path), _options(options), handle, error
    )
    guard.check(status, error)
    with Trace(handle.value) as trace:
        guard.run(trace, progress)
        return trace.counts().rows


class _Guard:
    """A reader on its way into libstrap.

    What its batches raise in Python reaches libstrap as a bare error code: it is kept
    here and raised in the place of that.
    """

    def __init__(self, source: pa.RecordBatchReader) -> None:
        self._source = source
        self._error: BaseException | None = None

    def _batches(self) -> Iterator[pa.RecordBatch]:
        try:
            yield from self._source
        except GeneratorExit:  # libstrap gave the rest up
            raise
        except BaseException as error:
            self._error = error
            raise

    def stream(self) -> ArrowArrayStream:
        reader = pa.RecordBatchReader.from_batches(self._source.schema, self._batches())
        stream = ArrowArrayStream()
        reader._export_to_c(ctypes.addressof(stream))
        return stream

    def raise_own(self) -> None:
        if self._error is not None:
            raise self._error

    def check(self, status: int, error: Error) -> None:
        if status < 0:
            self.raise_own()
        check(status, error)

    def run(self, trace: Trace, progress: Progress | None) -> None:
        try:
            trace.run(progress)
        except StrapError:
            self.raise_own()
            raise


def _typed(
    reader: pa.RecordBatchReader, trace: Trace, guard: _Guard | None = None
) -> pa.RecordBatchReader:
    """The reader, with libstrap's own errors in the place of pyarrow's."""

    def batches() -> Iterator[pa.RecordBatch]:
        try:
            yield from reader
        except (OSError, pa.ArrowException):
            if guard is not None:
                guard.raise_own()
            trace.counts()  # raises what it failed with
            raise

    return pa.RecordBatchReader.from_batches(reader.schema, batches())


def _reader(stream: ArrowArrayStream) -> pa.RecordBatchReader:
    return pa.RecordBatchReader._import_from_c(ctypes.addressof(stream))


def _counts(raw: RawTraceCounts) -> Counts:
    return Counts(
        done=bool(raw.done),
        rows=raw.rows,
        skipped=raw.skipped,
        malformed=raw.malformed,
        bytes=raw.bytes,
        total_bytes=raw.total_bytes,
        unaddressed=raw.unaddressed,
        renumbered=raw.renumbered,
    )


def _options(options: Mapping[str, Any] | None) -> bytes:
    return json.dumps(dict(options or {}), allow_nan=False).encode()


def _path(path: str | os.PathLike[str]) -> bytes:
    name = os.fsencode(path)
    if b"\0" in name:
        raise InvalidArgumentError(f"path {os.fspath(path)!r} contains a zero character")
    return name
