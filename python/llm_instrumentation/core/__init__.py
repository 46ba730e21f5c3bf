"""The capture of activations: configuration, framework, hooks, tokens, codecs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .._lazy import lazy

if TYPE_CHECKING:
    from .auto_detect import create_optimized_config, detect_model_architecture
    from .capture import capture_activations
    from .compression import TensorCompressionManager
    from .config import HookConfig, HookGranularity, InstrumentationConfig
    from .framework import InstrumentationFramework, analyze_activations_with_tokens
    from .profiling import PerformanceMetrics, SystemProfiler
    from .stats import CaptureStats
    from .streaming import StreamingSerializer
    from .tokens import TokenTracker

__all__ = [
    "CaptureStats",
    "HookConfig",
    "HookGranularity",
    "InstrumentationConfig",
    "InstrumentationFramework",
    "PerformanceMetrics",
    "StreamingSerializer",
    "SystemProfiler",
    "TensorCompressionManager",
    "TokenTracker",
    "analyze_activations_with_tokens",
    "capture_activations",
    "create_optimized_config",
    "detect_model_architecture",
]

# torch takes seconds to import: only the first use of a name that needs it pays.
__getattr__, __dir__ = lazy(
    __name__,
    {
        "CaptureStats": ".stats",
        "HookConfig": ".config",
        "HookGranularity": ".config",
        "InstrumentationConfig": ".config",
        "InstrumentationFramework": ".framework",
        "PerformanceMetrics": ".profiling",
        "StreamingSerializer": ".streaming",
        "SystemProfiler": ".profiling",
        "TensorCompressionManager": ".compression",
        "TokenTracker": ".tokens",
        "analyze_activations_with_tokens": ".framework",
        "capture_activations": ".capture",
        "create_optimized_config": ".auto_detect",
        "detect_model_architecture": ".auto_detect",
    },
)
