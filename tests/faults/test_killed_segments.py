"""A process that captures in segments is killed at any moment: what was sealed is whole.

``STRAP_KILLED_SEGMENTS=100`` kills at so many moments.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
import warnings

import pytest
import torch
from llm_instrumentation import ActivationReader
from llm_instrumentation._native import Reader
from torch import nn

KILLS = int(os.environ.get("STRAP_KILLED_SEGMENTS", "6"))

PROGRAM = """
import sys

import torch
from llm_instrumentation import InstrumentationConfig, capture_activations
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 64), nn.Tanh())
config = InstrumentationConfig.balanced().with_memory_limit(0.05)
config.with_segments(gb=0.0005, keep_gb=float(sys.argv[2]))
with torch.no_grad(), capture_activations(model, sys.argv[1], config=config):
    step = 0
    while True:
        torch.manual_seed(step)
        model(torch.randn(64, 64))
        step += 1
"""


@pytest.mark.parametrize("seed", range(KILLS))
def test_a_killed_capture_keeps_its_segments(tmp_path, seed):
    choice = random.Random(seed)
    run = tmp_path / "run"
    keep_gb = choice.choice([0.003, 1000.0])
    command = [sys.executable, "-c", PROGRAM, f"{run}/", str(keep_gb)]
    with subprocess.Popen(command, stderr=subprocess.PIPE) as process:
        until = time.monotonic() + 120
        while not (run / "rank-00000.00002.stream").exists():
            assert process.poll() is None, process.stderr.read()
            assert time.monotonic() < until
            time.sleep(0.01)
        time.sleep(choice.uniform(0, 0.5))
        process.send_signal(signal.SIGKILL)

    listed = json.loads((run / "rank-00000.json").read_text())["shards"]
    for shard in listed:
        path = run / shard["path"]
        if shard["state"] == "complete":
            with Reader(path) as native:
                assert native.info.indexed and not native.info.problem
                assert native.info.packets == shard["packets"]
                assert path.stat().st_size == shard["size_bytes"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        reader = ActivationReader(run)
    torch.manual_seed(0)
    model = nn.Linear(64, 64)
    with reader, torch.no_grad():
        assert "the run is unfinished" in reader.problem
        assert "neither manifest" not in reader.problem  # no stream was overlooked
        steps = reader.steps
        if not steps:  # the closed segments had more than keep_gb, and the open one had just begun
            assert keep_gb < 1 and {one["state"] for one in listed} == {"expired", "capturing"}
            return
        assert steps == tuple(range(steps[0], steps[-1] + 1))
        assert steps[0] == 0 or keep_gb < 1
        assert steps[-1] >= max(one["last_step"] or 0 for one in listed)
        for activation in reader["0"]:
            if activation.step is None:  # the index does not list it yet
                continue
            torch.manual_seed(activation.step)
            wanted = model(torch.randn(64, 64)).half()
            assert torch.equal(activation.to_torch(), wanted)
