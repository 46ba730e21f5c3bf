"""Which disk a file lies on."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Disk", "disk_of"]

_MINOR_BITS = 20  # as the kernel numbers devices, and the snapshots of block devices


@dataclass(frozen=True)
class Disk:
    """A whole disk.

    Attributes:
        number: major << 20 | minor, as ``device_id`` of a snapshot.
        name: as in /proc/partitions.
    """

    number: int
    name: str


def disk_of(path: str | os.PathLike[str]) -> Disk | None:
    """The disk below the file system of a file, or of the folder that it is to stand in.

    None for file systems without one disk of their own: tmpfs, overlay, networks, btrfs, mirrors.
    The device mapper (LVM, encryption) hands its requests on: it is the disk below it that counts.
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
