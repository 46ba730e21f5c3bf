"""Turns memory that an engine has announced into known ranges for the labeller."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from .engines.base import PhaseEvent, PhaseRecord
from .schema import Kind, RegionType

if TYPE_CHECKING:
    import pyarrow as pa

    from .labeller import KnownRange

__all__ = ["NAMED_KEY", "known_ranges", "laid_out_ranges", "named_types", "time_of"]

#: Key in the metadata of a trace's schema. The value lists, with commas, the region types that the
#: traced program named and that rows already have.
NAMED_KEY = b"mrm_trace_named_types"

_FOR_GOOD = 2**63 - 1

#: The region id of all weights.
_WEIGHT_ID = 1


def known_ranges(records: Iterable[PhaseRecord], kind: Kind = Kind.ACCESSES) -> list[KnownRange]:
    """The weights, caches and other memory that the events of a run name, as known ranges.

    Weights, and memory that is laid out once, are known from the start of the load to the start of
    the teardown. In a trace of allocations they are known until the end of the teardown, which
    releases them. If a run broke off before, they are known for ever: the last rows of a collector
    are later than the last event. The tensors of a growing cache are read by the step after the one
    that made them. So each is known from the event before its own to the event after it.

    Args:
        records: the events.
        kind: the kind of the trace.
    """
    from .labeller import KnownRange

    records = list(records)
    begin, end = _life(records, kind)
    found = [
        KnownRange(start, stop, RegionType.WEIGHT.value, begin, end, _WEIGHT_ID)
        for record in records
        for start, stop in record.metadata.get("weight_ranges", ())
    ]
    found += laid_out_ranges(records, kind)
    steps = [
        (record.mono_ns, [tuple(span) for span in record.metadata.get("kv_ranges", ())])
        for record in records
        if record.event in (PhaseEvent.GENERATION_START, PhaseEvent.TOKEN_EMITTED)
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


def laid_out_ranges(records: Sequence[PhaseRecord], kind: Kind = Kind.ACCESSES) -> list[KnownRange]:
    """The memory, of all types, that an engine has laid out once and named (``memory_ranges``)."""
    from .labeller import KnownRange

    begin, end = _life(records, kind)
    return [
        KnownRange(
            start, stop, holds, begin, end, _WEIGHT_ID if holds == RegionType.WEIGHT.value else 0
        )
        for record in records
        for start, stop, holds in record.metadata.get("memory_ranges", ())
    ]


def time_of(event: PhaseEvent, records: Iterable[PhaseRecord]) -> int | None:
    """The CLOCK_MONOTONIC time in ns at which an event last happened; None if it did not."""
    times = [record.mono_ns for record in records if record.event is event]
    return times[-1] if times else None


def _life(records: Sequence[PhaseRecord], kind: Kind) -> tuple[int, int]:
    """The times from and to which lasting memory is known; see :func:`known_ranges`."""
    last = PhaseEvent.TEARDOWN_END if kind is Kind.ALLOCATIONS else PhaseEvent.TEARDOWN_START
    begin, end = time_of(PhaseEvent.MODEL_LOAD_START, records), time_of(last, records)
    return 0 if begin is None else begin, _FOR_GOOD if end is None else end


def named_types(schema: pa.Schema) -> list[str]:
    """The region types in the metadata of a trace's schema; see :data:`NAMED_KEY`."""
    named = (schema.metadata or {}).get(NAMED_KEY, b"").decode()
    return named.split(",") if named else []
