"""Memory whose use an engine has announced, as ranges that the labeller takes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from .engines.base import PhaseEvent, PhaseRecord
from .schema import Kind, RegionType

if TYPE_CHECKING:
    import pyarrow as pa

    from .labeller import KnownRange

__all__ = ["NAMED_KEY", "known_ranges", "laid_out_ranges", "named_types", "time_of"]

#: In a trace's schema: the types of memory that its program named, and its rows carry.
NAMED_KEY = b"mrm_trace_named_types"

_FOR_GOOD = 2**63 - 1

#: Weights are one region.
_WEIGHT_ID = 1


def known_ranges(records: Iterable[PhaseRecord], kind: Kind = Kind.ACCESSES) -> list[KnownRange]:
    """The weights, caches and other memory that a run's events name, for a trace of a kind.

    Weights, and memory that is laid out once, are known from the start of the load to the start
    of the teardown, or for good where a run broke off before it: what a collector saw last has
    a time after the last event. In a trace of allocations they are known until the teardown ends,
    since it releases them. The tensors of a growing cache are read by the step after the one that
    made them: each is known from the event before its own to the event after.
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
    """The memory of all types that an engine has laid out once and named (``memory_ranges``)."""
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
    """When an event happened, the last time; None where it did not."""
    times = [record.mono_ns for record in records if record.event is event]
    return times[-1] if times else None


def _life(records: Sequence[PhaseRecord], kind: Kind) -> tuple[int, int]:
    """The times between which memory that stays is known; see :func:`known_ranges`."""
    last = PhaseEvent.TEARDOWN_END if kind is Kind.ALLOCATIONS else PhaseEvent.TEARDOWN_START
    begin, end = time_of(PhaseEvent.MODEL_LOAD_START, records), time_of(last, records)
    return 0 if begin is None else begin, _FOR_GOOD if end is None else end


def named_types(schema: pa.Schema) -> list[str]:
    """The region types that the rows of a trace already have wherever they apply."""
    named = (schema.metadata or {}).get(NAMED_KEY, b"").decode()
    return named.split(",") if named else []
