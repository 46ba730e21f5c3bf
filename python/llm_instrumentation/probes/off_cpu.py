"""Waits of a process for a core."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from .probe import KernelProbe

__all__ = ["OffCpuProbe", "folded_stacks"]


class OffCpuProbe(KernelProbe):
    """Tells why and how long the threads of one process are on no core, until it is stopped.

    A snapshot has ``pid``, ``ended`` (all its threads have), ``waits`` by reason, with sleep apart
    from the run queue and a histogram of each, ``inflight`` with each thread that waits,
    ``losses``, and where asked ``stacks``: the waits by the place in the program and in the kernel.

    Args:
        pid: of the process, as this one sees it; this one by default. Of a process that is not
            there, :meth:`start` raises :class:`NotFoundError`.
        stacks: take the stack at each wait, which costs some 3 us. Those of the program are found
            by its frame pointers: without them they end early.
    """

    def __init__(self, pid: int | None = None, *, stacks: bool = False) -> None:
        options: dict[str, Any] = {"stacks": stacks}
        if pid is not None:
            options["pid"] = pid
        super().__init__("off_cpu", options)


def folded_stacks(snapshots: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """The stacks of snapshots as flamegraph.pl reads them, the longest first.

    Each line has the frames from the outermost, those of the kernel with ``_[k]``, and the
    microseconds of their waits::

        main;load;read;entry_SYSCALL_64_[k];vfs_read_[k];schedule_[k] 5210

    Args:
        snapshots: of an :class:`OffCpuProbe` with stacks; others have none.
    """
    total_ns: Counter[str] = Counter()
    for snapshot in snapshots:
        for stack in snapshot.get("stacks", ()):
            frames = stack["user"][::-1] + [f"{name}_[k]" for name in stack["kernel"][::-1]]
            total_ns[";".join(name.replace(";", ":") for name in frames)] += stack["total_ns"]
    for line, ns in total_ns.most_common():
        yield f"{line} {ns // 1000}"
