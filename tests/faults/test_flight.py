"""A flight recorder whose disk is full, and one whose process ends with an exception."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from children import Noise, noise
from llm_instrumentation import ActivationReader, InstrumentationConfig
from llm_instrumentation.flight import flight_recorder

SIZE = 1 << 20


def test_the_model_goes_on_and_the_readable_part_of_the_dump_is_kept(tmpfs):
    model = Noise(SIZE)
    config = InstrumentationConfig.fast_capture()
    with (
        pytest.warns(RuntimeWarning) as told,
        flight_recorder(model, tmpfs / "run", memory_gb=0.2, config=config) as recorder,
    ):
        outputs = [model(step) for step in range(60)]
        folder = recorder.dump()
        outputs += [model(step) for step in range(60, 90)]
    assert all(torch.equal(output, noise(step, SIZE)) for step, output in enumerate(outputs))
    messages = [str(one.message) for one in told]
    assert sum("is not whole" in one for one in messages) == 1
    assert all("No space left" in one or "disk" in one for one in messages), messages
    (stream,) = folder.glob("*.stream")
    with ActivationReader(stream) as reader:
        assert len(reader) >= 3
        for one in reader:
            assert torch.equal(one.to_torch(), noise(one.step, SIZE).half())


def fill(disk: Path, leave: int) -> Path:
    """Fills a disk but for so many bytes, with a file that it returns."""
    filler = disk / "filler"
    with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))
    os.truncate(filler, filler.stat().st_size - leave)
    return filler


def test_after_a_failed_dump_the_recorder_goes_on(small_disk):
    model = Noise(SIZE)
    config = InstrumentationConfig.fast_capture()
    with (
        pytest.warns(RuntimeWarning, match="is not whole") as told,
        flight_recorder(
            model, small_disk / "run", memory_gb=0.2, steps=4, config=config, after=0, keep=2
        ) as recorder,
    ):
        for room in (2 << 20, 5 << 20):  # a dump has 8 MiB
            for _ in range(10):
                model(0)
            filler = fill(small_disk, room)
            recorder.dump("no room")
            while not recorder.dumps or not recorder.dumps[-1].problem:
                time.sleep(0.01)
            filler.unlink()
            for step in range(10):
                model(step)
            recorder.dump("room")
            while recorder.dumps[-1].problem:  # else the disk is full again before it is written
                time.sleep(0.01)
        stats = recorder.stats()
    assert stats.gone_steps == 4 * 6 and not stats.failed and not stats.dropped
    assert len([one for one in told if "is not whole" in str(one.message)]) == 2
    # Those that are not whole make room first.
    assert [(one.trigger.reason, one.problem) for one in recorder.dumps] == [("room", "")] * 2
    for dump, last in zip(recorder.dumps, (19, 39), strict=True):
        with ActivationReader(dump.path) as reader:
            assert reader.steps == tuple(range(last - 3, last + 1)) and not reader.problem
            for one in reader:
                assert torch.equal(one.to_torch(), noise(one.step % 10, SIZE).half())


def test_a_disk_without_any_room_costs_no_step(small_disk):
    model = Noise(1000)
    with flight_recorder(model, small_disk / "run", memory_gb=0.2, steps=5, after=0) as recorder:
        for step in range(10):
            model(step)
        filler = fill(small_disk, 0)
        with pytest.raises(OSError, match="no space left"):
            recorder.dump("no room")
        filler.unlink()
        assert recorder.stats().steps == 5
        assert recorder.dump("room").name == "run-000001"
    (dump,) = recorder.dumps
    with ActivationReader(dump.path) as reader:
        assert reader.steps == (5, 6, 7, 8, 9)


CRASHES = """
import torch
from llm_instrumentation.flight import FlightRecorder

model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh())
recorder = FlightRecorder(model, "run").start()
for _ in range(5):
    model(torch.randn(2, 4))
model[1].forward = lambda x: x.no_such_method()
model(torch.randn(2, 4))
"""


def test_an_exception_that_ends_the_process(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", CRASHES], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 1 and "no_such_method" in done.stderr
    assert os.listdir(tmp_path) == ["run-000001"]
    with ActivationReader(tmp_path / "run-000001") as reader:
        assert not reader.problem and reader.run.finished
        assert reader.steps == (0, 1, 2, 3, 4, 5)
        assert {one.name for one in reader.select(steps=5)} == {"0"}
