"""Parses the text of ``perf script``."""

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
    """The rows of a text that ``perf script`` printed.

    A line has the form ``comm pid [cpu] time: [period] event: addr sym[+off] [dso]``; variants of
    current perf versions are understood too. An event named mem-store is a store, every other
    event is a load.

    Samples without a data address are left out and counted, with a warning:

    - samples that perf printed without the column of addresses (``-F +addr`` adds it),
    - samples of events that count no accesses, such as cpu-clock. ``cycles`` and ``instructions``
      count as accesses if ``data_src`` is printed and names an access.

    Two ambiguities remain. The instruction pointer of perf is recognised by the column in which it
    ends: 18, 40 or 42 after the event's colon. So a line of another program is left out if its
    address ends there. And a weight or a physical address that is printed without ``addr`` may be
    taken for the data address; docs/TROUBLESHOOTING.md lists the cases.

    Args:
        source: a path or an open file.
        run_id: the run id of every row.
        phase_boundaries: dicts of ``phase``, ``start_ns`` and ``end_ns``; a row with
            start_ns <= time < end_ns has that phase.
        cycles_per_ns: the clock of the core, in GHz. It converts perf's weights, which are cycles,
            to ``access_latency_ns``; without it that column is null.

    Raises:
        FileNotFoundError: there is no such file.
        InvalidArgumentError: ``source`` is a folder or of another type, or an argument is not
            valid.
    """
    options = text_options(run_id, phase_boundaries)
    if cycles_per_ns is not None:
        if not 0 < cycles_per_ns < math.inf:
            raise InvalidArgumentError(f"cycles_per_ns = {cycles_per_ns}: must be a clock in GHz")
        options["cycles_per_ns"] = cycles_per_ns
    return ParsedTrace("perf_script", source, options)
