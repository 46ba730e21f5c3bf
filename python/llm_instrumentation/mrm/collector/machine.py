"""Finds out which collectors can run on this machine, by trying each."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass

from ...errors import InvalidArgumentError
from ..schema import Kind
from .base import BaseCollector, CollectorUnavailableError

__all__ = ["COLLECTORS", "CollectorStatus", "select_collector", "survey_machine"]

_log = logging.getLogger(__name__)

#: The module and class of each collector, by its name in configurations. Collectors that see more
#: come first.
COLLECTORS = {
    "perf_mem": (".perf_runner", "PerfMemRunner"),
    "torch": (".torch", "TorchTracer"),
    "access": (".access", "AccessCollector"),
    "lackey": (".lackey", "Lackey"),
    "page_faults": (".page_faults", "PageFaults"),
    "write_sets": (".write_sets", "WriteSets"),
    "memray": (".memray_runner", "MemrayRunner"),
    "process_monitor": (".process_monitor", "ProcessMonitorCollector"),
}


@dataclass(frozen=True)
class CollectorStatus:
    """Whether a collector can run here.

    Attributes:
        name: the collector's name in configurations.
        available: it can run here.
        reason: if it cannot run, the error and what to use instead; else None.
        kind: the kind of its rows; None if it has no rows.
        gives: a line that says what its trace holds.
        use_instead: a line that says what to use instead.
    """

    name: str
    available: bool
    reason: str | None
    kind: Kind | None
    gives: str
    use_instead: str


def survey_machine() -> list[CollectorStatus]:
    """The status of every collector. It tries each for a moment, about two seconds in all."""
    return [_status(name) for name in COLLECTORS]


def _status(name: str) -> CollectorStatus:
    try:
        collector = _build(name)
    except ImportError as error:
        return CollectorStatus(name, False, f"cannot be loaded: {error}", None, "", "")
    reason = collector.unavailable_reason()
    return CollectorStatus(
        name=name,
        available=reason is None,
        reason=reason,
        kind=collector.kind,
        gives=collector.gives,
        use_instead=collector.use_instead,
    )


def select_collector(
    prefer: str = "perf_mem", fallbacks: Sequence[str] = ("memray",)
) -> BaseCollector:
    """The first collector that can run here, with its default settings.

    The log says why the collectors before it cannot run. The chosen collector's ``fallback_reason``
    and later its :class:`.base.CollectorMeta` say it too.

    Args:
        prefer: the name of the first collector to try, one of :data:`COLLECTORS`.
        fallbacks: the names of the next ones, in order.

    Raises:
        InvalidArgumentError: a name is not in :data:`COLLECTORS`.
        CollectorUnavailableError: no collector can run; the message has each one's reason.
    """
    order = list(dict.fromkeys([prefer, *fallbacks]))
    for name in order:
        if name not in COLLECTORS:
            raise InvalidArgumentError(f"collector {name!r} is none of {', '.join(COLLECTORS)}")
    steps: list[str] = []
    for name in order:
        try:
            collector = _build(name)
            reason = collector.unavailable_reason()
        except ImportError as error:
            reason = f"cannot be loaded: {error}"
        if reason is None:
            collector.fallback_reason = "; ".join(steps) or None
            _log.info("collector %s", name)
            return collector
        _log.warning("collector %s cannot run here: %s", name, reason)
        steps.append(f"{name}: {reason}")
    raise CollectorUnavailableError(order[0], "no collector can run. " + "; ".join(steps))


def _build(name: str) -> BaseCollector:
    module, class_name = COLLECTORS[name]
    kind: type[BaseCollector] = getattr(importlib.import_module(module, __package__), class_name)
    return kind()
