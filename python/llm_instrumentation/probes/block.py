"""Requests to block devices."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Any

from .._native.probe import Probe

__all__ = ["BlockProbe"]


class BlockProbe:
    """Follows requests to block devices, from queue to completion, until it is stopped.

    Start it with ``with`` or :meth:`start`::

        with BlockProbe(devices=["nvme0n1"]) as probe:
            model.generate(...)
            print(probe.snapshot()["operations"])

    Args:
        devices: names of whole disks, as in /proc/partitions; all by default.
        requests: how many can be followed at a time, a power of two.
        expire_s: seconds after which a request that has not completed is given up, counted.
    """

    def __init__(
        self, devices: Sequence[str] = (), *, requests: int = 8192, expire_s: float = 600.0
    ) -> None:
        self._options = {"devices": list(devices), "requests": requests, "expire_s": expire_s}
        self._probe: Probe | None = None

    def start(self) -> BlockProbe:
        """Puts the programs into the kernel; does nothing while they run.

        Raises:
            InvalidArgumentError: an option, by name.
            NotFoundError: there is no such device.
            StrapPermissionError: this user may not load programs; the message says who may.
            UnsupportedError: the kernel cannot run them; the message says what it lacks.
        """
        if self._probe is None:
            self._probe = Probe("block", self._options)
        return self

    def snapshot(self) -> dict[str, Any]:
        """What happened since the snapshot before, or since the start.

        Returns:
            ``timestamp`` (s since 1970), ``iso_timestamp``, ``interval_s``, ``monotonic_ns`` (the
            clock of a capture's index), ``latency_histogram`` and ``inflight`` by device,
            ``operations`` by device and operation, ``losses``.

        Raises:
            RuntimeError: the probe does not run.
        """
        if self._probe is None:
            raise RuntimeError("the probe does not run: start it, or use it with `with`")
        return self._probe.read()

    def stop(self) -> None:
        """Takes the programs out of the kernel; does nothing where none run."""
        if self._probe is not None:
            probe, self._probe = self._probe, None
            probe.stop()

    def __enter__(self) -> BlockProbe:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()
