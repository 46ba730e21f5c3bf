"""The names of 1.3.1 under their documented path; see `compat.auto_detect`."""

from __future__ import annotations

from ..compat.auto_detect import (
    Purpose,
    create_optimized_config,
    detect_model_architecture,
)

__all__ = [
    "Purpose",
    "create_optimized_config",
    "detect_model_architecture",
]
