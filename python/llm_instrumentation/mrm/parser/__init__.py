"""Parses the output of collectors to rows of a trace, and writes rows as Parquet."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..._lazy import lazy
from ..schema import ALL_COLUMNS, REQUIRED_COLUMNS

if TYPE_CHECKING:
    from .memray_parser import parse_memray
    from .normalizer import normalise_rows
    from .perf_script_parser import parse_perf_script
    from .text import ParsedTrace, parse_lackey, parse_page_faults
    from .writer import write_parquet

__all__ = [
    "ALL_COLUMNS",
    "REQUIRED_COLUMNS",
    "ParsedTrace",
    "normalise_rows",
    "parse_lackey",
    "parse_memray",
    "parse_page_faults",
    "parse_perf_script",
    "write_parquet",
]

__getattr__, __dir__ = lazy(
    __name__,
    {
        "ParsedTrace": ".text",
        "normalise_rows": ".normalizer",
        "parse_lackey": ".text",
        "parse_memray": ".memray_parser",
        "parse_page_faults": ".text",
        "parse_perf_script": ".perf_script_parser",
        "write_parquet": ".writer",
    },
)
