"""The machine beside the program, watched from within the Linux kernel (eBPF).

:class:`BlockProbe` follows the requests to block devices, :class:`SystemProbe` tells what each
process did on the cores and off them. Of one process :class:`SyscallProbe` follows the system calls
and :class:`OffCpuProbe` the waits for a core; :func:`folded_stacks` is for flame graphs.
:func:`collect` takes a snapshot at each interval, :class:`SnapshotWriter` and
:func:`read_snapshots` keep them as lines of JSON, :func:`export_snapshots` makes Parquet of those.
A capture with ``config.with_probes(...)`` has them beside its stream; :func:`timeline` lays one
over the other.
docs/PROBES.md tells what they hold.
"""

from __future__ import annotations

from typing import Any

from .._lazy import lazy

_NAMES = {
    "BlockProbe": ".block",
    "OffCpuProbe": ".off_cpu",
    "SnapshotWriter": ".jsonl",
    "SyscallProbe": ".syscalls",
    "SystemProbe": ".system",
    "collect": ".intervals",
    "export_snapshots": ".export",
    "folded_stacks": ".off_cpu",
    "plot_timeline": ".correlation",
    "read_snapshots": ".jsonl",
    "timeline": ".correlation",
}

__all__ = sorted(_NAMES)

_getattr, __dir__ = lazy(__name__, _NAMES)


def __getattr__(name: str) -> Any:
    return _getattr(name)
