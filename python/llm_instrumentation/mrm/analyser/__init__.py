"""The tables of a labelled trace: retention, write-once, reads, working set, locality, reuse.

libstrap computes exact tables in one pass over the batches of the trace. The memory that it needs
is bounded by the number of distinct regions and addresses. docs/MEMORY_TRACES.md defines each
column.
"""

from __future__ import annotations

from .analysing import SUMMARY_TABLES
from .in_tokens import TOKEN_TABLES, compute_in_tokens
from .metrics import (
    DISTRIBUTION_TABLES,
    compute_all,
    compute_distributions,
    compute_iai,
    compute_locality,
    compute_read_freq,
    compute_retention,
    compute_working_set,
    compute_write_once,
)
from .parts import analyse_part, merge_parts, split_trace
from .suitability import classify_suitability

__all__ = [
    "DISTRIBUTION_TABLES",
    "SUMMARY_TABLES",
    "TOKEN_TABLES",
    "analyse_part",
    "classify_suitability",
    "compute_all",
    "compute_distributions",
    "compute_iai",
    "compute_in_tokens",
    "compute_locality",
    "compute_read_freq",
    "compute_retention",
    "compute_working_set",
    "compute_write_once",
    "merge_parts",
    "split_trace",
]
