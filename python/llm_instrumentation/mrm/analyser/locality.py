"""The path of `compute_locality` in mrm-trace; `metrics` defines it."""

from __future__ import annotations

from .metrics import compute_locality

__all__ = ["compute_locality"]
