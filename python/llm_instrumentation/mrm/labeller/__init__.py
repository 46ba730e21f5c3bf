"""What each row's memory holds, by known ranges, earlier rows of its page, and rules."""

from __future__ import annotations

from .labeller import KnownRange, TraceLabeller
from .rules import DEFAULT_RULES, SymbolRule, classify_symbol, load_rules
from .trackers import AddressTracker, KVBlockEntry, KVBlockTracker, RegionEntry

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
