"""The names of 1.3.1 under their documented path; see `compat.profiling`."""

from __future__ import annotations

from ..compat.profiling import (
    MemorySample,
    PerformanceMetrics,
    SystemProfiler,
)

__all__ = [
    "MemorySample",
    "PerformanceMetrics",
    "SystemProfiler",
]
