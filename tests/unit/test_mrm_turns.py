"""The cost of a tracer is measured by tracing every other token; the engine and clock are fakes."""

from __future__ import annotations

import contextlib
import threading

import pytest
from llm_instrumentation.mrm import turns
from llm_instrumentation.mrm.engines.base import PhaseEvent, PhaseRecord
from llm_instrumentation.mrm.turns import ThreadTracer, slowdown_in_turns

MS = 1_000_000


class Clock:
    now = 0

    def monotonic_ns(self) -> int:
        return self.now


class Tracer:
    """A fake tracer that is on between enter and exit."""

    on = closed = False

    @contextlib.contextmanager
    def thread(self):
        assert not self.on and not self.closed
        self.on = threading.current_thread()
        try:
            yield
        finally:
            self.on = False

    def close(self):
        assert not self.on
        self.closed = True


class Engine:
    """Makes tokens that take given times; with the tracer on they take `slower` times as long."""

    def __init__(self, clock, tracer, times, slower, fails_at=None):
        self.clock, self.tracer, self.times, self.slower = clock, tracer, times, slower
        self.fails_at = fails_at
        self.traced = []

    def register_phase_callback(self, callback):
        self.tell = lambda event: callback(PhaseRecord(event, "", 0, self.clock.now, {}))

    def generate(self, group):
        assert group == ["a prompt"]
        self.tell(PhaseEvent.GENERATION_START)
        for number, ms in enumerate(self.times):
            if number == self.fails_at:
                raise RuntimeError("out of memory")
            self.traced.append(bool(self.tracer.on))
            self.clock.now += int(ms * MS * (self.slower if self.tracer.on else 1))
            self.tell(PhaseEvent.TOKEN_EMITTED)
        self.tell(PhaseEvent.GENERATION_END)


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(turns, "time", clock)
    return clock


def test_every_other_token_is_traced_and_its_cost_is_found(clock):
    tracer = Tracer()
    engine = Engine(clock, tracer, [500, *[20] * 9], slower=1.25)
    assert slowdown_in_turns(engine, tracer, ["a prompt"]) == pytest.approx(0.25)
    assert engine.traced == [False, True] * 5
    assert tracer.closed


def test_a_machine_that_slows_down_does_not_change_the_measured_cost(clock):
    times = [20 + n for n in range(30)]  # each token takes longer than the last
    times[7] = 900
    tracer = Tracer()
    engine = Engine(clock, tracer, times, slower=1.08)
    assert slowdown_in_turns(engine, tracer, ["a prompt"]) == pytest.approx(0.08, abs=0.005)


@pytest.mark.parametrize("tokens", [0, 1, 4])
def test_too_few_tokens_give_no_cost(clock, tokens):
    tracer = Tracer()
    engine = Engine(clock, tracer, [20] * tokens, slower=2)
    assert slowdown_in_turns(engine, tracer, ["a prompt"]) is None


def test_the_tracer_ends_with_a_generation_that_fails(clock):
    tracer = Tracer()
    engine = Engine(clock, tracer, [20] * 9, slower=2, fails_at=4)
    with pytest.raises(RuntimeError, match="out of memory"):
        slowdown_in_turns(engine, tracer, ["a prompt"])
    assert tracer.closed


def test_the_torch_tracer_can_be_switched_token_by_token():
    from llm_instrumentation.mrm.collector import TorchTracer

    assert isinstance(TorchTracer(), ThreadTracer)
