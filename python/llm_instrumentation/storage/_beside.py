"""The files that may stand beside a stream, as docs/STREAM_FORMAT.md lists them."""

from __future__ import annotations

import os
from pathlib import Path

from ..core.files.calls_file import calls_path_for
from ..core.token_files import token_file_paths

__all__ = ["files_beside", "snapshot_files"]


def snapshot_files(stream: str | os.PathLike[str]) -> list[Path]:
    """The files of the machine's snapshots, which few captures have."""
    return [Path(f"{os.fspath(stream)}.{what}.jsonl") for what in ("capture", "block", "system")]


def files_beside(stream: str | os.PathLike[str]) -> list[Path]:
    """The paths of all files that may stand beside a stream, whether they exist or not."""
    return [
        Path(f"{os.fspath(stream)}.index"),
        calls_path_for(stream),
        *token_file_paths(stream),
        Path(f"{os.fspath(stream)}.ckpt.json"),
        *snapshot_files(stream),
    ]
