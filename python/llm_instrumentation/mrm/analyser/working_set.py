"""The path of `compute_working_set` in mrm-trace; `metrics` defines it."""

from __future__ import annotations

from .metrics import compute_working_set

__all__ = ["compute_working_set"]
