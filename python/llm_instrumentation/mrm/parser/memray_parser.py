"""Allocations from memray's recordings. memray itself reads the files.

A recording has the allocations in their order, without times. About every 10 ms it has a snapshot
of the memory, with a time. The time of a row is the time of the last snapshot before it, so the
allocation happened between that snapshot and the next. Times are not interpolated.

The command ``memray parse`` lists a recording, and so tells between which allocations a snapshot
lies. If that list does not agree with the recording, the time of a row is its place in the order
of the allocations instead. :attr:`MemrayTrace.time` and the schema's metadata (``mrm_trace_time``)
say which of the two the rows have.
"""

from __future__ import annotations

import contextlib
import datetime
import importlib
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from ..._json import load_json_file
from ..._native import trace as native
from ..._parsing import parsing
from ...errors import CorruptError, InvalidArgumentError, MissingExtraError, NotFoundError
from ...progress.bars import rows_bar
from ..collector.base import TIME_KEY
from ..collector.rows import OPS, Phases, make_batch
from ..schema import Kind, arrow_schema
from .text import MalformedLine

__all__ = ["MemrayMissingError", "MemrayTrace", "import_memray", "parse_memray"]

_BATCH_ROWS = 1 << 16
_FREES = frozenset({"PYMALLOC_FREE", "FREE", "MUNMAP"})

LOWER_BOUND = "the last snapshot before the row, a lower bound; snapshots are every 10 ms or so"
ORDER = "the row's place in the order, no time"


class MemrayMissingError(MissingExtraError):
    """memray is not installed."""


def import_memray() -> Any:
    """The memray package.

    Raises:
        MemrayMissingError: memray is not installed, or cannot be loaded here.
    """
    try:
        return importlib.import_module("memray")
    except ImportError as error:
        missing = MemrayMissingError(
            f"A trace of memray needs memray, which cannot be imported ({error}): "
            'pip install "llm_instrumentation[mrm]"'
        )
        missing.name = "memray"
        raise missing from error


@dataclass
class _Columns:
    """The columns of a batch in the making."""

    times: list[int] = field(default_factory=list)
    addresses: list[int] = field(default_factory=list)
    ops: list[int] = field(default_factory=list)
    sizes: list[int | None] = field(default_factory=list)
    threads: list[int] = field(default_factory=list)
    symbols: list[int] = field(default_factory=list)
    dsos: list[int] = field(default_factory=list)


class _Numbering(dict[str, int]):
    """Numbers texts from 0, in the order in which they are first looked up."""

    def __missing__(self, text: str) -> int:
        number = self[text] = len(self)
        return number


