"""Records every load and store of a C or C++ program that is instrumented when it is compiled.

docs/ACCESS_TRACING.md tells how to build the program.
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from ..._native import trace as native
from ...errors import InvalidArgumentError, InvalidStateError, StrapError
from ..ranges import NAMED_KEY
from ..schema import Kind
from .base import BaseCollector, CollectorMeta, CollectorUnavailableError, Mode, PhaseBoundaries

__all__ = ["AccessCollector", "AccessFile"]

_MACHINES = ("x86_64", "aarch64")
_BUILD = "build the program with libstrap-access, as docs/ACCESS_TRACING.md tells"


class AccessFile:
    """A file that libstrap-access wrote.

    Args:
        path: the file.
        run_id: ``run_id`` of all rows.
        phase_boundaries: the phases, from which each row gets its ``phase`` by its time.
        source: add the column ``source`` with the place in the source code, "FILE:LINE".

    Raises:
        NotFoundError: there is no file at ``path``.
        CorruptError: the file does not begin like a file of libstrap-access.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        run_id: str = "",
        phase_boundaries: PhaseBoundaries | None = None,
        *,
        source: bool = False,
    ) -> None:
        self._path = path
        self._options: dict[str, Any] = {
            "run_id": run_id,
            "source": source,
            "phases": [
                {
                    "phase": str(getattr(one["phase"], "value", one["phase"])),
                    "start_ns": int(one["start_ns"]),
                    "end_ns": int(one["end_ns"]),
                }
                for one in phase_boundaries or ()
            ],
        }
        self._open()

    def _open(self) -> native.RowStream:
        rows = native.parse("access", self._path, self._options)
        self._trace = rows.trace
        return rows

    def reader(self) -> pa.RecordBatchReader:
        """All rows, sorted by time; ``length_bytes`` is the size of the access."""
        return self._open().reader()

    def labelled(self) -> pa.RecordBatchReader:
        """All rows, with region_type and region_id for memory that the program named."""
        ranges = self.ranges
        if not ranges:
            return self.reader()
        # Other rows stay unknown here. The labeller of a run labels them by their symbols.
        options = {"ranges": ranges, "rules": [], "policy": "keep"}
        reader = native.label(self._open(), options).reader()
        named = ",".join(sorted({one["region_type"] for one in ranges}))
        schema = reader.schema.with_metadata({**(reader.schema.metadata or {}), NAMED_KEY: named})
        return pa.RecordBatchReader.from_batches(
            schema, (batch.replace_schema_metadata(schema.metadata) for batch in reader)
        )

    @property
    def ranges(self) -> list[dict[str, Any]]:
        """The memory that the program named: dicts in the form of the labeller's known ranges."""
        return list(self._trace.table("ranges").to_pylist())

    @property
    def program(self) -> dict[str, str]:
        """Facts about the program and its recording, all as text.

        Keys: exe, pid, clock, clock_every, sample_every, realtime_ns, ended, threads, seen,
        recorded, lost.
        """
        rows = self._trace.table("program").to_pylist()
        return {row["key"]: row["value"] for row in rows}

    @property
    def problems(self) -> list[str]:
        """What the file lacks; after the rows are read, also which symbols were not found."""
        return [row["text"] for row in self._trace.table("problems").to_pylist()]


class AccessCollector(BaseCollector):
    """Runs a program that links libstrap-access.

    Each process of the program that records writes ``raw/program-PID.access``. ``stop`` renames the
    file with the most accesses to ``raw/program.access``, and only this file is the trace: the
    addresses of different processes cannot be compared.

    Args:
        sample_every: record one access in ``sample_every``, 1 to 2**32 - 1.
    """

    name = "access"
    kind = Kind.ACCESSES
    modes = frozenset({Mode.WRAP})
    gives = "every load and store of a C or C++ program built for it, with times and symbols"
    use_instead = "torch traces PyTorch models; lackey runs programs as they are, if tiny"

    def __init__(self, sample_every: int = 1) -> None:
        if sample_every < 1 or sample_every > 2**32 - 1:
            raise InvalidArgumentError(f"sample_every = {sample_every}: give 1 to 4294967295")
        self._sample_every = sample_every
        self._path: Path | None = None
        self._running = False

    def unavailable_reason(self) -> str | None:
        machine = platform.machine()
        if sys.platform == "linux" and machine in _MACHINES:
            return None
        return (
            f"libstrap-access runs on Linux on {' and '.join(_MACHINES)}, "
            f"and this is {sys.platform} on {machine}. {self.use_instead}"
        )

    def start(self, target_pids: list[int], output_dir: Path) -> None:
        if self._running:
            raise InvalidStateError("access is running; stop it first")
        reason = self.unavailable_reason()
        if reason is None and target_pids:
            reason = f"a running process cannot be instrumented; {_BUILD}, and start it here"
        if reason is not None:
            raise CollectorUnavailableError(self.name, reason)
        output_dir.mkdir(parents=True, exist_ok=True)
        self._path = (output_dir / "program.access").resolve()
        if "%p" in str(self._path):
            raise InvalidArgumentError(
                f"{output_dir}: a folder named with %p cannot be recorded to"
            )
        for old in (self._path, *_of_processes(self._path)):
            old.unlink(missing_ok=True)
        self._running = True

    def command_prefix(self, argv: Sequence[str]) -> list[str]:
        if not self._running or self._path is None:
            raise InvalidStateError("access was not started")
        every = f"STRAP_ACCESS_EVERY={self._sample_every}"
        return ["env", f"STRAP_ACCESS={self._path.with_name('program-%p.access')}", every, *argv]

    def stop(self) -> CollectorMeta:
        if not self._running or self._path is None:
            raise InvalidStateError("access was not started")
        self._running = False
        meta = CollectorMeta(
            collector_type=self.name,
            available=True,
            used=True,
            fallback_reason=self.fallback_reason,
            event_strings=["libstrap-access"],
            sample_period=self._sample_every,
            output_file=str(self._path),
            parse_success=False,
        )
        files: dict[Path, AccessFile] = {}
        for one in _of_processes(self._path):
            try:
                files[one] = AccessFile(one)
            except StrapError as error:
                meta.warnings.append(f"{one}: {error}")
        if not files:
            if not meta.warnings:
                meta.warnings.append(f"the program recorded nothing: {_BUILD}")
            return meta
        largest = max(files, key=lambda one: int(files[one].program["recorded"]))
        file = files.pop(largest)
        largest.rename(self._path)
        meta.output_file_size_bytes = self._path.stat().st_size
        if files:
            accesses = sum(int(one.program["recorded"]) for one in files.values())
            meta.warnings.append(
                f"{len(files)} more processes recorded {accesses} accesses, which are not in the "
                f"trace: {', '.join(one.name for one in files)}"
            )
        program = file.program
        recorded, lost = int(program["recorded"]), int(program["lost"])
        made = int(program["seen"]) + lost
        meta.parse_success = True
        meta.dropped_samples = lost
        meta.coverage_estimate = recorded / made if made else None
        meta.warnings += file.problems
        meta.extra = {**program, "ranges": len(file.ranges)}
        return meta

    def trace(
        self, run_id: str, phase_boundaries: PhaseBoundaries | None = None
    ) -> pa.RecordBatchReader:
        """The rows. In memory that the program named they have its region_type and region_id."""
        if self._running or self._path is None or not self._path.exists():
            raise InvalidStateError("access has recorded nothing")
        return AccessFile(self._path, run_id, phase_boundaries).labelled()


def _of_processes(path: Path) -> list[Path]:
    return sorted(path.parent.glob("program-*.access"))
