"""Memory whose use an engine has announced, as ranges that the labeller takes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from .engines.base import PhaseEvent, PhaseRecord
from .schema import RegionType

if TYPE_CHECKING:
    from .labeller import KnownRange

__all__ = ["known_ranges"]

#: Weights are one region.
_WEIGHT_ID = 1


def known_ranges(records: Iterable[PhaseRecord]) -> list[KnownRange]:
    """The weights and caches that a run's events name.

    Weights are known from the start of the load to the start of the teardown. The tensors of a
    cache are read by the step after the one that made them: each is known from the event before
    its own to the event after.
    """
    from .labeller import KnownRange

    weights: list[tuple[int, int]] = []
    steps: list[tuple[int, list[tuple[int, int]]]] = []
    load_start, teardown, last = 0, 0, 0
    for record in records:
        last = record.mono_ns
        if record.event is PhaseEvent.MODEL_LOAD_START:
            load_start = record.mono_ns
        elif record.event is PhaseEvent.TEARDOWN_START:
            teardown = record.mono_ns
        weights += [tuple(span) for span in record.metadata.get("weight_ranges", ())]
        if record.event in (PhaseEvent.GENERATION_START, PhaseEvent.TOKEN_EMITTED):
            spans = [tuple(span) for span in record.metadata.get("kv_ranges", ())]
            steps.append((record.mono_ns, spans))
    end = teardown or last + 1
    found = [
        KnownRange(start, stop, RegionType.WEIGHT.value, load_start, end, _WEIGHT_ID)
        for start, stop in weights
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
