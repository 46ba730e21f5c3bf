"""Processes that end without warning, and processes that fork."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from llm_instrumentation import ActivationReader
from llm_instrumentation._native import DTYPE_CODES, Session

# Writes tensors numbered from 0 and tells after each checkpoint how many it covers. Without
# torch, for a quick start.
WRITER = """
import sys
import numpy as np
from llm_instrumentation._native import DTYPE_CODES, Session

path, codec = sys.argv[1:]
session = Session(path, codec=codec, workers=2, max_memory_bytes=4 << 20)
layer = session.layer("numbers")
for i in range(10**9):
    values = np.full(1 + i * 7919 % 40_000, i % 2048, np.float32)
    session.enqueue(layer, DTYPE_CODES["float32"], values.shape, values.ctypes.data, step=i)
    if i % 17 == 16:
        print(i + 1, session.checkpoint(), flush=True)
"""


def check_numbers(path: Path, at_least: int) -> int:
    """Every packet holds its number; returns how many there are."""
    with ActivationReader(path, warn=False) as reader:
        activations = list(reader["numbers"])
        assert len(activations) >= at_least
        for i, activation in enumerate(activations):
            values = activation.to_numpy()
            assert values.size == 1 + i * 7919 % 40_000
            assert (values == i % 2048).all()
        return len(activations)


def test_kill_9_loses_nothing_that_a_checkpoint_covers(tmp_path: Path) -> None:
    rng = random.Random(5)
    for run in range(20):
        path = tmp_path / f"{run}.stream"
        codec = ("none", "lz4", "zstd")[run % 3]
        child = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(path), codec], stdout=subprocess.PIPE, text=True
        )
        assert child.stdout is not None
        lines = [child.stdout.readline()]
        time.sleep(rng.uniform(0, 0.3))
        child.kill()
        lines += child.stdout.read().splitlines(keepends=True)
        child.wait()
        covered, offset = map(int, [line for line in lines if line.endswith("\n")][-1].split())
        check_numbers(path, covered)

        resumed = Session(
            path, codec=codec, workers=1, max_memory_bytes=1 << 20, resume_offset=offset
        )
        values = np.full(1 + covered * 7919 % 40_000, covered % 2048, np.float32)
        layer = resumed.layer("numbers")
        resumed.enqueue(
            layer, DTYPE_CODES["float32"], values.shape, values.ctypes.data, step=covered
        )
        resumed.close()
        assert check_numbers(path, covered) == covered + 1
        with ActivationReader(path) as reader:
            assert reader.problem == ""
        for left in tmp_path.iterdir():
            left.unlink()


ENDING = """
import os, sys
import torch
from llm_instrumentation import capture_activations

net, x = torch.nn.Linear(8, 8), torch.ones(2, 8)

def run():
    with torch.no_grad(), capture_activations(net, sys.argv[2]) as framework:
        for _ in range(10):
            net(x)
        yield framework

how = sys.argv[1]
block = run()
framework = next(block)
if how == "sys.exit":
    sys.exit(7)
if how == "raise":
    block.throw(ZeroDivisionError("the user's"))
if how == "interrupt":
    block.throw(KeyboardInterrupt())
if how == "os._exit":
    framework._recorders[0]._session.flush()
    os._exit(7)
if how == "thread":
    import threading
    thread = threading.Thread(target=lambda: [net(x) for _ in range(5)])
    thread.start()
    thread.join()
"""


@pytest.mark.parametrize(
    ("how", "code", "message"),
    [
        ("sys.exit", 7, ""),
        ("raise", 1, "ZeroDivisionError: the user's"),
        ("interrupt", -signal.SIGINT, "KeyboardInterrupt"),
        ("os._exit", 7, ""),
        ("thread", 0, ""),
        ("end of program", 0, ""),
    ],
)
def test_what_was_captured_is_there_however_the_program_ends(
    tmp_path: Path, how: str, code: int, message: str
) -> None:
    path = tmp_path / "a.stream"
    done = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", ENDING, how, str(path)],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == code, done.stderr
    assert message in done.stderr
    with ActivationReader(path, warn=False) as reader:
        assert len(reader) == (15 if how == "thread" else 10)


FORKING = """
import os, sys, warnings
import torch
from torch.utils.data import DataLoader
from llm_instrumentation import capture_activations

class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 32
    def __getitem__(self, i):
        return torch.full((8,), float(i))

def main():
    net = torch.nn.Linear(8, 8)
    with torch.no_grad(), capture_activations(net, sys.argv[2]):
        for method in ("fork", "spawn"):
            loader = DataLoader(Numbers(), batch_size=4, num_workers=2,
                                multiprocessing_context=method)
            for batch in loader:
                net(batch)
        child = os.fork()
        if child == 0:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                net(batch)
            told = sum("goes on in process" in str(w.message) for w in caught)
            os._exit(0 if told == 1 else 3)
        assert os.waitpid(child, 0)[1] == 0, "the child was not told, or hung"
        net(batch)

if __name__ == "__main__":
    main()
"""


def test_forked_children_do_not_disturb_a_capture(tmp_path: Path) -> None:
    program = tmp_path / "forking.py"
    program.write_text(FORKING)
    path = tmp_path / "a.stream"
    done = subprocess.run(
        [sys.executable, str(program), "x", str(path)], capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    with ActivationReader(path) as reader:
        assert reader.problem == ""
        assert len(reader) == 17


def test_the_lock_of_a_dead_process_does_not_matter(tmp_path: Path) -> None:
    from llm_instrumentation.errors import BusyError

    path = tmp_path / "a.stream"
    child = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(path), "lz4"], stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    child.stdout.readline()
    with pytest.raises(BusyError, match="being captured"):
        Session(path, codec="lz4", workers=1, max_memory_bytes=1 << 20)
    os.kill(child.pid, signal.SIGSTOP)
    time.sleep(0.1)
    os.kill(child.pid, signal.SIGCONT)
    assert child.stdout.readline()  # a stopped process goes on where it was
    child.kill()
    child.wait()
    Session(path, codec="lz4", workers=1, max_memory_bytes=1 << 20).close()
