"""kill -9 of a capture that replaces another one, at each system call that changes a file.

The index and the checkpoint of the replaced capture are never used for the new stream.
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
from llm_instrumentation._native import Reader
from llm_instrumentation.core.tokens import CheckpointError

#: The calls in which a start changes files, in order: the call, the file, and which files of the
#: older capture are still in place before the call.
CHANGES = [
    ("renameat", "a.stream.index", "stream and index"),  # the old index goes aside
    ("renameat", "a.stream", "stream"),  # the new stream takes its place
    ("renameat:when=2", "a.stream.index", "tokens"),  # and the new index
    ("unlinkat", None, "tokens"),  # the old index
    ("unlink", "a_tokens.json", "tokens"),
    ("unlink", "a.stream_tokens.json", "tokens"),
    ("unlink", "a.stream.ckpt.json", "tokens"),
]

PROGRAM = """
import sys
from llm_instrumentation._native import Session
from llm_instrumentation.core.files.earlier import EarlierFiles, remove_earlier
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


def index_of(path):
    return path.with_name(path.name + ".index")


@pytest.mark.parametrize(("call", "name", "left"), CHANGES)
def test_a_kill_before_each_change(call, name, left, tmp_path):
    """Resuming goes on with the old capture, or refuses its checkpoint; it never mixes the two."""
    path = tmp_path / "a.stream"
    interrupted(path)
    checkpoint, before = tmp_path / "a.stream.ckpt.json", path.read_bytes()
    tokens = json.loads(checkpoint.read_text())["tokens"]
    call, _, when = call.partition(":")
    command = ["strace", "-f", "-qq", "-o", "/dev/null", "--seccomp-bpf"]
    command += [] if name is None else ["-P", tmp_path / name]
    command += ["-e", f"inject={call}:signal=KILL:{when or 'when=1'}"]
    command += [sys.executable, "-c", PROGRAM, path]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run([*map(str, command)], check=False, capture_output=True, env=env)
    assert done.returncode == -signal.SIGKILL, done.stderr

    model = Noise(1 << 10)
    start = framework(model).capture_activations(
        path, track_per_token=True, resume_from_checkpoint=True
    )
    assert path.read_bytes() == (b"" if left == "tokens" else before)
    with Reader(path) as reader:
        assert reader.info.rows == (0 if left == "tokens" else 4)
        assert reader.info.indexed == (left == "stream and index" or index_of(path).exists())
    if left != "tokens":
        with start as tracker:
            assert tracker.tokens == tokens
            model(4)
        return
    with pytest.raises(CheckpointError), start:
        pass
    assert checkpoint.exists()  # the checkpoint is removed last
    for _ in range(2):  # a start that replaces an index also removes partial files
        with framework(model).capture_activations(path):
            model(0)
    assert not list(tmp_path.glob("*.partial"))
