"""Reads and analyses memory traces: ``strap_trace_parse`` to ``strap_trace_close``.

Batches go in and out as :class:`pyarrow.RecordBatchReader`. No row becomes a Python object. Rows
that libstrap makes for itself, as those that it labels and writes, pass no code in Python.
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

#: How long one call in C works. Between two calls Python handles signals and reports progress.
_SLICE_MS = 100

Progress = Callable[["Counts"], None]


@dataclasses.dataclass(frozen=True)
class Counts:
    """How far the work has come; ``strap_trace_counts_t`` of strap.h describes each field."""

    done: bool
    rows: int
    skipped: int
    malformed: int
    bytes: int
    total_bytes: int
    unaddressed: int
    renumbered: int


class Trace:
    """A handle on the work over one stream. Thread-safe; close it or use it with ``with``."""

    def __init__(self, handle: int) -> None:
        self._handle = handle
        self._lib = library()

    def counts(self) -> Counts:
        """The counts so far.

        Raises:
            StrapError: the work failed; this is its error.
        """
        raw, error = RawTraceCounts(struct_size=ctypes.sizeof(RawTraceCounts)), Error()
        check(self._lib.strap_trace_counts(self._handle, raw, error), error)
        return _counts(raw)

    def last_counts(self) -> Counts:
        """The counts so far. It does not raise if the work failed."""
        raw, error = RawTraceCounts(struct_size=ctypes.sizeof(RawTraceCounts)), Error()
        self._lib.strap_trace_counts(self._handle, raw, error)
        return _counts(raw)

    def table(self, name: str) -> pa.Table:
        """The whole table of this name.

        Raises:
            NotFoundError: the work makes no table of this name.
            InvalidStateError: the work is not done.
        """
        return self.batches(name).read_all()

    def batches(self, name: str) -> pa.RecordBatchReader:
        """The table of this name in batches. The batches of a large table are made when read.

        Raises:
            NotFoundError: the work makes no table of this name.
            InvalidStateError: the work is not done.
        """
        stream, error = ArrowArrayStream(), Error()
        text = c_string(name, "table")
        check(self._lib.strap_trace_table(self._handle, text, stream, error), error)
        return _reader(stream)

    def run(self, progress: Progress | None = None) -> None:
        """Works to the end.

        Python handles signals at least every 0.1 s, or after each batch if one takes longer.

        Args:
            progress: called with the counts at the same times, and at the end.
        """
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


class RowStream:
    """Rows that libstrap makes while they are read. They can be read once.

    Attributes:
        trace: the counts and tables of the work.
    """

    def __init__(
        self, stream: ArrowArrayStream, trace: Trace, source: _Guard | RowStream | None = None
    ) -> None:
        self.trace = trace
        self._reader = _reader(stream)
        self._source = source

    def reader(self) -> pa.RecordBatchReader:
        """The rows for code in Python. It raises libstrap's errors in place of pyarrow's."""

        def batches() -> Iterator[pa.RecordBatch]:
            try:
                yield from self._reader
            except (OSError, pa.ArrowException):
                self.raise_own()
                raise

        return pa.RecordBatchReader.from_batches(self._reader.schema, batches())

    def stream(self) -> ArrowArrayStream:
        """The rows for libstrap. No code in Python runs between two batches."""
        return _exported(self._reader)

    def raise_own(self) -> None:
        """Raises the error that ended the work, if one did."""
        if self._source is not None:
            self._source.raise_own()
        self.trace.counts()


def parse(
    format: str,  # noqa: A002 - the word of strap.h
    path: str | os.PathLike[str],
    options: Mapping[str, Any] | None = None,
) -> RowStream:
    """The rows of the text at ``path``, parsed when they are read.

    ``strap_trace_parse`` of strap.h lists the formats and options.
    """
    out, handle, error = ArrowArrayStream(), ctypes.c_uint64(), Error()
    status = library().strap_trace_parse(
        c_string(format, "format"), _path(path), _options(options), out, handle, error
    )
    check(status, error)
    return RowStream(out, Trace(handle.value))


def label(
    source: pa.RecordBatchReader | RowStream, options: Mapping[str, Any] | None = None
) -> RowStream:
    """The rows of ``source`` with region_type and region_id, labelled when they are read.

    ``strap_trace_label`` of strap.h lists the options and tables.
    """
    rows = _guarded(source)
    out, handle, error = ArrowArrayStream(), ctypes.c_uint64(), Error()
    status = library().strap_trace_label(rows.stream(), _options(options), out, handle, error)
    _check(rows, status, error)
    return RowStream(out, Trace(handle.value), rows)


def analyse(
    source: pa.RecordBatchReader,
    names: list[str],
    options: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
) -> tuple[dict[str, pa.Table], pa.Table]:
    """Computes the tables ``names`` of a labelled trace, and the table ``support``.

    ``support`` has the columns table and reason. The reason says why a trace of this kind cannot
    give the table; it is null if it can. ``strap_trace_analyse`` of strap.h lists the options.
    """
    rows = _guarded(source)
    handle, error = ctypes.c_uint64(), Error()
    status = library().strap_trace_analyse(
        rows.stream(), _options({**(options or {}), "tables": names}), handle, error
    )
    _check(rows, status, error)
    with Trace(handle.value) as trace:
        _run(rows, trace, progress)
        return {name: trace.table(name) for name in names}, trace.table("support")


def partial(
    source: pa.RecordBatchReader,
    path: str | os.PathLike[str],
    options: Mapping[str, Any],
    progress: Progress | None = None,
) -> int:
    """Writes a partial analysis of the rows of a part, and returns their number.

    The file appears at ``path`` when it is complete. ``strap_trace_partial`` of strap.h lists the
    options.
    """
    rows = _guarded(source)
    handle, error = ctypes.c_uint64(), Error()
    status = library().strap_trace_partial(
        rows.stream(), _path(path), _options(options), handle, error
    )
    _check(rows, status, error)
    with Trace(handle.value) as trace:
        _run(rows, trace, progress)
        return trace.counts().rows


def merge(
    paths: list[str],
    names: list[str],
    options: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
) -> tuple[dict[str, pa.Table], pa.Table]:
    """Computes the tables ``names`` of partial analyses, and the table ``support``.

    ``support`` is as for :func:`analyse`. ``strap_trace_merge`` of strap.h lists the options.
    """
    handle, error = ctypes.c_uint64(), Error()
    status = library().strap_trace_merge(
        _options({**(options or {}), "paths": paths}), handle, error
    )
    check(status, error)
    with Trace(handle.value) as trace:
        trace.run(progress)
        return {name: trace.table(name) for name in names}, trace.table("support")


def write_parquet(
    source: pa.RecordBatchReader | RowStream,
    path: str | os.PathLike[str],
    options: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
) -> int:
    """Writes ``source`` to a Parquet file and returns the number of rows.

    The file appears at ``path`` when it is complete. ``strap_trace_write_parquet`` of strap.h lists
    the options.
    """
    rows = _guarded(source)
    handle, error = ctypes.c_uint64(), Error()
    status = library().strap_trace_write_parquet(
        rows.stream(), _path(path), _options(options), handle, error
    )
    _check(rows, status, error)
    with Trace(handle.value) as trace:
        _run(rows, trace, progress)
        return trace.counts().rows


class _Guard:
    """Passes a reader's batches to libstrap and keeps the exception that reading them raises.

    libstrap sees only an error code. The guard raises the kept exception in place of libstrap's
    error.
    """

    def __init__(self, source: pa.RecordBatchReader) -> None:
        self._source = source
        self._error: BaseException | None = None

    def _batches(self) -> Iterator[pa.RecordBatch]:
        try:
            yield from self._source
        except GeneratorExit:  # libstrap does not read the rest
            raise
        except BaseException as error:
            self._error = error
            raise

    def stream(self) -> ArrowArrayStream:
        return _exported(pa.RecordBatchReader.from_batches(self._source.schema, self._batches()))

    def raise_own(self) -> None:
        if self._error is not None:
            raise self._error


def _guarded(source: pa.RecordBatchReader | RowStream) -> _Guard | RowStream:
    return source if isinstance(source, RowStream) else _Guard(source)


def _check(rows: _Guard | RowStream, status: int, error: Error) -> None:
    if status < 0:
        rows.raise_own()
    check(status, error)


def _run(rows: _Guard | RowStream, trace: Trace, progress: Progress | None) -> None:
    try:
        trace.run(progress)
    except StrapError:
        rows.raise_own()
        raise


def _exported(reader: pa.RecordBatchReader) -> ArrowArrayStream:
    stream = ArrowArrayStream()
    reader._export_to_c(ctypes.addressof(stream))
    return stream


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
