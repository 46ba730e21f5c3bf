"""kill -9 of a capture that takes the place of another, at each call that changes a file.

Whatever it leaves, the checkpoint of the other capture is never taken for the new one's.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys

import pytest
from children import Noise, framework
from llm_instrumentation.core.tokens import CheckpointError

#: What a start changes, in this order, and whether the older capture is whole before that.
CHANGES = [
    ("ftruncate", "a.stream", True),
    ("ftruncate", "a.stream.index", False),
    ("pwrite64", "a.stream.index", False),
    ("unlink", "a_tokens.json", False),
    ("unlink", "a.stream_tokens.json", False),
    ("unlink", "a.stream.ckpt.json", False),
]

PROGRAM = """
import sys
from llm_instrumentation._native import Session
from llm_instrumentation.core._earlier import EarlierFiles, remove_earlier
path = sys.argv[1]
earlier = EarlierFiles(path).paths
session = Session(path, codec="none", workers=1, max_memory_bytes=1 << 20)
remove_earlier(earlier)
session.close()
"""


@pytest.fixture(scope="module", autouse=True)
def strace():
    if shutil.which("strace") is None:
        pytest.skip("no strace")
    tried = ["strace", "-f", "-qq", "-e", "inject=fsync:signal=KILL", "true"]
    done = subprocess.run(tried, check=False, capture_output=True, text=True)
    if done.returncode != 0:
        pytest.skip(f"strace cannot trace here: {done.stderr.strip()}")


def interrupted(path) -> None:
    model = Noise(1 << 10)
    with (
        pytest.raises(KeyError),
        framework(model).capture_activations(
            path, track_per_token=True, checkpoint_interval_tokens=1
        ) as tracker,
    ):
        for step in range(4):
            model(step)
            tracker.record_token(step, "")
        raise KeyError


@pytest.mark.parametrize(("call", "name", "whole"), CHANGES)
def test_a_kill_before_each_change(call, name, whole, tmp_path):
    path = tmp_path / "a.stream"
    interrupted(path)
    checkpoint, before = tmp_path / "a.stream.ckpt.json", path.read_bytes()
    tokens = json.loads(checkpoint.read_text())["tokens"]
    command = ["strace", "-f", "-qq", "-o", "/dev/null", "--seccomp-bpf", "-P", tmp_path / name]
    command += ["-e", f"inject={call}:signal=KILL", sys.executable, "-c", PROGRAM, path]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run([*map(str, command)], check=False, capture_output=True, env=env)
    assert done.returncode == -signal.SIGKILL, done.stderr

    model = Noise(1 << 10)
    start = framework(model).capture_activations(
        path, track_per_token=True, resume_from_checkpoint=True
    )
    assert (path.read_bytes() == before) == whole
    if whole:
        with start as tracker:
            assert tracker.tokens == tokens
            model(4)
        return
    with pytest.raises(CheckpointError), start:
        pass
    assert checkpoint.exists()  # it goes last
