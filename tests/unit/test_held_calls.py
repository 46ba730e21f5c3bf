"""The calls that a dump gets: of the steps in the ring, and of steps that have just begun."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from llm_instrumentation.core.calls.waiting_calls import RefusedTokens
from llm_instrumentation.core.recording.held_calls import HeldCalls


def ring(oldest: int, gone: int, steps: int = 1) -> Any:
    return SimpleNamespace(ring_steps=steps, ring_oldest_step=oldest, ring_gone_step=gone)


def call(step: int) -> RefusedTokens:
    return RefusedTokens(step, "m", "", range(1), 0)


class Writer:
    def __init__(self) -> None:
        self.steps: list[int] = []

    def note(self, note: RefusedTokens) -> None:
        self.steps.append(note.step)


def dumped(held: HeldCalls, of: Any) -> list[int]:
    writer: Any = Writer()
    held.begin(writer, of)
    held.end()
    return writer.steps


def test_a_dump_has_the_calls_of_the_ring_and_of_steps_without_tensors_yet():
    held = HeldCalls(lambda: ring(0, -1))
    for step in range(10):
        held.note(call(step))
    # Steps up to 4 gave way. 5 and 6 have begun, and the first tensor of 7 came before theirs.
    assert dumped(held, ring(7, 4)) == [5, 6, 7, 8, 9]
    # Nothing came since, so the next dump has nothing again.
    assert dumped(held, ring(-1, 4, steps=0)) == []
    held.note(call(10))
    assert dumped(held, ring(10, 4)) == [10]


def test_calls_of_a_step_that_runs_on_after_a_dump_are_in_the_next_one_too():
    held = HeldCalls(lambda: ring(0, -1))
    held.note(call(0))
    assert dumped(held, ring(0, -1)) == [0]
    assert dumped(held, ring(0, -1)) == [0]  # its later tensors are in the ring
