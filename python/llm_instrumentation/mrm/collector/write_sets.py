"""Records write sets: the pages that a process wrote in each interval."""

from __future__ import annotations

import functools
import logging
import mmap
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa

from ..._pages import units
from ...errors import (
    CorruptError,
    InvalidArgumentError,
    InvalidStateError,
    StrapError,
    StrapIOError,
)
from ..schema import PAGE_BYTES, Kind, OpType, arrow_schema
from .base import (
    TIME_KEY,
    BaseCollector,
    CollectorMeta,
    CollectorUnavailableError,
    Mode,
    PhaseBoundaries,
    told,
)
from .rows import Phases, make_batch
from .written_pages import SoftDirty, WriteProtect, WrittenPages

__all__ = ["WriteSets", "read_write_sets"]

_log = logging.getLogger(__name__)

_RECORD = np.dtype(
    [("time_ns", np.int64), ("pid", np.int64), ("start", np.uint64), ("end", np.uint64)]
)
_BATCH_ROWS = 1 << 17


class WriteSets(BaseCollector):
    """Looks every ``interval_ms`` which pages of anonymous memory were written.

    A row is a page that was written at least once in an interval. Its time is the end of the
    interval, its address that of the page, and its thread_id the process id. Memory that the
    program maps and unmaps within one interval is not seen, and memory that moves (mremap) counts
    as written. :mod:`.written_pages` describes the two ways of looking. The first write to a page
    in each interval costs the program about half a microsecond.

    ``raw/write_sets.bin`` has a record for each region, in this machine's byte order: time_ns i64,
    pid i64, start u64, end u64.
    """

    name = "write_sets"
    kind = Kind.WRITE_SETS
    modes = frozenset({Mode.IN_PROCESS, Mode.ATTACH})
    gives = "the pages written in each interval, at its end; no loads"
    use_instead = "page_faults shows the first touch of each page; torch traces PyTorch models"

    def __init__(self, interval_ms: int = 100) -> None:
        if interval_ms <= 0:
            raise InvalidArgumentError(f"interval_ms = {interval_ms}: must be positive")
        self._interval_ms = interval_ms
        self._looking: _Looks | None = None
        self._output: Path | None = None

    def unavailable_reason(self) -> str | None:
        return _unavailable_reason()

    def start(self, target_pids: list[int], output_dir: Path) -> None:
        if self._looking is not None:
            raise InvalidStateError("write_sets is running; stop it first")
        if not target_pids:
            raise InvalidArgumentError("write_sets: no process to watch; give its pid")
        output_dir.mkdir(parents=True, exist_ok=True)
        self._output = output_dir / "write_sets.bin"
        self._looking = _Looks(target_pids, self._interval_ms, self._output)

    def stop(self) -> CollectorMeta:
        if self._looking is None or self._output is None:
            raise InvalidStateError("write_sets was not started")
        looks, self._looking = self._looking, None
        looks.close()
        return CollectorMeta(
            collector_type=self.name,
            available=True,
            used=True,
            fallback_reason=self.fallback_reason,
            output_file=str(self._output),
            output_file_size_bytes=self._output.stat().st_size,
            parse_success=looks.error is None,
            warnings=looks.warnings,
            extra={
                "interval_ms": self._interval_ms,
                "looks": looks.count,
                "late_looks": looks.late,
                "longest_look_ms": looks.longest_ns / 1e6,
                "written_pages": looks.pages,
                "methods": sorted(set(looks.methods)),
            },
        )

    def trace(
        self, run_id: str, phase_boundaries: PhaseBoundaries | None = None
    ) -> pa.RecordBatchReader:
        if self._output is None or self._looking is not None:
            raise InvalidStateError("write_sets has not been started and stopped")
        return read_write_sets(
            self._output, run_id, phase_boundaries, interval_ms=self._interval_ms
        )


def read_write_sets(
    path: Path,
    run_id: str,
    phase_boundaries: PhaseBoundaries | None = None,
    *,
    interval_ms: int | None = None,
) -> pa.RecordBatchReader:
    """The rows of a ``write_sets.bin``. Its last record may be incomplete and is then left out.

    Args:
        path: the file.
        run_id: ``run_id`` of all rows.
        phase_boundaries: the phases, in CLOCK_MONOTONIC as the rows.
        interval_ms: the interval, for the schema's metadata; None: it is not known.
    """
    notes = {TIME_KEY: b"end of the interval in which the page was written"}
    if interval_ms is not None:
        notes[b"mrm_trace_interval_ms"] = str(interval_ms).encode()
    schema = arrow_schema(Kind.WRITE_SETS)
    schema = schema.with_metadata({**schema.metadata, **notes})
    batches = _batches(path, schema, run_id, Phases(phase_boundaries))
    return pa.RecordBatchReader.from_batches(schema, batches)


