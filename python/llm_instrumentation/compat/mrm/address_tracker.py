"""Keeps the regions of a trace, for code that labels rows one by one."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["AddressTracker", "RegionEntry"]

_WEIGHT_ID = 1


@dataclass
class RegionEntry:
    """A region: its first and last page, its first and last access, the number of accesses."""

    region_id: int
    region_type: str
    page_min: int
    page_max: int
    first_seen_ns: int = 0
    last_seen_ns: int = 0
    access_count: int = 0

    def touch(self, page: int, timestamp_ns: int) -> None:
        """Counts one access."""
        self.access_count += 1
        self.last_seen_ns = max(self.last_seen_ns, timestamp_ns)
        self.page_min = min(self.page_min, page)
        self.page_max = max(self.page_max, page)


class AddressTracker:
    """Maps each page to its region. A page keeps the region of its first access.

    All weights are region 1. Each page of another type is a region of its own, numbered from 2.
    """

    def __init__(self) -> None:
        self._of_page: dict[int, RegionEntry] = {}
        self._regions: dict[int, RegionEntry] = {}
        self._next_id = _WEIGHT_ID + 1

    def update(self, address_page: int, region_type: str, timestamp_ns: int) -> RegionEntry:
        """Counts an access, and returns the region of its page.

        ``region_type`` counts only for the first access to the page.
        """
        entry = self._of_page.get(address_page)
        if entry is None:
            entry = self._of_page[address_page] = self._enter(
                address_page, region_type, timestamp_ns
            )
        entry.touch(address_page, timestamp_ns)
        return entry

    def _enter(self, page: int, region_type: str, timestamp_ns: int) -> RegionEntry:
        if region_type == "weight":
            number = _WEIGHT_ID
        else:
            number, self._next_id = self._next_id, self._next_id + 1
        return self._regions.setdefault(
            number, RegionEntry(number, region_type, page, page, timestamp_ns, timestamp_ns)
        )

    def lookup(self, address_page: int) -> RegionEntry | None:
        """The region of a page, or None if the page was not accessed."""
        return self._of_page.get(address_page)

    def region_map_rows(self) -> list[dict[str, Any]]:
        """A dict for each region, in the order of their first accesses."""
        return [asdict(entry) for entry in self._regions.values()]
