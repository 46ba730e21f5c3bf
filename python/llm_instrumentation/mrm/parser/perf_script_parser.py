"""The text of ``perf script``."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import IO, Any

from ...errors import InvalidArgumentError
from .text import ParsedTrace, text_options


def parse_perf_script(
    source: str | os.PathLike[str] | IO[Any],
    run_id: str,
    phase_boundaries: Sequence[dict[str, Any]] | None = None,
    *,
    cycles_per_ns: float | None = None,
) -> ParsedTrace:
    """Rows of what ``perf script`` printed.

    Lines read ``comm pid [cpu] time: [period] event: addr sym[+off] [dso]``, with the
    variations of today's perf. An event named mem-store is a store, else a load. Samples
    without a data address are left out and counted, with a warning: those that perf printed
    without the column (``-F +addr``), and those of events that count no accesses, such as
    cpu-clock; ``cycles`` and ``instructions`` count where ``data_src`` is printed and says so.
    perf's instruction pointer is known by where it ends, 18, 40 or 42 columns behind the
    event's colon: a line of another program whose address ends there is left out, too. A weight
    or a physical address printed without ``addr`` may be taken for it: docs/TROUBLESHOOTING.md
    has the cases.

    Args:
        source: a path or an open file.
        run_id: for every row.
        phase_boundaries: dicts of ``phase``, ``start_ns`` and ``end_ns``; a row with
            start_ns <= time < end_ns has that phase.
        cycles_per_ns: the core's clock; with it perf's weights, in cycles, become
            ``access_latency_ns``.

    Raises:
        FileNotFoundError: there is no such file.
        InvalidArgumentError: it is a folder, or an argument cannot be.
    """
    options = text_options(run_id, phase_boundaries)
    if cycles_per_ns is not None:
        if not 0 < cycles_per_ns < math.inf:
            raise InvalidArgumentError(f"cycles_per_ns = {cycles_per_ns}: must be a clock in GHz")
        options["cycles_per_ns"] = cycles_per_ns
    return ParsedTrace("perf_script", source, options)
