"""The common base of the probes."""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Any, TypeVar

from .._native.probe import Probe

__all__ = ["KernelProbe"]

_P = TypeVar("_P", bound="KernelProbe")


class KernelProbe:
    """A probe that runs from :meth:`start` to :meth:`stop`, or within ``with``.

    Args:
        kind: the kind of ``strap_probe_start`` in strap.h.
        options: the options of this kind, listed there too.
    """

    def __init__(self, kind: str, options: Mapping[str, Any]) -> None:
        self._kind, self._options = kind, dict(options)
        self._probe: Probe | None = None

    def start(self: _P) -> _P:
        """Loads the probe's programs into the kernel. Does nothing if they run already.

        Raises:
            InvalidArgumentError: an option is wrong; the message names it.
            NotFoundError: there is no such device, process or cgroup.
            StrapPermissionError: this user may not load programs; the message says who may.
            UnsupportedError: the kernel cannot run the programs; the message says what it lacks.
        """
        if self._probe is None:
            self._probe = Probe(self._kind, self._options)
        return self

    def snapshot(self) -> dict[str, Any]:
        """Returns the counts since the last snapshot, or since the start.

        Returns:
            ``timestamp`` (seconds since 1970), ``iso_timestamp``, ``interval_s``, ``monotonic_ns``
            (on the clock of a capture's index), and the fields of this probe.

        Raises:
            RuntimeError: the probe does not run.
        """
        if self._probe is None:
            raise RuntimeError("the probe does not run: start it, or use it with `with`")
        return self._probe.read()

    def stop(self) -> None:
        """Removes the probe's programs from the kernel. Does nothing if they do not run."""
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
