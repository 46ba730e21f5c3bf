"""Finds out the kind of a snapshot by its fields."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["described", "kind_of"]

# A snapshot is of the first of these kinds whose fields it has all.
_FIELDS = {
    "block": {"latency_histogram", "inflight"},
    "system": {"off_cpu_ns", "page_faults"},
    "syscalls": {"syscalls"},
    "off_cpu": {"waits"},
    "capture": {"counters"},
}
_NAMES = {
    "block": "block devices",
    "system": "processes and pressure",
    "syscalls": "the system calls of a process",
    "off_cpu": "the waits of a process",
    "capture": "the counters of a capture",
}


def kind_of(snapshot: Mapping[str, Any]) -> str | None:
    """``block``, ``system``, ``syscalls``, ``off_cpu`` or ``capture``; None if it is unknown."""
    return next((kind for kind, fields in _FIELDS.items() if fields <= snapshot.keys()), None)


def described(snapshot: Mapping[str, Any]) -> str:
    """The subject of the snapshot in words, for a message: "block devices"."""
    kind = kind_of(snapshot)
    return f"nothing known (it has {', '.join(sorted(snapshot))})" if kind is None else _NAMES[kind]
