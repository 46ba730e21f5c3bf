"""Processes and pressure."""

from __future__ import annotations

from .probe import KernelProbe

__all__ = ["SystemProbe"]


class SystemProbe(KernelProbe):
    """What each process did on the cores and off them, its page faults, and pressure.

    A snapshot has ``off_cpu_ns`` and ``page_faults`` by process, ``pressure`` by resource, and in
    ``processes`` more of those that ran: name, time on and off the cores, time in the run queue,
    minor and major faults, switches. Threads that slept through the interval are not in it.

    Processes are those of the caller's PID namespace, by their numbers there; ``scope`` is
    ``"pid_namespace"`` within one, as in a container, and ``"machine"`` outside. Pressure is the
    machine's.
    """

    def __init__(self) -> None:
        super().__init__("system", {})
