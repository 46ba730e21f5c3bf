"""The probe for requests to block devices."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from .probe import KernelProbe

__all__ = ["BlockProbe"]


class BlockProbe(KernelProbe):
    """Follows requests to block devices from the queue to their completion.

    Start it with ``with`` or :meth:`start`::

        with BlockProbe(devices=["nvme0n1"]) as probe:
            model.generate(...)
            print(probe.snapshot()["operations"])

    A snapshot has ``latency_histogram`` and ``inflight`` by device, ``operations`` by device and
    operation, ``diskstats`` (the kernel's own counts, absent with ``pid`` or ``cgroup``), and
    ``losses``. docs/PROBES.md describes them.

    Args:
        devices: disks or partitions, by the kernel's names or by paths; all disks by default.
        pid: follow the requests that threads of this process issue; 0 is this process, None all.
            Kernel threads issue the writes from the page cache, so these do not count here.
        cgroup: directory of a cgroup; follow its requests and those of the cgroups below it. If the
            cgroup has a controller for I/O, write-back counts for the cgroup to which the kernel
            accounts it.
        requests: number of requests that can be followed at a time, a power of two.
        expire_s: seconds after which an unfinished request is given up; ``losses`` counts it.
    """

    def __init__(
        self,
        devices: Sequence[str] = (),
        *,
        pid: int | None = None,
        cgroup: str | os.PathLike[str] | None = None,
        requests: int = 8192,
        expire_s: float = 600.0,
    ) -> None:
        options: dict[str, Any] = {
            "devices": list(devices),
            "pid": pid,
            "cgroup": None if cgroup is None else os.fspath(cgroup),
            "requests": requests,
            "expire_s": expire_s,
        }
        super().__init__("block", options)
