"""The probe for the waits of a process."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from .probe import KernelProbe

__all__ = ["OffCpuProbe", "folded_stacks"]


class OffCpuProbe(KernelProbe):
    """Records why and how long the threads of one process are on no core.

    A snapshot has ``pid``, ``ended`` (whether all threads have ended), ``waits`` by reason (time
    asleep and time in the run queue, with histograms), ``inflight`` (the threads that wait now),
    ``losses``, and with `stacks` also ``stacks``: the waits by their place in program and kernel.
    docs/PROBES.md describes them.

    Args:
        pid: the process, by its number in the caller's PID namespace; this process by default. If
            there is no such process, :meth:`start` raises :class:`NotFoundError`.
        stacks: record the stack of each wait, which takes about 3 us more. The program's stack is
            found by its frame pointers; a program without them gives a stack that ends early.
    """

    def __init__(self, pid: int | None = None, *, stacks: bool = False) -> None:
        options: dict[str, Any] = {"stacks": stacks}
        if pid is not None:
            options["pid"] = pid
        super().__init__("off_cpu", options)


def folded_stacks(snapshots: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """The stacks of snapshots as lines for flamegraph.pl, the longest wait first.

    Each line has the frames, the outermost first and those of the kernel with ``_[k]``, and the
    sum of their waits in microseconds::

        main;load;read;entry_SYSCALL_64_[k];vfs_read_[k];schedule_[k] 5210

    Args:
        snapshots: of an :class:`OffCpuProbe` with `stacks`. Snapshots without stacks give no lines.
    """
    total_ns: Counter[str] = Counter()
    for snapshot in snapshots:
        for stack in snapshot.get("stacks", ()):
            frames = stack["user"][::-1] + [f"{name}_[k]" for name in stack["kernel"][::-1]]
            total_ns[";".join(name.replace(";", ":") for name in frames)] += stack["total_ns"]
    for line, ns in total_ns.most_common():
        yield f"{line} {ns // 1000}"
