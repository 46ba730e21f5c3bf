"""The names of mrm-trace under their documented path; see `compat.mrm.files`."""

from __future__ import annotations

from ...compat.mrm.files import ensure_dir, get_run_dir, sha256_file

__all__ = ["ensure_dir", "get_run_dir", "sha256_file"]
