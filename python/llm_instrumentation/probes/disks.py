"""Finds the disk that holds a file."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Disk", "disk_of"]

_MINOR_BITS = 20  # of a device number, in the kernel and in snapshots of block devices


@dataclass(frozen=True)
class Disk:
    """A whole disk.

    Attributes:
        number: major << 20 | minor, the ``device_id`` of a snapshot.
        name: the name in /proc/partitions.
    """

    number: int
    name: str


def disk_of(path: str | os.PathLike[str]) -> Disk | None:
    """The disk below the file system of a file. If the file does not exist, its folder counts.

    A device-mapper volume (LVM, encryption) passes its requests on, so the disk below it is
    returned.

    Returns:
        None for file systems without a single disk: tmpfs, overlay, networks, btrfs, mirrors.
    """
    for candidate in (path, os.path.dirname(os.path.abspath(os.fspath(path)))):
        try:
            device = os.stat(candidate).st_dev
        except OSError:
            continue
        return _whole(Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}"))
    return None


def _whole(entry: Path) -> Disk | None:
    try:
        folder = entry.resolve(strict=True)
        if (folder / "partition").exists():
            folder = folder.parent
        if below := list((folder / "slaves").iterdir()):
            return _whole(below[0]) if len(below) == 1 else None
        major, minor = map(int, (folder / "dev").read_text().split(":"))
    except (OSError, ValueError):
        return None
    return Disk(major << _MINOR_BITS | minor, folder.name)
