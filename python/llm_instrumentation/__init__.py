"""Streams every activation of a PyTorch model to disk, compressed and bounded in memory::

from llm_instrumentation import ActivationReader, capture_activations

with capture_activations(model, output_path="run.stream"):
model(**inputs)

with ActivationReader("run.stream") as reader:
reader["encoder.layer.0"][0].to_torch()
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ._lazy import lazy
from ._version import __version__

if TYPE_CHECKING:
    from .analysis.reader import Activation, ActivationReader
    from .core.capture import capture_activations, prepare
    from .core.compression import TensorCompressionManager
    from .core.config import HookConfig, HookGranularity, InstrumentationConfig
    from .core.framework import InstrumentationFramework, analyze_activations_with_tokens
    from .core.labels import annotate
    from .core.packed import packed
    from .core.scope import for_request
    from .core.stats import CaptureStats
    from .core.streaming import StreamingSerializer
    from .errors import StrapError

__all__ = [
    "Activation",
    "ActivationReader",
    "CaptureStats",
    "HookConfig",
    "HookGranularity",
    "InstrumentationConfig",
    "InstrumentationFramework",
    "StrapError",
    "StreamingSerializer",
    "TensorCompressionManager",
    "__version__",
    "analyze_activations_with_tokens",
    "annotate",
    "capture_activations",
    "for_request",
    "packed",
    "prepare",
]

__getattr__, __dir__ = lazy(
    __name__,
    {
        "Activation": ".analysis.reader",
        "ActivationReader": ".analysis.reader",
        "CaptureStats": ".core.stats",
        "HookConfig": ".core.config",
        "HookGranularity": ".core.config",
        "InstrumentationConfig": ".core.config",
        "InstrumentationFramework": ".core.framework",
        "StrapError": ".errors",
        "StreamingSerializer": ".core.streaming",
        "TensorCompressionManager": ".core.compression",
        "analyze_activations_with_tokens": ".core.framework",
        "annotate": ".core.labels",
        "capture_activations": ".core.capture",
        "for_request": ".core.scope",
        "packed": ".core.packed",
        "prepare": ".core.capture",
    },
)
