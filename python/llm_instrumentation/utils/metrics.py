"""What captures and profilers count; defined in ``core.stats`` and ``core.profiling``."""

from __future__ import annotations

from ..core.profiling import PerformanceMetrics, SystemProfiler
from ..core.stats import CaptureStats

__all__ = ["CaptureStats", "PerformanceMetrics", "SystemProfiler"]