class MemrayTrace(Iterator[dict[str, Any]]):
    """The rows of a recording, read on demand.

    Iterating gives a dict per row. :meth:`reader` and :meth:`to_parquet` start at the beginning of
    the recording. Reading keeps a batch in memory, and with frees also the live allocations.

    Attributes:
        time: the meaning of the rows' times, in words.
        skipped: how many records gave no row so far, because of ``skip_frees`` or
            ``sample_every_n``.
        malformed: always 0, because memray refuses a recording that it cannot read.
    """

    malformed = 0
    malformed_samples: Sequence[MalformedLine] = ()

    def __init__(
        self,
        path: str | os.PathLike[str],
        run_id: str,
        phase_boundaries: Sequence[dict[str, Any]] | None,
        native_traces: bool,
        skip_frees: bool,
        sample_every_n: int,
        clock_offset_ns: int | None,
    ) -> None:
        self._memray = import_memray()
        self._path = Path(path)
        if not self._path.exists():
            raise NotFoundError(f"{self._path}: no such file")
        if self._path.is_dir():
            raise InvalidArgumentError(f"{self._path} is a directory: give the recording in it")
        if sample_every_n < 1:
            raise InvalidArgumentError(f"sample_every_n = {sample_every_n}: must be at least 1")
        self._run_id = run_id
        self._phases = Phases(phase_boundaries)
        self._native = native_traces
        self._skip_frees = skip_frees
        self._sample_every_n = sample_every_n
        self._offset = _clock_offset(self._path) if clock_offset_ns is None else clock_offset_ns
        self.skipped = 0
        self._rows: Iterator[dict[str, Any]] | None = None

        with self._reading(), self._open() as file:
            about = file.metadata
        self._allocations: int = about.total_allocations
        if about.file_format.name != "ALL_ALLOCATIONS":
            raise InvalidArgumentError(
                f"{self._path} holds sums, not allocations; record without --aggregate"
            )
        if native_traces and not about.has_native_traces:
            raise InvalidArgumentError(
                f"{self._path} was recorded without native traces; record with "
                "native_traces=True, or parse with native_traces=False"
            )
        with self._reading():
            self._bounds = _snapshots(self._path, self._allocations)
        self._start_ns = _epoch_ns(about.start_time) + self._offset
        self.time = ORDER if self._bounds is None else LOWER_BOUND

    def _reading(self) -> contextlib.AbstractContextManager[None]:
        return parsing(self._path, "is no recording of memray, or a damaged one")

    def _open(self) -> Any:
        return self._memray.FileReader(os.fspath(self._path))

    @property
    def schema(self) -> pa.Schema:
        plain = arrow_schema(Kind.ALLOCATIONS)
        return plain.with_metadata({**plain.metadata, TIME_KEY: self.time.encode()})

    def reader(self) -> pa.RecordBatchReader:
        """The rows from the beginning, as batches of ``arrow_schema("allocations")``."""
        self.skipped = 0
        return pa.RecordBatchReader.from_batches(self.schema, self._batches())

    def to_parquet(self, path: str | os.PathLike[str]) -> int:
        """Writes all rows to a zstd Parquet file, and returns their number."""
        with rows_bar(f"reading {self._path.name}", self._allocations) as progress:
            return native.write_parquet(self.reader(), path, None, progress)

    def __iter__(self) -> MemrayTrace:
        return self

    def __next__(self) -> dict[str, Any]:
        if self._rows is None:
            self._rows = (row for batch in self.reader() for row in batch.to_pylist())
        return next(self._rows)

    def _batches(self) -> Iterator[pa.RecordBatch]:
        schema, first_id = self.schema, 0
        symbols, dsos = _Numbering({"": 0}), _Numbering({"": 0})
        for columns in self._chunks(symbols, dsos):
            times = np.array(columns.times, np.int64)
            yield make_batch(
                schema,
                self._run_id,
                first_id,
                times=times,
                addresses=np.array(columns.addresses, np.uint64),
                op_type=(OPS, np.array(columns.ops, np.int32)),
                phase=None if self._bounds is None else self._phases.of(times),
                symbol=(list(symbols), np.array(columns.symbols, np.int32)),
                dso=(list(dsos), np.array(columns.dsos, np.int32)),
                thread_id=np.array(columns.threads, np.int64),
                length_bytes=columns.sizes,
            )
            first_id += len(times)

    def _chunks(self, symbols: _Numbering, dsos: _Numbering) -> Iterator[_Columns]:
        frees = {int(one) for one in self._memray.AllocatorType if one.name in _FREES}
        live: dict[int, int] = {}
        where: dict[tuple[int, ...], tuple[int, int]] = {}
        bounds = iter(() if self._bounds is None else self._bounds)
        at, following = self._start_ns, next(bounds, None)
        columns, kept = _Columns(), 0
        with self._reading(), self._open() as file:
            for number, record in enumerate(file.get_allocation_records()):
                while following is not None and following[0] <= number:
                    at, following = following[1] + self._offset, next(bounds, None)
                allocator, address, size = record.allocator, record.address, record.size
                free = allocator in frees
                if free and self._skip_frees:
                    self.skipped += 1
                    continue
                if free:
                    size = size or live.pop(address, 0)
                elif not self._skip_frees:
                    live[address] = size
                kept += 1
                if kept % self._sample_every_n:
                    self.skipped += 1
                    continue
                symbol = dso = 0
                if self._native and not free:
                    key = (record.tid, record.stack_id, record.native_stack_id)
                    if key not in where:
                        name, file_name = _innermost(record)
                        where[key] = symbols[name], dsos[file_name]
                    symbol, dso = where[key]
                columns.times.append(number if self._bounds is None else at)
                columns.addresses.append(address)
                columns.ops.append(0 if free else 1)
                columns.sizes.append(size or None)
                columns.threads.append(record.tid)
                columns.symbols.append(symbol)
                columns.dsos.append(dso)
                if len(columns.times) == _BATCH_ROWS:
                    yield columns
                    columns = _Columns()
        if columns.times:
            yield columns


