"""Reads how long the CPU quota of this process's control group has stopped the group."""

from __future__ import annotations

from pathlib import Path

__all__ = ["cpu_throttled_s"]

_MOUNT = Path("/sys/fs/cgroup")


def cpu_throttled_s(groups: Path = Path("/proc/self/cgroup"), mount: Path = _MOUNT) -> float | None:
    """Seconds that the control group was throttled since it was created; None without a quota.

    The source is ``cpu.stat``: ``throttled_usec`` (us) in cgroup v2, ``throttled_time`` (ns) in v1.
    https://docs.kernel.org/admin-guide/cgroup-v2.html#cpu-interface-files
    """
    try:
        lines = groups.read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        # In a container the path may be the machine's. The group's files are then at the mount.
        tops = [mount / "cpu", mount / "cpu,cpuacct"] if controllers else [mount]
        for folder in [top / path.lstrip("/") for top in tops] + tops:
            if (seconds := _throttled_s(folder / "cpu.stat")) is not None:
                return seconds
    return None


def _throttled_s(file: Path) -> float | None:
    try:
        words = dict(line.split() for line in file.read_text().splitlines())
    except (OSError, ValueError):
        return None
    if "throttled_usec" in words:
        return int(words["throttled_usec"]) / 1e6
    return int(words["throttled_time"]) / 1e9 if "throttled_time" in words else None
