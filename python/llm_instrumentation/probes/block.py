"""Requests to block devices."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from .probe import KernelProbe

__all__ = ["BlockProbe"]


class BlockProbe(KernelProbe):
    """Follows requests to block devices, from queue to completion, until it is stopped.

    Start it with ``with`` or :meth:`start`::

        with BlockProbe(devices=["nvme0n1"]) as probe:
            model.generate(...)
            print(probe.snapshot()["operations"])

    A snapshot has ``latency_histogram`` and ``inflight`` by device, ``operations`` by device and
    operation, ``diskstats`` to compare with (not with ``pid`` or ``cgroup``), and ``losses``.

    Args:
        devices: disks or partitions, by the kernel's names or by paths; all disks by default.
        pid: of the process whose threads issue the requests; 0 is this one, None all. What it
            leaves to the page cache to write is issued by threads of the kernel.
        cgroup: directory of the cgroup that the requests are of, or one below it. With the
            controller for I/O, write-back counts for the cgroup that it is accounted to.
        requests: how many can be followed at a time, a power of two.
        expire_s: seconds after which a request that has not completed is given up, counted.
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
