"""The base class of collectors: whether one can run here, how it collects, and its trace."""

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

#: Dicts of ``phase``, ``start_ns`` and ``end_ns``: [start, end) in ns of CLOCK_MONOTONIC.
PhaseBoundaries = Sequence[Mapping[str, Any]]

#: Key in a schema's metadata. If ``timestamp_ns`` is not the time of the access, the value says
#: what it is.
TIME_KEY = b"mrm_trace_time"


class Mode(str, Enum):
    """How a collector reaches the program that it watches."""

    IN_PROCESS = "in_process"  #: runs inside the program: ``start([os.getpid()], ...)``
    ATTACH = "attach"  #: watches running processes: ``start(pids, ...)``
    WRAP = "wrap"  #: starts the program: ``start([], ...)``, then run ``command_prefix(argv)``


class CollectorUnavailableError(UnsupportedError, RuntimeError):
    """A collector cannot run here.

    Attributes:
        collector: the collector's name.
        reason: the error of the system, and what to do or use instead.
    """

    def __init__(self, collector: str, reason: str) -> None:
        self.collector = collector
        self.reason = reason
        super().__init__(f"{collector}: {reason}")


def told(error: OSError) -> str:
    """The message of an error, without its errno."""
    return error.strerror or str(error)


@dataclass
class CollectorMeta:
    """The results of a collector; metadata.json has the same fields.

    ``dropped_samples`` counts events that were seen but lost; None: the collector cannot know.
    ``coverage_estimate`` is the part of all events that the trace holds, from 0 to 1; None: the
    collector cannot know.
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

    Call ``start``, let the program work, call ``stop`` and then ``trace``. After that the collector
    can be started again. Once ``stop`` returns, all raw data lies in ``output_dir`` (a run's
    ``raw/``).

    Attributes:
        name: the collector's name in configurations.
        kind: the kind of its rows; None for a collector without rows.
        modes: the ways in which it can reach a program.
        gives: a line for people that says what the trace holds.
        use_instead: a line for people that says what to use if it cannot run.
        fallback_reason: why the collectors tried before it could not run; the code that selects a
            collector sets it.
    """

    name: str
    kind: Kind | None
    modes: frozenset[Mode]
    gives: str
    use_instead: str
    fallback_reason: str | None = None

    @abstractmethod
    def unavailable_reason(self) -> str | None:
        """Why the collector cannot run here, and what to do instead; None: it can run."""

    def is_available(self) -> bool:
        """Whether the collector can run here."""
        return self.unavailable_reason() is None

    @abstractmethod
    def start(self, target_pids: list[int], output_dir: Path) -> None:
        """Begins to collect into ``output_dir``.

        Args:
            target_pids: the processes to watch; [] to start a program with ``command_prefix``.
            output_dir: the folder for the raw data; it is made if it does not exist.

        Raises:
            CollectorUnavailableError: the collector cannot run here, or not on these processes.
            InvalidStateError: the collector is running.
        """

    def command_prefix(self, argv: Sequence[str]) -> list[str]:
        """The command that runs ``argv`` under this collector. First call ``start([], ...)``.

        Raises:
            UnsupportedError: this collector cannot start programs, or not this one.
        """
        ways = " or ".join(sorted(mode.value for mode in self.modes))
        raise UnsupportedError(f"{self.name} cannot start {argv[0]!r}; it works {ways}")

    @abstractmethod
    def stop(self) -> CollectorMeta:
        """Ends the collection and returns what it did.

        Raises:
            InvalidStateError: the collector was not started.
        """

    @abstractmethod
    def trace(
        self, run_id: str, phase_boundaries: PhaseBoundaries | None = None
    ) -> pa.RecordBatchReader:
        """The rows as batches of ``arrow_schema(kind)``. First call ``stop``.

        Args:
            run_id: ``run_id`` of all rows.
            phase_boundaries: the phases, from which each row gets its ``phase`` by its time.

        Raises:
            InvalidStateError: nothing was collected.
        """
