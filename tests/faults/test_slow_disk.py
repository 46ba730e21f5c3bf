"""With a disk slower than the model, the model waits, memory stays bounded, and nothing is lost."""

from __future__ import annotations

import os
import warnings
from pathlib import Path

import matplotlib.colors
import pytest
from children import Growth, Noise, framework, steps_in
from llm_instrumentation import ActivationReader
from llm_instrumentation._pages.theme import ALARM
from llm_instrumentation.errors import StrapPermissionError, UnsupportedError
from llm_instrumentation.probes import plot_timeline, timeline

pytestmark = pytest.mark.root

SIZE = 1 << 20  # elements; a packet has 2 MiB
LIMIT = 16_000_000
STEPS = 100
SPEED = 12_000_000  # bytes a second: a model is faster on a busy machine too
RED = matplotlib.colors.to_rgb(ALARM)


def capture_much(tell, path, group):
    Path(group).write_text(str(os.getpid()))
    model = Noise(SIZE)
    model(0)
    capture, growth = framework(model, memory=LIMIT / 1e9), Growth()
    with pytest.warns(RuntimeWarning, match=r"the model waited .* A faster disk"):
        with capture.capture_activations(path):
            for step in range(STEPS):
                model(step)
    stats = capture.stats()
    tell({
        "growth": growth.peak(), "peak": stats.memory_peak, "stalls": stats.stalls,
        "dropped": stats.dropped, "seconds": stats.seconds,
    })  # fmt: skip


def test_memory_stays_bounded_and_nothing_is_lost(slow_disk, start):
    folder, group = slow_disk(512 << 20, SPEED)
    child = start(capture_much, folder / "a.stream", group)
    told = child.told()
    print(told)
    assert child.join() == 0
    assert told["seconds"] > STEPS * 2 * SIZE / SPEED - 2, "the disk was not slow"
    assert told["stalls"] > 0 and told["dropped"] == 0
    assert told["peak"] <= LIMIT
    assert told["growth"] < LIMIT + 100e6  # the capture has 200 MB
    assert steps_in(folder / "a.stream", SIZE) == STEPS


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
    """At its exit the interpreter closes the capture, and waits while the disk makes progress."""
    folder, group = slow_disk(512 << 20, 4_000_000)  # each packet takes two seconds
    done = python(LEFT_OPEN, folder / "a.stream", group)
    assert (done.returncode, done.stderr) == (0, "")
    assert steps_in(folder / "a.stream", 1 << 22) == 4
    with ActivationReader(folder / "a.stream") as reader:
        assert reader.problem == ""


def capture_with_probes(tell, path, group):
    Path(group).write_text(str(os.getpid()))
    model = Noise(SIZE)
    model(0)
    capture = framework(model, memory=LIMIT / 1e9)
    capture.config.with_probes(interval_s=0.5)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # warnings that the model waited and the disk is small
            with capture.capture_activations(path):
                for step in range(30):
                    model(step)
    except (StrapPermissionError, UnsupportedError) as error:
        tell(str(error))
    else:
        tell(None)


def test_probes_show_that_it_is_the_disk(slow_disk, start):
    folder, group = slow_disk(512 << 20, 4_000_000)
    child = start(capture_with_probes, folder / "a.stream", group)
    if (refused := child.told()) is not None:
        pytest.skip(refused)
    assert child.join() == 0
    table = timeline(folder / "a.stream")
    print(table.to_string())
    held_up = table[table["bottleneck"] == "disk"]
    assert len(held_up) >= 3  # on a busy machine the writer waits for a CPU too
    seconds = held_up["interval_s"].sum()
    assert (held_up["disk_mb_s"] * held_up["interval_s"]).sum() / seconds < 3 * 4
    assert held_up["stall_share"].mean() > 0.5
    figure = plot_timeline(table)
    red = [patch for patch in figure.axes[0].patches if patch.get_facecolor()[:3] == RED]
    assert len(red) == len(held_up)
