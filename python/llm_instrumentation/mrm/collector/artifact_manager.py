"""Where the raw output of a run's collector lies, and whether the disk has room for it."""

from __future__ import annotations

import shutil
from pathlib import Path

from ...errors import NoSpaceError

__all__ = ["MIN_FREE_BYTES", "ArtifactManager", "DiskSpaceError"]

MIN_FREE_BYTES: int = 1 << 30


class DiskSpaceError(NoSpaceError, RuntimeError):
    """The disk has less room than a run needs at least."""


class ArtifactManager:
    """The folder ``run_dir/raw`` and the names of the files in it."""

    def __init__(self, run_dir: Path, min_free_bytes: int = MIN_FREE_BYTES) -> None:
        self._run_dir = Path(run_dir)
        self._min_free_bytes = min_free_bytes

    @property
    def run_dir(self) -> Path:
        return self._run_dir

    @property
    def raw_dir(self) -> Path:
        return self._run_dir / "raw"

    def ensure_directories(self) -> None:
        """Makes ``run_dir/raw`` and what is above it."""
        self.raw_dir.mkdir(parents=True, exist_ok=True)

    def check_disk_space(self) -> None:
        """Looks before collecting whether ``run_dir``'s file system has room.

        Raises:
            DiskSpaceError: it has less than ``min_free_bytes``; says how much less.
        """
        folder = self._run_dir.absolute()
        while not folder.exists():
            folder = folder.parent
        free = shutil.disk_usage(folder).free
        if free < self._min_free_bytes:
            raise DiskSpaceError(
                f"{folder} has {free / 2**30:.2f} GiB free, and a run needs "
                f"{self._min_free_bytes / 2**30:.2f} GiB; free some, or set output.base_dir "
                "to another disk"
            )

    def perf_data_path(self) -> Path:
        return self.raw_dir / "perf.data"

    def perf_script_path(self) -> Path:
        return self.raw_dir / "perf_script.txt"

    def memray_path(self) -> Path:
        return self.raw_dir / "memray.bin"

    def get_file_size(self, path: Path) -> int:
        """The bytes of a file, 0 where there is none."""
        path = Path(path)
        return path.stat().st_size if path.exists() else 0