class _Looks:
    """A thread that looks at processes at each interval, until :meth:`close`.

    Raises:
        CollectorUnavailableError: a process has ended, or the kernel refuses to watch it.
    """

    def __init__(self, pids: list[int], interval_ms: int, output: Path) -> None:
        self.warnings: list[str] = []
        self.methods: list[str] = []
        self.error: Exception | None = None
        self.count = self.late = self.longest_ns = self.pages = 0
        self._huge_bytes = 0
        self._step_ns = interval_ms * 1_000_000
        self._ending = threading.Event()
        self._watched: list[WrittenPages] = []
        try:
            for pid in dict.fromkeys(pids):
                self._watched.append(self._watch(pid))
            self._file = open(output, "wb")  # noqa: SIM115 - closed by close
        except BaseException:
            self._drop_all()
            raise
        if len(self._watched) > 1:
            self.warnings.append(
                "several processes are watched; the same address in two of them is told apart by "
                "thread_id alone, which is the process"
            )
        self._last_ns = time.monotonic_ns()
        self._thread = threading.Thread(target=self._run, name="write-sets", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Looks a last time and leaves the processes as they were."""
        self._ending.set()
        self._thread.join()
        self._drop_all()
        if self.error is not None:
            _log.error("write_sets ended early: %s", self.error)
            self.warnings.append(f"the looks ended early: {self.error}")
        if self._huge_bytes:
            self.warnings.append(
                f"{units.size(self._huge_bytes)} of the written memory lie in huge pages: a write "
                "to one marks all of its 2 MiB"
            )

    def _watch(self, pid: int) -> WrittenPages:
        try:
            watched: WrittenPages = WriteProtect(pid)
        except ProcessLookupError as error:
            raise CollectorUnavailableError(WriteSets.name, f"process {pid} has ended") from error
        except StrapIOError as refused:
            try:
                watched = SoftDirty(pid)
            except StrapIOError as error:
                raise CollectorUnavailableError(
                    WriteSets.name, f"{told(refused)}; {told(error)}. {WriteSets.use_instead}"
                ) from refused
            self.warnings.append(
                f"process {pid}: {told(refused)}; soft-dirty bits are used, which miss writes "
                "between reading and clearing them"
            )
        self.methods.append(watched.method)
        return watched

    def _run(self) -> None:
        due = self._last_ns + self._step_ns
        try:
            with self._file:
                while not self._ending.wait(max(0, due - time.monotonic_ns()) / 1e9):
                    self._look()
                    due += self._step_ns
                    if (behind := self._last_ns - due) > 0:
                        self.late += 1
                        due += (behind // self._step_ns + 1) * self._step_ns
                self._look()
        except (OSError, StrapError) as error:
            self.error = error

    def _look(self) -> None:
        begin = time.monotonic_ns()
        for watched in list(self._watched):
            try:
                regions = watched.look()
            except ProcessLookupError:
                ago = (time.monotonic_ns() - self._last_ns) / 1e6
                self.warnings.append(
                    f"process {watched.pid} ended up to {ago:.0f} ms after the last look; "
                    "what it wrote in that time is not in the trace"
                )
                self._drop(watched)
                continue
            records = np.empty(len(regions), _RECORD)
            records["time_ns"] = time.monotonic_ns()
            records["pid"] = watched.pid
            records["start"], records["end"] = regions["start"], regions["end"]
            self._file.write(records.tobytes())
            sizes = regions["end"] - regions["start"]
            self.pages += int(sizes.sum()) // PAGE_BYTES
            self._huge_bytes += int(sizes[regions["huge"] != 0].sum())
        self._last_ns = time.monotonic_ns()
        self.count += 1
        self.longest_ns = max(self.longest_ns, self._last_ns - begin)

    def _drop_all(self) -> None:
        for watched in list(self._watched):
            self._drop(watched)

    def _drop(self, watched: WrittenPages) -> None:
        self._watched.remove(watched)
        watched.close()
        for reason, count in watched.refused.items():
            self.warnings.append(
                f"process {watched.pid}: {count} mappings could not be watched: {reason}"
            )


def _batches(
    path: Path, schema: pa.Schema, run_id: str, phases: Phases
) -> Iterator[pa.RecordBatch]:
    """Batches with a row for each page of the records."""
    count = path.stat().st_size // _RECORD.itemsize
    if not count:
        return
    records = np.memmap(path, _RECORD, "r", shape=(count,))
    first_id = 0
    for begin in range(0, len(records), _BATCH_ROWS):
        part = np.asarray(records[begin : begin + _BATCH_ROWS])
        if (part["end"] < part["start"]).any() or (part["end"] >> np.uint64(57)).any():
            raise CorruptError(f"{path} is damaged: a region is none of a process")
        pages = ((part["end"] - part["start"]) // np.uint64(PAGE_BYTES)).astype(np.int64)
        ends = np.cumsum(pages)
        for low in range(0, int(ends[-1]), _BATCH_ROWS):
            rows = np.arange(low, min(low + _BATCH_ROWS, int(ends[-1])))
            at = np.searchsorted(ends, rows, side="right")
            offset = rows - (ends[at] - pages[at])
            times = part["time_ns"][at]
            yield make_batch(
                schema,
                run_id,
                first_id,
                times=times,
                addresses=part["start"][at] + offset.astype(np.uint64) * np.uint64(PAGE_BYTES),
                op_type=OpType.STORE.value,
                phase=phases.of(times),
                thread_id=part["pid"][at],
            )
            first_id += len(rows)


@functools.cache
def _unavailable_reason() -> str | None:
    """Writes a page and looks for it; returns why this does not work here, or None."""
    if mmap.PAGESIZE != PAGE_BYTES:
        return f"pages of {mmap.PAGESIZE} bytes; a trace counts in {PAGE_BYTES}"
    try:
        watched: WrittenPages = WriteProtect(os.getpid())
    except StrapIOError as refused:
        try:
            watched = SoftDirty(os.getpid())
        except StrapIOError as error:
            return f"{told(refused)}; {told(error)}. {WriteSets.use_instead}"
    try:
        with mmap.mmap(-1, PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as page:
            page[0] = 1
            at = np.frombuffer(page, np.uint8).ctypes.data
            found = watched.look()
            seen = bool(np.any((found["start"] <= at) & (at < found["end"])))
    finally:
        watched.close()
    if not seen:
        return f"a page that was just written is not reported. {WriteSets.use_instead}"
    return None
