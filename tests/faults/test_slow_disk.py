"""A disk that is slower than the model: the model waits, memory stays bounded, all arrives."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from children import Growth, Noise, framework, steps_in
from llm_instrumentation import ActivationReader

pytestmark = [pytest.mark.integration, pytest.mark.root]

SIZE = 1 << 20  # 2 MiB a packet
LIMIT = 16_000_000


def capture_much(tell, path, group):
    Path(group).write_text(str(os.getpid()))
    model = Noise(SIZE)
    model(0)
    capture, growth = framework(model, memory=LIMIT / 1e9), Growth()
    with pytest.warns(RuntimeWarning, match=r"the model waited .* A faster disk"):
        with capture.capture_activations(path):
            for step in range(150):
                model(step)
    stats = capture.stats()
    tell({
        "growth": growth.peak(), "peak": stats.memory_peak, "stalls": stats.stalls,
        "dropped": stats.dropped, "seconds": stats.seconds,
    })  # fmt: skip


def test_memory_stays_bounded_and_nothing_is_lost(slow_disk, start):
    folder, group = slow_disk(512 << 20, 40_000_000)
    child = start(capture_much, folder / "a.stream", group)
    told = child.told()
    print(told)
    assert child.join() == 0
    assert told["seconds"] > 150 * 2 * SIZE / 40e6 - 2, "the disk was not slow"
    assert told["stalls"] > 0 and told["dropped"] == 0
    assert told["peak"] <= LIMIT
    assert told["growth"] < LIMIT + 150e6  # with 300 MB captured
    assert steps_in(folder / "a.stream", SIZE) == 150


LEFT_OPEN = """
import os, sys
from children import Noise, framework
open(sys.argv[2], "w").write(str(os.getpid()))
model = Noise(1 << 22)
context = framework(model).capture_activations(sys.argv[1])
context.__enter__()
for step in range(4):
    model(step)
"""


def test_an_interpreter_that_ends_waits_for_a_disk_that_writes(slow_disk, python):
    folder, group = slow_disk(512 << 20, 4_000_000)  # each packet takes two seconds
    done = python(LEFT_OPEN, folder / "a.stream", group)
    assert (done.returncode, done.stderr) == (0, "")
    assert steps_in(folder / "a.stream", 1 << 22) == 4
    with ActivationReader(folder / "a.stream") as reader:
        assert reader.problem == ""
