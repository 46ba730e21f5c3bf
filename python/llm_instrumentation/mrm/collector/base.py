"""What every collector does: say whether it can run here, collect, give its trace."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

import pyarrow as pa

from ...errors import UnsupportedError
from ..schema import Kind

__all__ = [
    "TIME_KEY",
    "BaseCollector",
    "CollectorMeta",
    "CollectorUnavailableError",
    "Mode",
    "PhaseBoundaries",
    "told",
]

#: Dicts of ``phase``, ``start_ns`` and ``end_ns``, CLOCK_MONOTONIC, [start, end).
PhaseBoundaries = Sequence[Mapping[str, Any]]

#: Schema metadata: what ``timestamp_ns`` is, where it is not the time of each row.
TIME_KEY = b"mrm_trace_time"


class Mode(str, Enum):
    """How a collector gets at the program that it watches."""

    IN_PROCESS = "in_process"  #: runs inside it: ``start([os.getpid()], ...)``
    ATTACH = "attach"  #: watches running processes: ``start(pids, ...)``
    WRAP = "wrap"  #: starts it: ``start([], ...)``, then run ``command_prefix(argv)``


class CollectorUnavailableError(UnsupportedError, RuntimeError):
    """A collector cannot run here.

    Attributes:
        collector: its name.
        reason: the real error, and what to do or use instead.
    """

    def __init__(self, collector: str, reason: str) -> None:
        self.collector = collector
        self.reason = reason
        super().__init__(f"{collector}: {reason}")


def told(error: OSError) -> str:
    """What an error says, without its number."""
    return error.strerror or str(error)


@dataclass
class CollectorMeta:
    """What a collector did, as metadata.json tells it.

    ``dropped_samples`` counts what was seen and lost on the way; None: the collector cannot
    know. ``coverage_estimate`` is the part of what happened that the trace holds, 0 to 1.
    """

    collector_type: str
    available: bool
    used: bool
    fallback_reason: str | None = None
    event_strings: list[str] = field(default_factory=list)
    sample_period: int = 0
    output_file: str | None = None
    output_file_size_bytes: int = 0
    parse_success: bool | None = None
    dropped_samples: int | None = None
    coverage_estimate: float | None = None
    warnings: list[str] = field(default_factory=list)
    extra: dict[str, Any] = field(default_factory=dict)


class BaseCollector(ABC):
    """A source of traces.

    ``start``, the program's work, ``stop``, ``trace``; then it may be started again. What is
    collected lies in ``output_dir`` (a run's ``raw/``) before ``stop`` returns.

    Attributes:
        name: the word that configurations use.
        kind: what its rows are; None for one that gives no rows.
        modes: the ways in which it gets at a program.
        gives: one line for people: what the trace holds.
        use_instead: one line for people: where to turn when it cannot run.
        fallback_reason: why the collectors before it could not run; set by whoever selected.
    """

    name: str
    kind: Kind | None
    modes: frozenset[Mode]
    gives: str
    use_instead: str
    fallback_reason: str | None = None

    @abstractmethod
    def unavailable_reason(self) -> str | None:
        """Why it cannot run here: the real error and the way out. None: it can."""

    def is_available(self) -> bool:
        return self.unavailable_reason() is None

    @abstractmethod
    def start(self, target_pids: list[int], output_dir: Path) -> None:
        """Begins to collect into ``output_dir``, which is made.

        Args:
            target_pids: the processes; none for a collector that will wrap its program.

        Raises:
            CollectorUnavailableError: it cannot run here, or not on these processes.
            InvalidStateError: it is running.
        """

    def command_prefix(self, argv: Sequence[str]) -> list[str]:
        """The command that runs ``argv`` under this collector; call it after ``start([], ...)``.

        Raises:
            UnsupportedError: this collector starts no programs, or none of this sort.
        """
        ways = " or ".join(sorted(mode.value for mode in self.modes))
        raise UnsupportedError(f"{self.name} cannot start {argv[0]!r}; it works {ways}")

    @abstractmethod
    def stop(self) -> CollectorMeta:
        """Ends the collection and says what came of it.

        Raises:
            InvalidStateError: it was not started.
        """

    @abstractmethod
    def trace(
        self, run_id: str, phase_boundaries: PhaseBoundaries | None = None
    ) -> pa.RecordBatchReader:
        """The rows, after ``stop``, as batches of ``arrow_schema(kind)``.

        Raises:
            InvalidStateError: nothing was collected.
        """
