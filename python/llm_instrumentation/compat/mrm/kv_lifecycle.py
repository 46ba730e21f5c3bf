"""Keeps the pages of the KV cache, for code that labels rows one by one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = ["KVBlockEntry", "KVBlockTracker"]


@dataclass
class KVBlockEntry:
    """A page of the KV cache. Times are in ns.

    Attributes:
        block_id: the region id of the first access.
        address: the address of the first access.
        address_page: the number of the page.
        write_ns: the first store, or None.
        last_read_ns: the last load, or 0.
        total_reads: the number of loads.
        evict_ns: the next store at another time than the first, or None.
    """

    block_id: int
    address: int
    address_page: int
    write_ns: int | None = None
    last_read_ns: int = 0
    total_reads: int = 0
    evict_ns: int | None = None


class KVBlockTracker:
    """Records the stores and loads of each page of the KV cache."""

    def __init__(self) -> None:
        self._blocks: dict[int, KVBlockEntry] = {}

    def record(
        self, address: int, address_page: int, region_id: int, op_type: str, timestamp_ns: int
    ) -> None:
        """Counts one access to the KV cache. Each ``op_type`` except "store" is a load."""
        block = self._blocks.setdefault(
            address_page, KVBlockEntry(region_id, address, address_page)
        )
        if op_type != "store":
            block.total_reads += 1
            block.last_read_ns = max(block.last_read_ns, timestamp_ns)
        elif block.write_ns is None:
            block.write_ns = timestamp_ns
        elif block.evict_ns is None and timestamp_ns != block.write_ns:
            block.evict_ns = timestamp_ns

    def lifecycle_rows(self) -> list[dict[str, Any]]:
        """A dict for each page, as in ``kv_block_lifecycle.parquet``."""
        rows = []
        for block in self._blocks.values():
            written = block.write_ns or 0
            end = block.evict_ns or block.last_read_ns or written
            rows.append(
                {
                    "block_id": block.block_id,
                    "address": block.address,
                    "address_page": block.address_page,
                    "write_ns": written,
                    "last_read_ns": block.last_read_ns,
                    "evict_ns": block.evict_ns,
                    "total_reads": block.total_reads,
                    "lifetime_ns": max(0, end - written),
                }
            )
        return rows
