"""The probe for the system calls of a process."""

from __future__ import annotations

from .probe import KernelProbe

__all__ = ["SyscallProbe"]


class SyscallProbe(KernelProbe):
    """Counts and times the system calls of one process.

    A snapshot has ``pid``, ``ended`` (whether all threads have ended), ``syscalls`` by name with
    histograms of latency, ``inflight`` (the threads that are in a call now), and ``losses``.
    docs/PROBES.md describes them.

    While the probe runs, each system call of the whole machine takes about 500 ns more.

    Args:
        pid: the process, by its number in the caller's PID namespace; this process by default. If
            there is no such process, :meth:`start` raises :class:`NotFoundError`.
    """

    def __init__(self, pid: int | None = None) -> None:
        super().__init__("syscalls", {} if pid is None else {"pid": pid})
