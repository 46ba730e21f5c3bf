"""Samples what processes use: memory, CPU, threads, files, I/O, context switches."""

from __future__ import annotations

import csv
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import pyarrow as pa

from ..._extras import extra

with extra("mrm", "A process monitor"):
    import psutil

from ...errors import InvalidArgumentError, InvalidStateError
from ..schema import Kind, arrow_schema
from .base import BaseCollector, CollectorMeta, Mode, PhaseBoundaries

__all__ = ["ProcessMonitor", "ProcessMonitorCollector", "ProcessSample"]

_MIB = 1 << 20


@dataclass
class ProcessSample:
    """A sample of one process at one time. MB are of 2**20 bytes.

    ``t_s`` counts seconds from the monitor's start, and ``mono_ns`` is the same moment in ns of
    CLOCK_MONOTONIC. ``cpu_pct`` is the share of the time since the previous sample: 100 is one
    core. Bytes read and written, and context switches, count from the start of the process.
    """

    t_s: float
    pid: int
    cpu_pct: float
    rss_mb: float
    vms_mb: float
    shared_mb: float
    threads: int
    open_fds: int
    read_bytes: int
    write_bytes: int
    voluntary_ctx_switches: int
    involuntary_ctx_switches: int
    text_mb: float = 0.0
    data_mb: float = 0.0
    mono_ns: int = 0


class ProcessMonitor:
    """Samples processes in a thread, from ``start`` to ``stop``.

    Args:
        pids: the processes.
        poll_interval_ms: the time from one sample to the next.

    Attributes:
        vanished: ids of processes that had ended, before ``start`` or later. They get no further
            samples.
        denied: names of psutil's calls that were refused or do not exist here. Their values are 0
            in the samples.
    """

    def __init__(self, pids: Collection[int], poll_interval_ms: int = 100) -> None:
        if poll_interval_ms <= 0:
            raise InvalidArgumentError(f"poll_interval_ms = {poll_interval_ms}: must be positive")
        self._pids = list(dict.fromkeys(pids))
        self._interval_s = poll_interval_ms / 1000.0
        self._processes: list[psutil.Process] = []
        self._samples: list[ProcessSample] = []
        self._lock = threading.Lock()
        self._ending = threading.Event()
        self._thread: threading.Thread | None = None
        self._start_ns = 0
        self.vanished: list[int] = []
        self.denied: set[str] = set()

    def start(self) -> None:
        """Begins to sample; the samples of an earlier start are dropped.

        Raises:
            InvalidStateError: it is running.
        """
        if self._thread is not None:
            raise InvalidStateError("this ProcessMonitor is running; stop it first")
        self._samples, self._processes, self.vanished, self.denied = [], [], [], set()
        self._start_ns = time.monotonic_ns()
        for pid in self._pids:
            try:
                process = psutil.Process(pid)
                process.cpu_percent()  # the first call only begins the interval
                self._processes.append(process)
            except psutil.NoSuchProcess:
                self.vanished.append(pid)
        self._ending.clear()
        self._thread = threading.Thread(target=self._run, name="process-monitor", daemon=True)
        self._thread.start()

    def stop(self) -> list[ProcessSample]:
        """Takes a last sample, ends the thread and returns all samples."""
        self._ending.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        return self.get_samples()

    def get_samples(self) -> list[ProcessSample]:
        """The samples so far. Any thread may call this at any time."""
        with self._lock:
            return list(self._samples)

    def __enter__(self) -> ProcessMonitor:
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def _run(self) -> None:
        ending = False
        while not ending:
            ending = self._ending.wait(self._interval_s)
            for process in list(self._processes):
                try:
                    sample = self._sample(process)
                except psutil.NoSuchProcess:
                    self._processes.remove(process)
                    self.vanished.append(process.pid)
                    continue
                with self._lock:
                    self._samples.append(sample)

    def _sample(self, process: psutil.Process) -> ProcessSample:
        now = time.monotonic_ns()
        if not process.is_running() or process.status() == psutil.STATUS_ZOMBIE:
            raise psutil.NoSuchProcess(process.pid)
        with process.oneshot():
            memory = process.memory_info()
            counters = self._allowed(process, "io_counters")
            switches = self._allowed(process, "num_ctx_switches")
            return ProcessSample(
                t_s=(now - self._start_ns) / 1e9,
                pid=process.pid,
                cpu_pct=process.cpu_percent(),
                rss_mb=memory.rss / _MIB,
                vms_mb=memory.vms / _MIB,
                shared_mb=getattr(memory, "shared", 0) / _MIB,
                threads=process.num_threads(),
                open_fds=self._allowed(process, "num_fds") or 0,
                read_bytes=counters.read_bytes if counters else 0,
                write_bytes=counters.write_bytes if counters else 0,
                voluntary_ctx_switches=switches.voluntary if switches else 0,
                involuntary_ctx_switches=switches.involuntary if switches else 0,
                text_mb=getattr(memory, "text", 0) / _MIB,
                data_mb=getattr(memory, "data", 0) / _MIB,
                mono_ns=now,
            )

    def _allowed(self, process: psutil.Process, what: str) -> Any:
        """The result of the process's method ``what``; None if it is refused or unknown here."""
        call: Callable[[], Any] | None = getattr(process, what, None)
        if call is None:
            self.denied.add(what)
            return None
        try:
            return call()
        except psutil.AccessDenied:
            self.denied.add(what)
            return None


