"""The names of mrm-trace under their documented path; see `compat.mrm.logging`."""

from __future__ import annotations

from ...compat.mrm.logging import configure_root, get_logger

__all__ = ["configure_root", "get_logger"]
