"""Files and folders of runs."""

from __future__ import annotations

from pathlib import Path

from ..._files import sha256_file

__all__ = ["ensure_dir", "get_run_dir", "sha256_file"]


def ensure_dir(path: Path) -> None:
    """Makes a folder, and those above it, where they are missing."""
    path.mkdir(parents=True, exist_ok=True)


def get_run_dir(base_dir: Path, model_id: str, run_id: str) -> Path:
    """The folder of a run below that of the results."""
    return base_dir / model_id / run_id
