"""System calls of a process."""

from __future__ import annotations

from .probe import KernelProbe

__all__ = ["SyscallProbe"]


class SyscallProbe(KernelProbe):
    """Counts and times the system calls of one process, until it is stopped.

    A snapshot has ``pid``, ``ended`` (all its threads have), ``syscalls`` by name, with a histogram
    of latencies each, ``inflight`` with each thread that is in a call, and ``losses``.

    While it runs, each system call of the whole machine takes some 500 ns more.

    Args:
        pid: of the process, as this one sees it; this one by default. Of a process that is not
            there, :meth:`start` raises :class:`NotFoundError`.
    """

    def __init__(self, pid: int | None = None) -> None:
        super().__init__("syscalls", {} if pid is None else {"pid": pid})
