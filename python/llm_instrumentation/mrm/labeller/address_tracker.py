"""The names of mrm-trace under their documented path; see `compat.mrm.address_tracker`."""

from __future__ import annotations

from ...compat.mrm.address_tracker import AddressTracker, RegionEntry

__all__ = ["AddressTracker", "RegionEntry"]