_MEMORY = {"rss", "vms", "shared", "text", "data"}


class ProcessMonitorCollector(BaseCollector):
    """Runs a :class:`ProcessMonitor` as a collector. It has samples, but its trace has no rows.

    ``raw/process_samples.csv`` has a line for each sample, with the fields of
    :class:`ProcessSample`.
    """

    name = "process_monitor"
    kind: Kind | None = None
    modes = frozenset({Mode.ATTACH, Mode.IN_PROCESS})
    gives = "samples of memory, CPU and I/O over time; no rows, so no table of a trace"
    use_instead = "psutil reads /proc: mount it"

    def __init__(
        self,
        poll_interval_ms: int = 100,
        metrics: Collection[str] = ("rss", "vms", "shared", "text", "data"),
    ) -> None:
        """Sets the options.

        Args:
            poll_interval_ms: the time from one sample to the next.
            metrics: the kinds of memory that the file has, of rss, vms, shared, text and data.

        Raises:
            InvalidArgumentError: a metric is unknown.
        """
        unknown = sorted(set(metrics) - _MEMORY)
        if unknown:
            raise InvalidArgumentError(
                f"metrics: {unknown[0]!r} is none of {', '.join(sorted(_MEMORY))}"
            )
        self._left_out = {f"{name}_mb" for name in _MEMORY - set(metrics)}
        self._interval_ms = poll_interval_ms
        self._monitor: ProcessMonitor | None = None
        self._output: Path | None = None
        self.samples: list[ProcessSample] = []

    def unavailable_reason(self) -> str | None:
        try:
            psutil.Process().memory_info()
        except (OSError, psutil.Error) as error:
            return f"this process cannot be sampled: {error}. {self.use_instead}"
        return None

    def start(self, target_pids: list[int], output_dir: Path) -> None:
        if self._monitor is not None:
            raise InvalidStateError("process_monitor is running; stop it first")
        output_dir.mkdir(parents=True, exist_ok=True)
        self._output = output_dir / "process_samples.csv"
        self._monitor = ProcessMonitor(target_pids, self._interval_ms)
        self._monitor.start()

    def stop(self) -> CollectorMeta:
        if self._monitor is None or self._output is None:
            raise InvalidStateError("process_monitor was not started")
        monitor, self._monitor = self._monitor, None
        self.samples = monitor.stop()
        self._write(self._output)
        warnings = []
        if monitor.denied:
            names = ", ".join(sorted(monitor.denied))
            warnings.append(f"may not be read, 0 in the samples: {names}")
        return CollectorMeta(
            collector_type=self.name,
            available=True,
            used=True,
            fallback_reason=self.fallback_reason,
            output_file=str(self._output),
            output_file_size_bytes=self._output.stat().st_size,
            parse_success=bool(self.samples),
            warnings=warnings,
            extra={
                "poll_interval_ms": self._interval_ms,
                "samples": len(self.samples),
                "vanished_pids": monitor.vanished,
            },
        )

    def _write(self, path: Path) -> None:
        names = [one.name for one in fields(ProcessSample) if one.name not in self._left_out]
        with open(path, "w", encoding="utf-8", newline="") as out:
            table = csv.DictWriter(out, names, extrasaction="ignore")
            table.writeheader()
            table.writerows(asdict(sample) for sample in self.samples)

    def trace(
        self, run_id: str, phase_boundaries: PhaseBoundaries | None = None
    ) -> pa.RecordBatchReader:
        """A reader without rows."""
        if self._output is None:
            raise InvalidStateError("process_monitor has not been started and stopped")
        return pa.RecordBatchReader.from_batches(arrow_schema(), iter(()))
