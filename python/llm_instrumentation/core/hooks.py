"""The names of 1.3.1 under their documented path; see `compat.hooks`."""

from __future__ import annotations

from ..compat.hooks import (
    HookConfig,
    HookGranularity,
    LayerSelectionError,
    OptimizedHookManager,
    TensorProcessor,
)

__all__ = [
    "HookConfig",
    "HookGranularity",
    "LayerSelectionError",
    "OptimizedHookManager",
    "TensorProcessor",
]
