"""Probes: programs in the Linux kernel (eBPF) that watch the machine.

- :class:`BlockProbe` follows the requests to block devices.
- :class:`SystemProbe` reads the time of each process on and off the cores, its page faults, and
  the pressure on the machine.
- :class:`SyscallProbe` times the system calls of one process.
- :class:`OffCpuProbe` times the waits of one process for a core. :func:`folded_stacks` prints its
  stacks for flame graphs.
- :func:`collect` takes a snapshot at each interval. :class:`SnapshotWriter` writes snapshots as
  lines of JSON, and :func:`read_snapshots` reads them. :func:`export_snapshots` converts them to
  Parquet.
- A capture with ``config.with_probes(...)`` writes snapshots beside its stream. :func:`timeline`
  joins them with the capture's own counters, and :func:`plot_timeline` draws the result.

docs/PROBES.md describes the fields of the snapshots. Import the names from this package, not from
its modules.
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
