"""Samples loads and stores with perf, by the performance counters of the processor."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa

from ...errors import InvalidArgumentError, InvalidStateError, StrapIOError
from ..parser.perf_script_parser import parse_perf_script
from ..schema import Kind
from .base import (
    BaseCollector,
    CollectorMeta,
    CollectorUnavailableError,
    Mode,
    PhaseBoundaries,
    told,
)
from .perf import INSTALL_PERF, PerfRecording, find_perf, lost_samples, try_recording
from .rows import reader_of_text

__all__ = ["PerfMemRunner", "machine_events"]

_PMUS = Path("/sys/bus/event_source/devices")
_INTEL_PMUS = ("cpu", "cpu_core", "cpu_atom")

# Fields for perf script to print; parse_perf_script reads each list. perf refuses a field that an
# event lacks, and some events have no data source or weight, so lists are tried in this order.
_FIELDS = (
    "comm,pid,tid,cpu,time,event,addr,data_src,weight,ip,sym,symoff,dso",
    "comm,pid,tid,cpu,time,event,addr,data_src,ip,sym,symoff,dso",
    "comm,pid,tid,cpu,time,event,addr,ip,sym,symoff,dso",
)


def machine_events(ldlat_threshold: int = 20, pmus: Path = _PMUS) -> list[str]:
    """The events that sample loads and stores on this processor, by perf's names; [] if none do.

    Intel: mem-loads and mem-stores, for each of two kinds of cores; with mem-loads-aux beside the
    loads if the processor needs it. AMD: IBS.

    Args:
        ldlat_threshold: the least latency in cycles of the loads that are sampled. AMD applies it
            from 128 on, if the processor can.
        pmus: the folder in which the kernel lists its event sources.
    """
    events = []
    for pmu in _INTEL_PMUS:
        named = pmus / pmu / "events"
        if (named / "mem-loads").exists():
            loads = f"{pmu}/mem-loads,ldlat={ldlat_threshold}/"
            if (named / "mem-loads-aux").exists():
                events.append(f"{{{pmu}/mem-loads-aux/,{loads}}}:P")
            else:
                events.append(f"{loads}P")
        if (named / "mem-stores").exists():
            events.append(f"{pmu}/mem-stores/P")
    if not events and (pmus / "ibs_op").exists():
        latency = (pmus / "ibs_op" / "format" / "ldlat").exists() and ldlat_threshold >= 128
        events.append(f"ibs_op/ldlat={ldlat_threshold}/" if latency else "ibs_op//")
    return events


class PerfMemRunner(BaseCollector):
    """Runs ``perf record`` with memory events: every ``sample_period``-th load and store.

    ``raw/perf.data`` is the recording, and ``raw/perf_script.txt`` the text made from it.
    """

    name = "perf_mem"
    kind = Kind.ACCESSES
    modes = frozenset({Mode.ATTACH, Mode.WRAP})
    gives = "a sample of all loads and stores, with address, code, latency and cache level"
    use_instead = (
        "torch traces PyTorch models exactly and anywhere; access traces C and C++ programs that "
        "can be rebuilt; page_faults shows the first touch of each page"
    )

    def __init__(
        self,
        events: Sequence[str] | None = None,
        sample_period: int = 4000,
        *,
        ldlat_threshold: int = 20,
        extra_flags: Sequence[str] = (),
        require_root: bool = False,
    ) -> None:
        """Sets the options of the recording.

        Args:
            events: perf's names of events; None takes :func:`machine_events`.
            sample_period: the number of events from one sample to the next.
            ldlat_threshold: the least latency in cycles of the loads that are sampled; see
                :func:`machine_events`.
            extra_flags: more options of perf record.
            require_root: refuse to run unless the user is root.

        Raises:
            InvalidArgumentError: ``sample_period`` or ``ldlat_threshold`` is not positive.
        """
        for name, value in (("sample_period", sample_period), ("ldlat_threshold", ldlat_threshold)):
            if value <= 0:
                raise InvalidArgumentError(f"{name} = {value}: must be positive")
        self._events = list(events) if events else machine_events(ldlat_threshold)
        self._sample_period = sample_period
        self._extra_flags = list(extra_flags)
        self._require_root = require_root
        self._ldlat = ldlat_threshold
        self._recording: PerfRecording | None = None
        self._text: Path | None = None

    def _options(self, events: Sequence[str]) -> list[str]:
        chosen = [word for event in events for word in ("-e", event)]
        return [
            *chosen, "-c", str(self._sample_period), "--data", "--weight", "--sample-cpu",
            *self._extra_flags,
        ]  # fmt: skip

    def unavailable_reason(self) -> str | None:
        if find_perf() is None:
            return f"{INSTALL_PERF}. {self.use_instead}"
        if self._require_root and os.geteuid() != 0:
            return "this is not root; run as root, or set require_root to false"
        # If the kernel lists no events, the reason has perf's errors for the usual ones.
        events = self._events or [f"cpu/mem-loads,ldlat={self._ldlat}/P", "ibs_op//"]
        if self._events:
            error = _tried(tuple(self._options(events)))
            return None if error is None else f"perf record: {error}. {self.use_instead}"
        errors = [
            f"perf record -e {event}: {_tried(tuple(self._options([event])))}" for event in events
        ]
        return (
            f"{'; '.join(errors)}. The kernel shows no memory events of this processor, as on "
            f"most virtual machines ({_PMUS} has no mem-loads, mem-stores or ibs_op). "
            f"{self.use_instead}"
        )

    def start(self, target_pids: list[int], output_dir: Path) -> None:
        if self._recording is not None:
            raise InvalidStateError("perf_mem is running; stop it first")
        reason = self.unavailable_reason()
        if reason is not None:
            raise CollectorUnavailableError(self.name, reason)
        recording = PerfRecording(self._options(self._events), output_dir / "perf.data")
        if target_pids:
            try:
                recording.attach(target_pids)
            except StrapIOError as error:
                raise CollectorUnavailableError(self.name, told(error)) from error
        self._recording = recording
        self._text = None

    def command_prefix(self, argv: Sequence[str]) -> list[str]:
        if self._recording is None:
            raise InvalidStateError("perf_mem was not started")
        return self._recording.around(argv)

    def stop(self) -> CollectorMeta:
        if self._recording is None:
            raise InvalidStateError("perf_mem was not started")
        recording, self._recording = self._recording, None
        recording.finish()
        text = recording.data.with_name("perf_script.txt")
        fields, lost = None, None
        if recording.data.exists():
            fields = recording.script(text, *_FIELDS)
        if fields is not None:
            self._text = text
            lost = lost_samples(text)
            if lost:
                recording.warnings.append(
                    f"perf lost {lost} samples; a longer sample_period or extra_flags "
                    "[-m, 4096] lose fewer"
                )
        size = recording.data.stat().st_size if recording.data.exists() else 0
        return CollectorMeta(
            collector_type=self.name,
            available=True,
            used=True,
            fallback_reason=self.fallback_reason,
            event_strings=list(self._events),
            sample_period=self._sample_period,
            output_file=str(recording.data) if size else None,
            output_file_size_bytes=size,
            parse_success=fields is not None,
            dropped_samples=lost,
            warnings=recording.warnings,
            extra={"fields": fields, "cycles_per_ns": _cycles_per_ns()},
        )

    def trace(
        self, run_id: str, phase_boundaries: PhaseBoundaries | None = None
    ) -> pa.RecordBatchReader:
        """The rows. ``access_latency_ns`` is perf's cycles divided by the clock of the processor.

        The clock is the rated one; if the kernel does not tell it, the present one.
        """
        if self._text is None:
            raise InvalidStateError("perf_mem has recorded nothing")
        parsed = parse_perf_script(
            self._text, run_id, _as_dicts(phase_boundaries), cycles_per_ns=_cycles_per_ns()
        )
        return reader_of_text(parsed)


def _as_dicts(boundaries: PhaseBoundaries | None) -> list[dict[str, object]]:
    return [dict(one) for one in boundaries or ()]


@functools.cache
def _tried(options: tuple[str, ...]) -> str | None:
    return try_recording(options)


@functools.cache
def _cycles_per_ns() -> float | None:
    """The clock in GHz: the processor's rated one, else its present one, else None."""
    rated = Path("/sys/devices/system/cpu/cpu0/cpufreq/base_frequency")  # kHz
    if rated.exists():
        return int(rated.read_text()) / 1e6
    found = re.search(r"^cpu MHz\s*: ([\d.]+)", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return float(found[1]) / 1e3 if found else None
