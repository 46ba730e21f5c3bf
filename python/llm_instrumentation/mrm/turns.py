"""Measures by how much a tracer in the model's process slows the model.

Tokens are generated alternately with and without the tracer. Two runs of some seconds differ by a
quarter on a machine with other users, so comparing two runs cannot show a tracer that costs a
tenth. Neighbouring tokens differ less: each token is compared with the mean of the token before and
the token after. The median of these ratios is the result.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Protocol, runtime_checkable

from .engines import BaseEngine, PhaseRecord
from .engines.base import PhaseEvent

__all__ = ["ThreadTracer", "slowdown_in_turns"]


@runtime_checkable
class ThreadTracer(Protocol):
    """A tracer that can be switched on and off between two operators."""

    def thread(self) -> AbstractContextManager[None]:
        """Traces the calling thread inside the block."""

    def close(self) -> None:
        """Ends the tracer and discards its rows."""


def slowdown_in_turns(engine: BaseEngine, tracer: ThreadTracer, group: list[str]) -> float | None:
    """Measures by how much longer a token takes with the tracer: 0.1 is a tenth.

    Args:
        engine: a loaded, warm engine that generates in the calling thread.
        tracer: a tracer that has traced nothing yet; this function closes it.
        group: the prompts of one generation.

    Returns:
        The relative slowdown; None if the generation has fewer than five tokens.
    """
    turns = _Turns(tracer)
    engine.register_phase_callback(turns)
    try:
        engine.generate(group)
    finally:
        turns.end()
        tracer.close()
    # The first step reads the prompt, so it cannot be compared with the others.
    return _slowdown(turns.steps[1:])


def _slowdown(steps: Sequence[tuple[bool, int]]) -> float | None:
    """The slowdown, from (traced, ns) of each token; None for fewer than four tokens."""
    ratios = []
    for before, this, after in zip(steps, steps[1:], steps[2:], strict=False):
        beside = (before[1] + after[1]) / 2
        ratios.append(this[1] / beside if this[0] else beside / this[1])
    return statistics.median(ratios) - 1 if len(ratios) > 1 else None


class _Turns:
    """Takes the time of each token, and switches the tracer on or off after it."""

    def __init__(self, tracer: ThreadTracer) -> None:
        self.steps: list[tuple[bool, int]] = []
        self._tracer = tracer
        self._on: contextlib.ExitStack | None = None
        self._began = 0
        self._ended = False

    def __call__(self, record: PhaseRecord) -> None:
        if self._ended:
            return
        if record.event is PhaseEvent.TOKEN_EMITTED:
            self.steps.append((self._on is not None, record.mono_ns - self._began))
            self._switch()
        elif record.event is PhaseEvent.GENERATION_END:
            self.end()
        self._began = time.monotonic_ns()

    def _switch(self) -> None:
        if self._on is None:
            self._on = contextlib.ExitStack()
            self._on.enter_context(self._tracer.thread())
        else:
            self._on.close()
            self._on = None

    def end(self) -> None:
        """Switches the tracer off for good."""
        self._ended = True
        if self._on is not None:
            self._on.close()
            self._on = None
