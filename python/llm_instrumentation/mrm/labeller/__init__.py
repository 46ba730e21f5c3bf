"""Labels each row with its region type, by known ranges, earlier rows of its page, and rules."""

from __future__ import annotations

from .address_tracker import AddressTracker, RegionEntry
from .kv_lifecycle import KVBlockEntry, KVBlockTracker
from .labeller import KnownRange, TraceLabeller
from .symbol_rules import DEFAULT_RULES, SymbolRule, classify_symbol, load_rules

__all__ = [
    "DEFAULT_RULES",
    "AddressTracker",
    "KVBlockEntry",
    "KVBlockTracker",
    "KnownRange",
    "RegionEntry",
    "SymbolRule",
    "TraceLabeller",
    "classify_symbol",
    "load_rules",
]
