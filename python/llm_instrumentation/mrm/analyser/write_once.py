"""The path of `compute_write_once` in mrm-trace; `metrics` defines it."""

from __future__ import annotations

from .metrics import compute_write_once

__all__ = ["compute_write_once"]
