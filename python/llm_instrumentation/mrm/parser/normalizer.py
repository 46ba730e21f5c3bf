"""The names of mrm-trace under their documented path; see `compat.mrm.normalizer`."""

from __future__ import annotations

from ...compat.mrm.normalizer import ALL_COLUMNS, REQUIRED_COLUMNS, normalise_rows

__all__ = ["ALL_COLUMNS", "REQUIRED_COLUMNS", "normalise_rows"]
