"""The probe for processes and pressure."""

from __future__ import annotations

from .probe import KernelProbe

__all__ = ["SystemProbe"]


class SystemProbe(KernelProbe):
    """Reads the time of each process on and off the cores, its page faults, and pressure.

    A snapshot has ``off_cpu_ns`` and ``page_faults`` by process, ``pressure`` by resource, and
    ``processes``: name, time on and off the cores, time in the run queue, minor and major faults,
    switches. Threads that slept through the whole interval are left out. docs/PROBES.md describes
    all fields.

    The processes are those of the caller's PID namespace, by their numbers there. ``scope`` is
    ``"pid_namespace"`` inside a PID namespace, such as that of a container, and ``"machine"``
    outside. Pressure is that of the whole machine.
    """

    def __init__(self) -> None:
        super().__init__("system", {})
