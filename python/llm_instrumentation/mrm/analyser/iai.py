"""The path of `compute_iai` in mrm-trace; `metrics` defines it."""

from __future__ import annotations

from .metrics import compute_iai

__all__ = ["compute_iai"]
