"""Requests to block devices."""

from __future__ import annotations

from collections.abc import Sequence

from .probe import KernelProbe

__all__ = ["BlockProbe"]


class BlockProbe(KernelProbe):
    """Follows requests to block devices, from queue to completion, until it is stopped.

    Start it with ``with`` or :meth:`start`::

        with BlockProbe(devices=["nvme0n1"]) as probe:
            model.generate(...)
            print(probe.snapshot()["operations"])

    A snapshot has ``latency_histogram`` and ``inflight`` by device, ``operations`` by device and
    operation, and ``losses``.

    Args:
        devices: names of whole disks, as in /proc/partitions; all by default.
        requests: how many can be followed at a time, a power of two.
        expire_s: seconds after which a request that has not completed is given up, counted.
    """

    def __init__(
        self, devices: Sequence[str] = (), *, requests: int = 8192, expire_s: float = 600.0
    ) -> None:
        super().__init__(
            "block", {"devices": list(devices), "requests": requests, "expire_s": expire_s}
        )
