"""The counters of captures and profilers; ``core.stats`` and ``core.profiling`` define them."""

from __future__ import annotations

from ..core.profiling import PerformanceMetrics, SystemProfiler
from ..core.stats import CaptureStats

__all__ = ["CaptureStats", "PerformanceMetrics", "SystemProfiler"]
