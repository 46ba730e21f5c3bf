"""What the probes have in common."""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Any, TypeVar

from .._native.probe import Probe

__all__ = ["KernelProbe"]

_P = TypeVar("_P", bound="KernelProbe")


class KernelProbe:
    """A collector in the kernel, from :meth:`start` to :meth:`stop`, or within ``with``.

    Args:
        kind: of the collector.
        options: of the collector.
    """

    def __init__(self, kind: str, options: Mapping[str, Any]) -> None:
        self._kind, self._options = kind, dict(options)
        self._probe: Probe | None = None

    def start(self: _P) -> _P:
        """Puts the programs into the kernel; does nothing while they run.

        Raises:
            InvalidArgumentError: an option, by name.
            NotFoundError: there is no such device, process or cgroup.
            StrapPermissionError: this user may not load programs; the message says who may.
            UnsupportedError: the kernel cannot run them; the message says what it lacks.
        """
        if self._probe is None:
            self._probe = Probe(self._kind, self._options)
        return self

    def snapshot(self) -> dict[str, Any]:
        """What happened since the snapshot before, or since the start.

        Returns:
            ``timestamp`` (s since 1970), ``iso_timestamp``, ``interval_s``, ``monotonic_ns`` (the
            clock of a capture's index), and what the probe sees.

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

    def __enter__(self: _P) -> _P:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()
