"""Records first touches of pages from page faults, with perf or the kernel's tracepoints."""

from __future__ import annotations

import functools
import os
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa

from ...errors import InvalidArgumentError, InvalidStateError, StrapIOError
from ..parser.text import parse_page_faults
from ..schema import Kind
from .base import (
    BaseCollector,
    CollectorMeta,
    CollectorUnavailableError,
    Mode,
    PhaseBoundaries,
    told,
)
from .perf import PerfRecording, lost_samples, try_recording
from .rows import reader_of_text
from .tracefs import TraceInstance

__all__ = ["PageFaults"]

_EVENTS = ("exceptions/page_fault_user", "exceptions/page_fault_kernel")
_OPTIONS = ["-e", "page-faults", "-c", "1", "--data", "--sample-cpu"]
# Pages of buffer for bursts. Other users have a limit (kernel.perf_event_mlock_kb), so only root
# gets these.
_ROOT_OPTIONS = ["-m", "1024"]
_FIELDS = "comm,pid,tid,cpu,time,period,event,addr,ip,sym,symoff,dso"


class PageFaults(BaseCollector):
    """Records the first touch of each page, and the first write to a page that was only read.

    There are two sources:

    - ``tracepoint``: exceptions:page_fault_user and page_fault_kernel, in their own trace instance.
      It tells loads from stores and has times to the microsecond. It needs root and a mounted
      tracefs.
    - ``software``: perf's page-faults event. It has times in nanoseconds and symbols. It does not
      say whether the access was a load or a store, so every row is a load.

    ``auto`` takes the tracepoints if they can be recorded, else perf. If the kernel fills several
    pages at one fault, or a huge page, all of them have only this one row.

    ``raw/page_faults.txt`` is the text, and ``raw/perf.data`` perf's recording.

    Args:
        source: "auto", "tracepoint" or "software".
    """

    name = "page_faults"
    kind = Kind.FIRST_TOUCHES
    modes = frozenset({Mode.ATTACH, Mode.WRAP})
    gives = "the first touch of each page, at its time; no later accesses"
    use_instead = "write_sets shows written pages per interval; torch traces PyTorch models"

    def __init__(self, source: Literal["auto", "software", "tracepoint"] = "auto") -> None:
        if source not in ("auto", "software", "tracepoint"):
            raise InvalidArgumentError(f"source {source!r} is none of auto, software, tracepoint")
        self._source = source
        self._recording: PerfRecording | None = None
        self._instance: TraceInstance | None = None
        self._output: Path | None = None

    def unavailable_reason(self) -> str | None:
        chosen, reason = self._choice()
        return None if chosen else f"{reason}. {self.use_instead}"

    def _choice(self) -> tuple[str | None, str]:
        """The source to use, or None; and why each source tried before cannot run."""
        reasons: list[str] = []
        for source, check in (("tracepoint", _no_tracepoint), ("software", _no_software)):
            if self._source in ("auto", source):
                reason = check()
                if reason is None:
                    return source, "; ".join(reasons)
                reasons.append(f"{source}: {reason}")
        return None, "; ".join(reasons)

    def start(self, target_pids: list[int], output_dir: Path) -> None:
        if self._recording is not None or self._instance is not None:
            raise InvalidStateError("page_faults is running; stop it first")
        source, reason = self._choice()
        if source is None:
            raise CollectorUnavailableError(self.name, f"{reason}. {self.use_instead}")
        output_dir.mkdir(parents=True, exist_ok=True)
        self._output = output_dir / "page_faults.txt"
        try:
            if source == "tracepoint":
                self._instance = TraceInstance(_EVENTS, self._output)
                try:
                    self._instance.watch(target_pids)
                except BaseException:
                    self._instance.close()
                    self._instance = None
                    raise
            else:
                recording = PerfRecording(_options(), output_dir / "perf.data")
                if target_pids:
                    recording.attach(target_pids)
                self._recording = recording
        except (StrapIOError, ProcessLookupError) as error:
            raise CollectorUnavailableError(self.name, told(error)) from error

    def command_prefix(self, argv: Sequence[str]) -> list[str]:
        if self._instance is not None:
            return self._instance.around(argv)
        if self._recording is not None:
            return self._recording.around(argv)
        raise InvalidStateError("page_faults was not started")

    def stop(self) -> CollectorMeta:
        if self._output is None:
            raise InvalidStateError("page_faults was not started")
        if self._instance is not None:
            instance, self._instance = self._instance, None
            instance.close()
            warnings = [] if instance.error is None else [f"copying ended early: {instance.error}"]
            return self._meta(
                "tracepoint", self._output, instance.lost, instance.error is None, warnings
            )
        if self._recording is None:
            raise InvalidStateError("page_faults is not running")
        recording, self._recording = self._recording, None
        recording.finish()
        fields = recording.script(self._output, _FIELDS) if recording.data.exists() else None
        recording.warnings.append("perf's event does not say what an access was: all are loads")
        return self._meta(
            "software", recording.data, lost_samples(self._output), fields is not None,
            recording.warnings,
        )  # fmt: skip

    def _meta(
        self, source: str, output: Path, lost: int, whole: bool, warnings: list[str]
    ) -> CollectorMeta:
        if lost:
            warnings.append(f"{lost} page faults came faster than they could be written")
        extra: dict[str, Any] = {"source": source}
        return CollectorMeta(
            collector_type=self.name,
            available=True,
            used=True,
            fallback_reason=self.fallback_reason,
            event_strings=list(_EVENTS) if source == "tracepoint" else ["page-faults"],
            sample_period=1,
            output_file=str(output),
            output_file_size_bytes=output.stat().st_size if output.exists() else 0,
            parse_success=whole,
            dropped_samples=lost,
            warnings=warnings,
            extra=extra,
        )

    def trace(
        self, run_id: str, phase_boundaries: PhaseBoundaries | None = None
    ) -> pa.RecordBatchReader:
        running = self._instance is not None or self._recording is not None
        if self._output is None or running or not self._output.exists():
            raise InvalidStateError("page_faults has recorded nothing")
        phases = [dict(one) for one in phase_boundaries or ()]
        return reader_of_text(parse_page_faults(self._output, run_id, phases))


def _options() -> list[str]:
    return _OPTIONS + (_ROOT_OPTIONS if os.geteuid() == 0 else [])


@functools.cache
def _no_tracepoint() -> str | None:
    """Tries the tracepoints; returns why they cannot be recorded, or None."""
    try:
        with tempfile.TemporaryDirectory(prefix="mrm-trace-") as folder:
            text = Path(folder, "text")
            instance = TraceInstance(_EVENTS, text)
            try:
                subprocess.run(instance.around(["true"]), timeout=10, check=True)
            finally:
                instance.close()
            if not text.stat().st_size:
                return "a program ran and no page fault was recorded"
    except OSError as error:
        return told(error)
    return None


@functools.cache
def _no_software() -> str | None:
    return try_recording(_options())
