"""A flight recorder whose disk is full, and one whose process ends with an exception."""

from __future__ import annotations

import os
import subprocess
import sys

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
