"""The names of mrm-trace under their documented path; see `compat.mrm.kv_lifecycle`."""

from __future__ import annotations

from ...compat.mrm.kv_lifecycle import KVBlockEntry, KVBlockTracker

__all__ = ["KVBlockEntry", "KVBlockTracker"]
