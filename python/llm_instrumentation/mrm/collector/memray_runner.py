"""Records the allocations of a Python program with memray."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from ..._json import load_json
from ..._pages import units
from ...errors import InvalidArgumentError, InvalidStateError, UnsupportedError
from ..parser.memray_parser import MemrayMissingError, import_memray, parse_memray
from ..schema import Kind
from .base import BaseCollector, CollectorMeta, CollectorUnavailableError, Mode, PhaseBoundaries

__all__ = ["MemrayRunner"]

_WATCH_S = 0.2
_CHILD = "llm_instrumentation.mrm.collector.memray_child"


class MemrayRunner(BaseCollector):
    """Runs ``memray.Tracker`` in this process, or in a Python program that it starts.

    memray records the order of allocations, not their times. A row has the time of memray's last
    snapshot before it, a lower bound (see :mod:`..parser.memray_parser`). When the recording
    reaches ``file_size_limit_gb`` GiB, it ends with a warning and the program goes on.

    ``raw/memray.bin`` is the recording. ``raw/memray.json`` has the difference between
    CLOCK_MONOTONIC and memray's clock in ns.

    Args:
        native_traces: also record the native stack of each allocation.
        follow_fork: also record forked children, each into its own file; the trace does not have
            their rows.
        file_size_limit_gb: the size of the recording at which it ends, in GiB.
    """

    name = "memray"
    kind = Kind.ALLOCATIONS
    modes = frozenset({Mode.IN_PROCESS, Mode.WRAP})
    gives = "allocations and releases with their sizes, in order; times to about 10 ms"
    use_instead = "torch traces PyTorch models; page_faults and write_sets need no package"

    def __init__(
        self,
        native_traces: bool = True,
        follow_fork: bool = False,
        file_size_limit_gb: float = 20,
    ) -> None:
        if file_size_limit_gb <= 0:
            raise InvalidArgumentError(
                f"file_size_limit_gb = {file_size_limit_gb}: must be positive"
            )
        self._native_traces = native_traces
        self._follow_fork = follow_fork
        self._limit_gb = file_size_limit_gb
        self._file: Path | None = None
        self._tracker: Any = None
        self._wraps = False
        self._lock = threading.Lock()
        self._ending = threading.Event()
        self._watch: threading.Thread | None = None
        self._warnings: list[str] = []

    def unavailable_reason(self) -> str | None:
        try:
            import_memray()
        except MemrayMissingError as error:
            return f"{error}. {self.use_instead}"
        return None

    def start(self, target_pids: list[int], output_dir: Path) -> None:
        if self._file is not None and (self._tracker is not None or self._wraps):
            raise InvalidStateError("memray is running; stop it first")
        reason = self.unavailable_reason()
        if reason is not None:
            raise CollectorUnavailableError(self.name, reason)
        foreign = [pid for pid in target_pids if pid != os.getpid()]
        if foreign:
            raise CollectorUnavailableError(
                self.name,
                f"it cannot attach to process {foreign[0]}; start the program under it "
                "(command_prefix), or run the model in this process",
            )
        output_dir.mkdir(parents=True, exist_ok=True)
        for old in output_dir.glob("memray.bin*"):
            old.unlink()
        self._file = output_dir / "memray.bin"
        self._sidecar.unlink(missing_ok=True)
        self._warnings = []
        self._wraps = not target_pids
        if not self._wraps:
            self._begin()

    @property
    def _sidecar(self) -> Path:
        assert self._file is not None
        return self._file.with_suffix(".json")

    def _begin(self) -> None:
        memray = import_memray()
        clocks = {"clock_offset_ns": time.monotonic_ns() - time.time_ns()}
        self._sidecar.write_text(json.dumps(clocks) + "\n", encoding="utf-8")
        tracker = memray.Tracker(
            str(self._file), native_traces=self._native_traces, follow_fork=self._follow_fork
        )
        try:
            tracker.__enter__()
        except RuntimeError as error:  # another tracker is active
            raise CollectorUnavailableError(self.name, str(error)) from error
        self._tracker = tracker
        self._ending.clear()
        self._watch = threading.Thread(target=self._watch_size, name="memray-size", daemon=True)
        self._watch.start()

    def _watch_size(self) -> None:
        assert self._file is not None
        limit = int(self._limit_gb * (1 << 30))
        while not self._ending.wait(_WATCH_S):
            if self._file.stat().st_blocks * 512 >= limit:
                self._warnings.append(
                    f"the recording reached file_size_limit_gb ({units.size(limit)}) and ended; "
                    "what came later is not in the trace. Raise the limit, or record less: "
                    "native_traces false, fewer tokens"
                )
                self._end_tracker()
                return

    def _end_tracker(self) -> None:
        with self._lock:
            tracker, self._tracker = self._tracker, None
            if tracker is not None:
                tracker.__exit__(None, None, None)

    def command_prefix(self, argv: Sequence[str]) -> list[str]:
        if not self._wraps or self._file is None:
            raise InvalidStateError("memray was not started to wrap a program: start([], ...)")
        interpreter, rest = _split_python(argv)
        settings = {
            "native_traces": self._native_traces,
            "follow_fork": self._follow_fork,
            "file_size_limit_gb": self._limit_gb,
        }
        folder = os.path.abspath(self._file.parent)
        return [*interpreter, "-m", _CHILD, folder, json.dumps(settings), *rest]

    def stop(self) -> CollectorMeta:
        if self._file is None or (self._watch is None and not self._wraps):
            raise InvalidStateError("memray was not started")
        if self._wraps:
            self._wraps = False
            self._warnings += self._of_child()
        else:
            self._ending.set()
            assert self._watch is not None
            self._watch.join()
            self._watch = None
            self._end_tracker()
        size = self._file.stat().st_size if self._file.exists() else 0
        forks = sorted(str(one) for one in self._file.parent.glob("memray.bin.*"))
        if forks:
            self._warnings.append(
                f"{len(forks)} processes were forked; their recordings lie beside this one and "
                "are not in the trace"
            )
        return CollectorMeta(
            collector_type=self.name,
            available=True,
            used=True,
            fallback_reason=self.fallback_reason,
            output_file=str(self._file) if size else None,
            output_file_size_bytes=size,
            parse_success=size > 0,
            warnings=list(self._warnings),
            extra={
                "native_traces": self._native_traces,
                "memray_version": importlib.metadata.version("memray"),
                "forked_recordings": forks,
            },
        )

    def _of_child(self) -> list[str]:
        """The warnings that the recording process left in ``raw/memray.json``."""
        try:
            about = load_json(self._sidecar.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return ["the program did not begin to record: it was not run, or ended at once"]
        if "warnings" not in about:
            return ["the program was ended from outside; the recording lacks its last moments"]
        return [str(one) for one in about["warnings"]]

    def trace(
        self, run_id: str, phase_boundaries: PhaseBoundaries | None = None
    ) -> pa.RecordBatchReader:
        """The rows. An allocation is a store, and a release is a load."""
        if self._file is None or self._wraps or self._watch is not None or not self._file.exists():
            raise InvalidStateError("memray has recorded nothing")
        parsed = parse_memray(
            self._file,
            run_id,
            [dict(one) for one in phase_boundaries or ()],
            native_traces=self._native_traces,
            skip_frees=False,
        )
        return parsed.reader()


_WITH_VALUE = ("-W", "-X", "--check-hash-based-pycs")


def _split_python(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Splits a command into the interpreter with its options, and ``-m module`` or a script.

    Raises:
        UnsupportedError: the command runs no Python module or script.
    """
    if not argv or not os.path.basename(argv[0]).startswith(("python", "pypy")):
        raise UnsupportedError(
            f"memray runs Python programs alone, not {argv[0] if argv else 'nothing'!r}; "
            "page_faults or write_sets watch any program"
        )
    at = 1
    while at < len(argv) and argv[at].startswith("-") and argv[at] not in ("-m", "-c", "-"):
        at += 2 if argv[at] in _WITH_VALUE else 1
    if at >= len(argv) or argv[at] in ("-c", "-"):
        raise UnsupportedError("memray needs a module (-m) or a script to run")
    return list(argv[:at]), list(argv[at:])


def record_child(folder: Path, settings: dict[str, Any], run: Any) -> None:
    """Records this process while ``run()`` runs; the started program calls it.

    Its warnings go to ``raw/memray.json``, from where the collector in the other process reads
    them.
    """
    runner = MemrayRunner(**settings)
    runner.start([os.getpid()], folder)
    try:
        run()
    finally:
        meta = runner.stop()
        about = load_json(runner._sidecar.read_text(encoding="utf-8"))
        about["warnings"] = dataclasses.asdict(meta)["warnings"]
        runner._sidecar.write_text(json.dumps(about) + "\n", encoding="utf-8")