def parse_memray(
    path: str | os.PathLike[str],
    run_id: str,
    phase_boundaries: Sequence[dict[str, Any]] | None = None,
    native_traces: bool = False,
    skip_frees: bool = True,
    sample_every_n: int = 1,
    *,
    clock_offset_ns: int | None = None,
) -> MemrayTrace:
    """The rows of a memray recording. An allocation is a store of its length, a free is a load.

    memray does not record the time of an allocation; the module's documentation says which times
    the rows have. ``thread_id`` is memray's own number of a thread, from 1. A realloc is a free
    and an allocation.

    Args:
        path: a file of ``memray.Tracker`` or ``memray run``, also if it was cut short.
        run_id: the run id of every row.
        phase_boundaries: dicts of ``phase``, ``start_ns`` and ``end_ns``, on the clock of the
            rows; a row whose time is in [start_ns, end_ns) has that phase.
        native_traces: set ``symbol`` to the function that made the allocation, native if known,
            else in Python, and ``dso`` to its source file if known.
        skip_frees: leave out frees.
        sample_every_n: keep every n-th row.
        clock_offset_ns: is added to the times, which are ns since 1970 by the wall clock.
            ``time.monotonic_ns() - time.time_ns()`` converts them to CLOCK_MONOTONIC. None takes
            the offset from the .json file that the collector writes beside the recording, or 0 if
            there is none.

    Raises:
        MemrayMissingError: memray is not installed.
        FileNotFoundError: there is no such file.
        CorruptError: memray cannot read the file.
        InvalidArgumentError: the path is a folder, the recording has only sums of allocations, it
            lacks the native traces, or ``sample_every_n`` is below 1.
    """
    return MemrayTrace(
        path, run_id, phase_boundaries, native_traces, skip_frees, sample_every_n, clock_offset_ns
    )


def _innermost(record: Any) -> tuple[str, str]:
    """The function that allocated, native if known, else in Python, and its file or "".

    It reads only the innermost frame: to resolve all frames takes memray many times as long.
    """
    for frames in (record.native_stack_trace, record.stack_trace):
        for name, file_name, _ in frames(max_stacks=1):
            if name and name != _UNKNOWN:
                return name, "" if file_name == _UNKNOWN else file_name
    return "", ""


_UNKNOWN = "<unknown>"
_ALLOCATION = b"\nALLOCATION "
_SNAPSHOT = b"\nMEMORY_RECORD time="


def _snapshots(path: Path, allocations: int) -> list[tuple[int, int]] | None:
    """For each snapshot the number of records before it, and its time in wall-clock ns.

    None if ``memray parse`` shows no snapshot, or another number of allocations than the file has.
    """
    command = [sys.executable, "-m", "memray", "parse", os.fspath(path)]
    found, count = [], 0
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as listing:
        assert listing.stdout is not None
        text = b"\n"  # begins with the end of the last line that was read completely
        while part := listing.stdout.read(1 << 20):
            text += part
            end = text.rfind(b"\n")
            begin = 0
            while (at := text.find(_SNAPSHOT, begin, end)) >= 0:
                count += text.count(_ALLOCATION, begin, at)
                begin = at + len(_SNAPSHOT)
                milliseconds = text[begin : text.index(b" ", begin)]
                found.append((count, int(milliseconds) * 1_000_000))
            count += text.count(_ALLOCATION, begin, end)
            text = text[end:]
    return found if found and count == allocations else None


def _clock_offset(path: Path) -> int:
    """The offset in the collector's .json file beside the recording, or 0."""
    noted = path.with_suffix(".json")
    try:
        with parsing(noted):
            return int(load_json_file(noted)["clock_offset_ns"])
    except (FileNotFoundError, CorruptError):
        return 0


def _epoch_ns(moment: datetime.datetime) -> int:
    return int(moment.timestamp() * 1000) * 1_000_000
