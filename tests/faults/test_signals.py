"""Signals, stops and ending threads during a capture, with the signal handlers of Python and Go."""

from __future__ import annotations

import itertools
import signal
import threading
import time

import pytest
from children import Noise, assert_noise, framework, noise, steps_in
from llm_instrumentation import ActivationReader

SIZE = 1 << 16


def capture_until_asked(tell, path):
    asked, model = threading.Event(), Noise(SIZE)
    signal.signal(signal.SIGUSR1, lambda number, frame: asked.set())
    with framework(model, codec="lz4").capture_activations(path):
        tell("running")
        for step in itertools.count():
            model(step)
            if asked.is_set():
                break
    tell(step + 1)


def test_a_stopped_process_goes_on_where_it_was(path, start):
    child = start(capture_until_asked, path)
    child.told()
    for _ in range(3):
        length = path.stat().st_size
        while path.stat().st_size == length:
            time.sleep(0.01)
        child.signal(signal.SIGSTOP)
        while not child.is_stopped():
            time.sleep(0.01)
        length = path.stat().st_size
        time.sleep(0.2)
        assert path.stat().st_size == length
        child.signal(signal.SIGCONT)
    child.signal(signal.SIGUSR1)
    steps = child.told()
    assert child.join() == 0
    assert steps_in(path, SIZE) == steps > 0


def capture_under_a_storm(tell, path):
    """Captures under a thousand signals a second, which may come to any thread, also of Go."""
    handled, model = [0, 0, 0], Noise(SIZE)

    def count(kind):
        def handler(number, frame):
            handled[kind] += 1

        return handler

    signal.signal(signal.SIGALRM, count(0))
    signal.signal(signal.SIGVTALRM, count(1))
    signal.signal(signal.SIGPROF, count(2))
    with framework(model, codec="zstd").capture_activations(path):
        signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
        signal.setitimer(signal.ITIMER_VIRTUAL, 0.001, 0.001)
        signal.setitimer(signal.ITIMER_PROF, 0.001, 0.001)
        until = time.monotonic() + 1
        for step in itertools.count():
            model(step)
            if step >= 50 and time.monotonic() > until and min(handled) >= 20:
                break
    for timer in (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF):
        signal.setitimer(timer, 0)
    tell(step + 1)


def test_a_storm_of_signals(path, start):
    """All steps are captured under a storm of signals."""
    child = start(capture_under_a_storm, path)
    steps = child.told()
    assert child.join() == 0
    assert steps_in(path, SIZE) == steps


def test_threads_that_end_during_a_capture(path):
    """All their packets are captured, in the order of each thread."""
    model, threads = Noise(SIZE), 40

    def work(first):
        for step in range(first, first + 5):
            model(step)

    with framework(model, codec="lz4").capture_activations(path):
        for first in range(0, threads * 5, 10):
            pair = [threading.Thread(target=work, args=(at,)) for at in (first, first + 5)]
            for thread in pair:
                thread.start()
            for thread in pair:
                thread.join()
    step_of = {beginning(noise(step, SIZE).half()): step for step in range(threads * 5)}
    by_thread = {}
    with ActivationReader(path) as reader:
        assert len(reader) == threads * 5
        for activation in reader:
            step = step_of[beginning(activation.to_torch())]
            assert_noise([activation], [step], SIZE)
            by_thread.setdefault(activation.thread, []).append(step)
    # The order within each thread is kept. The system may give an old thread's id to a new thread,
    # so one id may have several runs of five steps.
    assert sorted(itertools.chain(*by_thread.values())) == list(range(threads * 5))
    for steps in by_thread.values():
        runs = [steps[at : at + 5] for at in range(0, len(steps), 5)]
        assert all(run == list(range(run[0], run[0] + 5)) for run in runs)


def beginning(values):
    return tuple(values[:8].tolist())


CRASH = """
import ctypes, faulthandler, sys, time
when = sys.argv[2]
if when == "before":
    faulthandler.enable()
from children import Noise, framework
model = Noise(1 << 16)
with framework(model).capture_activations(sys.argv[1]) as _:
    model(0)
    if when == "during":
        faulthandler.enable()
    model(1)
    faulthandler.dump_traceback_later(0.05)
    time.sleep(1)  # CPython's watchdog can crash on the frames of a thread that runs
    for step in range(2, 300):
        model(step)
    assert faulthandler.is_enabled() == (when != "never")

def crash_here():
    ctypes.string_at(0)

crash_here()
"""


@pytest.mark.parametrize("when", ["before", "during", "never"])
def test_faulthandler_reports_a_crash_as_without_a_capture(when, path, python):
    done = python(CRASH, path, when)
    assert "Timeout (0:00:00.050000)!" in done.stderr
    assert done.returncode == -signal.SIGSEGV, done.stderr
    if when != "never":
        assert "Fatal Python error: Segmentation fault" in done.stderr
        assert "in crash_here" in done.stderr
    assert steps_in(path, SIZE) == 300
