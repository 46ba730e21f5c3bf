"""Memory whose use an engine has announced, as ranges that the labeller takes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from .engines.base import PhaseEvent, PhaseRecord
from .schema import RegionType

if TYPE_CHECKING:
    import pyarrow as pa

    from .labeller import KnownRange

__all__ = ["NAMED_KEY", "known_ranges", "named_types"]

#: In a trace's schema: the types of memory that its program named, and its rows carry.
NAMED_KEY = b"mrm_trace_named_types"

_FOR_GOOD = 2**63 - 1

#: Weights are one region.
_WEIGHT_ID = 1


def known_ranges(records: Iterable[PhaseRecord]) -> list[KnownRange]:
    """The weights, caches and other memory that a run's events name.

    Weights, and memory that is laid out once, are known from the start of the load to the start
    of the teardown, or for good where a run broke off before it: what a collector saw last has
    a time after the last event. The tensors of a growing cache are read by the step after the one
    that made them: each is known from the event before its own to the event after.
    """
    from .labeller import KnownRange

    lasting: list[tuple[int, int, str]] = []
    steps: list[tuple[int, list[tuple[int, int]]]] = []
    load_start, end = 0, _FOR_GOOD
    for record in records:
        if record.event is PhaseEvent.MODEL_LOAD_START:
            load_start = record.mono_ns
        elif record.event is PhaseEvent.TEARDOWN_START:
            end = record.mono_ns
        for start, stop in record.metadata.get("weight_ranges", ()):
            lasting.append((start, stop, RegionType.WEIGHT.value))
        lasting += [tuple(span) for span in record.metadata.get("memory_ranges", ())]
        if record.event in (PhaseEvent.GENERATION_START, PhaseEvent.TOKEN_EMITTED):
            spans = [tuple(span) for span in record.metadata.get("kv_ranges", ())]
            steps.append((record.mono_ns, spans))
    found = [
        KnownRange(
            start, stop, kind, load_start, end, _WEIGHT_ID if kind == RegionType.WEIGHT else 0
        )
        for start, stop, kind in lasting
    ]
    times = [time for time, _ in steps]
    for number, (_, spans) in enumerate(steps):
        before = times[max(number - 1, 0)]
        after = times[number + 1] if number + 1 < len(times) else end
        found += [
            KnownRange(start, stop, RegionType.KV_CACHE.value, before, after)
            for start, stop in spans
        ]
    return found


def named_types(schema: pa.Schema) -> list[str]:
    """The region types that the rows of a trace already have wherever they apply."""
    named = (schema.metadata or {}).get(NAMED_KEY, b"").decode()
    return named.split(",") if named else []
