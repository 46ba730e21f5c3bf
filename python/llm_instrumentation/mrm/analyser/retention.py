"""The path of `compute_retention` in mrm-trace; `metrics` defines it."""

from __future__ import annotations

from .metrics import compute_retention

__all__ = ["compute_retention"]
