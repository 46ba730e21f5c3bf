"""The path of `compute_read_freq` in mrm-trace; `metrics` defines it."""

from __future__ import annotations

from .metrics import compute_read_freq

__all__ = ["compute_read_freq"]
