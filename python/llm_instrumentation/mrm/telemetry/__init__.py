"""Measurements that tell whether a run can be trusted.

They are the load of the machine before the run, thermal throttling, and the cost of tracing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..._lazy import lazy

if TYPE_CHECKING:
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

__getattr__, __dir__ = lazy(
    __name__,
    {
        "BaselineSnapshot": ".baseline",
        "LIMITS": ".validity",
        "Limits": ".validity",
        "ResourceSample": ".observer_effect",
        "ThermalMonitor": ".thermal",
        "ThermalSample": ".thermal",
        "ThermalSnapshot": ".thermal",
        "ValidityResult": ".validity",
        "capture_baseline": ".baseline",
        "classify_from_summary": ".validity",
        "classify_run": ".validity",
        "compute_observer_effect": ".observer_effect",
        "judge": ".validity",
        "ways_to_clean": ".validity",
    },
)
