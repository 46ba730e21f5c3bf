"""Whether a run can be trusted: the machine before it, its heat, and the cost of watching."""

from __future__ import annotations

from .baseline import BaselineSnapshot, capture_baseline
from .observer_effect import ResourceSample, compute_observer_effect
from .thermal import ThermalMonitor, ThermalSample, ThermalSnapshot
from .validity import (
    LIMITS,
    Limits,
    ValidityResult,
    classify_from_summary,
    classify_run,
    judge,
    ways_to_clean,
)

__all__ = [
    "LIMITS",
    "BaselineSnapshot",
    "Limits",
    "ResourceSample",
    "ThermalMonitor",
    "ThermalSample",
    "ThermalSnapshot",
    "ValidityResult",
    "capture_baseline",
    "classify_from_summary",
    "classify_run",
    "compute_observer_effect",
    "judge",
    "ways_to_clean",
]
