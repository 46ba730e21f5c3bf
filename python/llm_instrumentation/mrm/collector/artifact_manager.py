"""The folder for the raw output of a run's collector, and a check of the disk's free space."""

from __future__ import annotations

import shutil
from pathlib import Path

from ..._pages import units
from ...errors import NoSpaceError

__all__ = ["MIN_FREE_BYTES", "ArtifactManager", "DiskSpaceError"]

MIN_FREE_BYTES: int = 1 << 30


class DiskSpaceError(NoSpaceError, RuntimeError):
    """The disk has less free space than a run needs."""


class ArtifactManager:
    """The folder ``run_dir/raw`` and the names of the files in it.

    Args:
        run_dir: the folder of the run.
        min_free_bytes: the free space that :meth:`check_disk_space` asks for.
    """

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
        """Makes ``run_dir/raw`` and the folders above it."""
        self.raw_dir.mkdir(parents=True, exist_ok=True)

    def check_disk_space(self) -> None:
        """Checks that the file system of ``run_dir`` has enough free space.

        Raises:
            DiskSpaceError: it has less than ``min_free_bytes``; the message has both numbers.
        """
        folder = self._run_dir.absolute()
        while not folder.exists():
            folder = folder.parent
        free = shutil.disk_usage(folder).free
        if free < self._min_free_bytes:
            raise DiskSpaceError(
                f"{folder} has {units.size(free)} free, and a run needs "
                f"{units.size(self._min_free_bytes)}; free some, or set output.base_dir "
                "to another disk"
            )

    def perf_data_path(self) -> Path:
        return self.raw_dir / "perf.data"

    def perf_script_path(self) -> Path:
        return self.raw_dir / "perf_script.txt"

    def memray_path(self) -> Path:
        return self.raw_dir / "memray.bin"

    def get_file_size(self, path: Path) -> int:
        """The size of a file in bytes; 0 if there is no file."""
        path = Path(path)
        return path.stat().st_size if path.exists() else 0
