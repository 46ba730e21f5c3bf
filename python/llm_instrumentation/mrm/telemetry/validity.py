"""Classifies runs as clean, marginal or contaminated. Contaminated runs enter no aggregate."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from numbers import Real
from typing import Any

from ...errors import InvalidArgumentError
from ..schema import RunValidity


@dataclass(frozen=True)
class Limits:
    """The limits of a class.

    The percentages and the fraction of a run must be below their limits. Its number of throttling
    events may equal the limit. If ``baseline_cpu_pct`` is None, there is no limit for the load
    before the run. ``label_coverage`` is the least part of the rows, and of their bytes, that must
    have a region type.
    """

    observer_cpu_overhead_pct_max: float
    observer_memory_frac: float
    thermal_throttle_events: int
    baseline_cpu_pct: float | None
    label_coverage: float = 0.9


#: A run that exceeds a limit of marginal is contaminated. Contention on the disk and too few labels
#: always make a run contaminated. The limit of labels is the same for both classes: the table of a
#: type cannot be trusted if a tenth of the trace may belong to that type.
LIMITS: dict[RunValidity, Limits] = {
    RunValidity.CLEAN: Limits(10.0, 0.05, 0, 15.0),
    RunValidity.MARGINAL: Limits(20.0, 0.15, 2, None),
}


@dataclass
class ValidityResult:
    """The class of a run, the values that decide it, and the reasons why it is not clean."""

    run_validity: str  #: clean, marginal or contaminated
    observer_cpu_overhead_pct_max: float
    observer_memory_frac: float
    thermal_throttle_events: int
    baseline_cpu_pct: float
    io_contention_detected: bool
    failure_reasons: list[str] = field(default_factory=list)
    label_coverage: dict[str, float] | None = None  #: None if no trace was labelled


def classify_run(
    observer_cpu_overhead_pct_max: float,
    observer_memory_frac: float,
    thermal_throttle_events: int,
    baseline_cpu_pct: float = 0.0,
    io_contention_detected: bool = False,
    label_coverage: Mapping[str, float] | None = None,
) -> ValidityResult:
    """Classifies a run by :data:`LIMITS`.

    Args:
        observer_cpu_overhead_pct_max: the peak use of the tracing processes, in percent of a core.
            For a tracer inside the model's process: the slowdown against an untraced run, in
            percent.
        observer_memory_frac: the peak memory of the tracing processes, divided by the peak memory
            of the model's processes.
        thermal_throttle_events: the number of events during the run.
        baseline_cpu_pct: the mean use of the machine before the run, in percent. It can make the
            run marginal, not contaminated.
        io_contention_detected: whether the observers wrote more than 10 MiB beside the trace.
        label_coverage: which part of the trace's ``rows``, and of their ``bytes``, has a region
            type, from 0 to 1, as in ``labels.coverage`` of metadata.json. None if no trace was
            labelled.

    Returns:
        The class. ``failure_reasons`` has a sentence for each limit of clean that the run exceeds.
        If it also exceeds the limit of marginal, the sentence names the limit of marginal.

    Raises:
        InvalidArgumentError: a value is negative or not a number, or a part is above 1.
    """
    measured = {
        "observer_cpu_overhead_pct_max": observer_cpu_overhead_pct_max,
        "observer_memory_frac": observer_memory_frac,
        "thermal_throttle_events": thermal_throttle_events,
        "baseline_cpu_pct": baseline_cpu_pct,
    }
    for name, value in measured.items():
        if not isinstance(value, Real) or math.isnan(value) or value < 0:
            raise InvalidArgumentError(f"{name} = {value!r}: must be a number from 0 on")
    coverage = dict(label_coverage or {})
    for name, part in coverage.items():
        if not isinstance(part, Real) or not 0 <= part <= 1:
            raise InvalidArgumentError(
                f"label_coverage[{name!r}] = {part!r}: must be a number from 0 to 1"
            )

    clean, marginal = LIMITS[RunValidity.CLEAN], LIMITS[RunValidity.MARGINAL]
    beyond = _passed(marginal, measured, coverage)
    passed = _passed(clean, measured, coverage) | beyond
    if io_contention_detected:
        passed["io"] = "io_contention_detected: the tracer wrote over 10 MiB beside the trace"
    reasons = list(passed.values())
    if not reasons:
        validity = RunValidity.CLEAN
    elif not beyond and not io_contention_detected:
        validity = RunValidity.MARGINAL
    else:
        validity = RunValidity.CONTAMINATED
    return ValidityResult(
        run_validity=validity.value,
        observer_cpu_overhead_pct_max=observer_cpu_overhead_pct_max,
        observer_memory_frac=observer_memory_frac,
        thermal_throttle_events=thermal_throttle_events,
        baseline_cpu_pct=baseline_cpu_pct,
        io_contention_detected=io_contention_detected,
        failure_reasons=reasons,
        label_coverage=coverage or None,
    )


def _passed(
    limits: Limits, measured: Mapping[str, float], coverage: Mapping[str, float]
) -> dict[str, str]:
    """A sentence for each limit that a run exceeds, under a key for the limited value."""
    reasons = {}
    cpu = measured["observer_cpu_overhead_pct_max"]
    if cpu >= limits.observer_cpu_overhead_pct_max:
        limit = limits.observer_cpu_overhead_pct_max
        reasons["cpu"] = f"observer_cpu {cpu:.1f} % is not below {limit:g} %"
    memory = measured["observer_memory_frac"]
    if memory >= limits.observer_memory_frac:
        reasons["memory"] = (
            f"observer_mem_frac {memory:.3f} of the target is not below "
            f"{limits.observer_memory_frac:g}"
        )
    events = measured["thermal_throttle_events"]
    if events > limits.thermal_throttle_events:
        limit = limits.thermal_throttle_events
        reasons["events"] = f"thermal_throttle_events {events:g} is above {limit}"
    busy = measured["baseline_cpu_pct"]
    if limits.baseline_cpu_pct is not None and busy >= limits.baseline_cpu_pct:
        limit = limits.baseline_cpu_pct
        reasons["baseline"] = f"baseline_cpu {busy:.1f} % before the run is not below {limit:g} %"
    for name, part in coverage.items():
        if part < limits.label_coverage:
            reasons[name] = (
                f"label_coverage {covered(part)} of the {name} is below "
                f"{limits.label_coverage * 100:g} %"
            )
    return reasons


def covered(part: float) -> str:
    """A part in percent, rounded down, so that a part below a limit is never shown as the limit."""
    return "under 0.1 %" if 0 < part < 0.001 else f"{math.floor(part * 1000) / 10:g} %"


def classify_from_summary(
    summary: Mapping[str, Any],
    target_rss_mb: float = 0.0,
    label_coverage: Mapping[str, float] | None = None,
) -> ValidityResult:
    """Classifies a run by its ``observer_effect_summary``; a missing value counts as 0.

    Args:
        summary: the result of :func:`compute_observer_effect`, or the same from metadata.json.
        target_rss_mb: the peak memory of the model's processes, to compute the fraction of memory
            from. 0 takes the fraction of the summary.
        label_coverage: as for :func:`classify_run`.

    Raises:
        InvalidArgumentError: as for :func:`classify_run`.
    """
    if target_rss_mb > 0:
        memory_frac = summary.get("observer_memory_overhead_mb_peak", 0.0) / target_rss_mb
    else:
        memory_frac = summary.get("observer_memory_overhead_frac", 0.0)
    return classify_run(
        observer_cpu_overhead_pct_max=summary.get("observer_cpu_overhead_pct_max", 0.0),
        observer_memory_frac=memory_frac,
        thermal_throttle_events=summary.get("thermal_throttle_events", 0),
        baseline_cpu_pct=summary.get("baseline_cpu_pct", 0.0),
        io_contention_detected=summary.get("io_contention_detected", False),
        label_coverage=label_coverage,
    )


def judge(metadata: dict[str, Any]) -> None:
    """Classifies a run by its ``metadata``, and adds ``run_validity`` and ``validity`` to them.

    Without telemetry the cost of tracing is unknown. Then ``run_validity`` is None, unless the
    labels alone make the run contaminated, and ``validity`` has None for each value that was not
    measured. If there is no reason either, nothing is added.

    Args:
        metadata: the content of metadata.json, with ``observer_effect_summary`` and ``labels`` if
            they are known. The key ``recovered`` means that the run did not finish. If it then has
            no telemetry, a reason says so.

    Raises:
        InvalidArgumentError: as for :func:`classify_run`.
    """
    summary = metadata.get("observer_effect_summary")
    coverage = metadata.get("labels", {}).get("coverage")
    verdict = classify_from_summary(summary or {}, label_coverage=coverage)
    told = asdict(verdict)
    if summary is None:
        told |= dict.fromkeys(_MEASURED)
        if not verdict.failure_reasons:
            told["run_validity"] = None
        if "recovered" in metadata:
            told["failure_reasons"].append(
                "telemetry was not written before the run broke off: what watching cost is not "
                "known"
            )
        if not told["failure_reasons"]:
            return
    elif verdict.thermal_throttle_events and summary.get("invalidate_on_throttle", True):
        told["run_validity"] = RunValidity.CONTAMINATED.value
    metadata["run_validity"] = told["run_validity"]
    metadata["validity"] = told


@dataclass(kw_only=True)
class RunClass:
    """The class of a run, in the form that is shown to the user.

    Attributes:
        validity: clean, marginal or contaminated; None if the run has no class.
        validity_reasons: why the run is not clean.
        ways_to_clean: changes that would make it clean.
        label_coverage: which part of the trace's ``rows``, and of their ``bytes``, has a region
            type; None without a trace.
    """

    validity: str | None = None
    validity_reasons: list[str] = field(default_factory=list)
    ways_to_clean: list[str] = field(default_factory=list)
    label_coverage: dict[str, float] | None = None

    def tell_class(self, metadata: Mapping[str, Any]) -> None:
        """Sets the attributes from ``metadata``; call :func:`judge` first."""
        self.validity = metadata.get("run_validity")
        self.validity_reasons = metadata.get("validity", {}).get("failure_reasons", [])
        self.label_coverage = metadata.get("labels", {}).get("coverage")
        self.ways_to_clean = ways_to_clean(
            metadata.get("observer_effect_summary", {}), self.label_coverage
        )


#: The fields of :class:`ValidityResult` that come from telemetry.
_MEASURED = (
    "observer_cpu_overhead_pct_max", "observer_memory_frac", "thermal_throttle_events",
    "baseline_cpu_pct", "io_contention_detected",
)  # fmt: skip


def ways_to_clean(
    summary: Mapping[str, Any], label_coverage: Mapping[str, float] | None = None
) -> list[str]:
    """Suggestions that would make a run clean: a sentence for each limit of clean that it exceeds.

    Args:
        summary: the result of :func:`compute_observer_effect`, or ``observer_effect_summary`` of
            metadata.json.
        label_coverage: as for :func:`classify_run`.
    """
    clean = LIMITS[RunValidity.CLEAN]
    found = classify_from_summary(summary, label_coverage=label_coverage)
    cpu, memory = found.observer_cpu_overhead_pct_max, found.observer_memory_frac
    ways = []
    if cpu >= clean.observer_cpu_overhead_pct_max:
        limit = f"{cpu:.1f} % where clean is below {clean.observer_cpu_overhead_pct_max:g} %"
        if "paired_untraced_run" in summary:
            ways.append(
                f"tracing slowed the model by {limit}: trace on a machine that does nothing else; "
                "tracing takes time per operator, so wider layers and longer contexts lose less"
            )
        else:
            ways.append(
                f"the tracing processes took {limit} of a core: sample less often (a larger "
                "sample_period or poll_interval_ms), or give them a core that the model leaves free"
            )
    if memory >= clean.observer_memory_frac:
        ways.append(
            f"tracing took {memory:.3f} of the model's memory where clean is below "
            f"{clean.observer_memory_frac:g}: trace a larger model, or fewer tokens of it"
        )
    if found.thermal_throttle_events > clean.thermal_throttle_events:
        ways.append(
            f"the processor was throttled {found.thermal_throttle_events} times where clean has "
            f"{clean.thermal_throttle_events}: let it cool, and run again"
        )
    busy, idle = found.baseline_cpu_pct, clean.baseline_cpu_pct
    if idle is not None and busy >= idle:
        ways.append(
            f"the machine was {busy:.1f} % busy before the run where clean is below {idle:g} %: "
            "end what else runs, and run again"
        )
    if found.io_contention_detected:
        ways.append(
            "the tracer wrote over 10 MiB beside the trace where clean writes less: put its "
            "temporary files on another disk, or trace fewer tokens"
        )
    coverage = found.label_coverage or {}
    if any(part < clean.label_coverage for part in coverage.values()):
        told = " and ".join(f"{covered(part)} of the {name}" for name, part in coverage.items())
        ways.append(
            f"{told} have a region type where clean has at least {clean.label_coverage * 100:g} %: "
            "the torch collector labels every row; from outside, page_faults and write_sets see "
            "less beside the model than memray, a larger model is a larger part of its process, "
            "and labeller.rules_file labels the rest by its code"
        )
    return ways
