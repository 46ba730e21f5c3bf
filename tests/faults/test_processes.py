"""Other processes during a capture: children that leave its block, and captures to its path."""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import signal
import sys
import time
import warnings

import pytest
import torch
from children import Noise, assert_noise, framework, steps_in
from llm_instrumentation import ActivationReader, capture_activations, packed
from llm_instrumentation.errors import BusyError

SIZE = 1 << 16


def work_in_the_block(model, how):
    """The work of a forked child in the block of its parent's capture."""
    for step in range(100, 103):
        model(step)
    if how == "exit":
        sys.exit(5)
    if how == "raise":
        raise ValueError("the child's")


def leave_by_fork(tell, path, how):
    """Forks within the block. The child's block ends as ``how`` says; the parent's goes on."""
    model, parent, child = Noise(SIZE), os.getpid(), 0
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            with framework(model).capture_activations(path, track_per_token=True) as tracker:
                for step in range(20):
                    model(step)
                    tracker.record_token(step, "")
                child = os.fork()
                if not child:
                    work_in_the_block(model, how)
                else:
                    _, status = os.waitpid(child, 0)
                    for step in range(20, 40):
                        model(step)
                        tracker.record_token(step, "")
        except BaseException as error:
            ended = error
        else:
            ended = None
    if os.getpid() != parent:
        tell(("child", type(ended).__name__, [str(w.message) for w in caught]))
        os._exit(6)
    tell(("parent", type(ended).__name__, os.waitstatus_to_exitcode(status)))


@pytest.mark.parametrize(
    ("how", "error"), [("exit", "SystemExit"), ("raise", "ValueError"), ("end", "ForkedError")]
)
def test_a_forked_child_that_leaves_the_block(how, error, path, start):
    """The child gets one warning and captures nothing. The parent's capture is whole."""
    child = start(leave_by_fork, path, how)
    who, ended, messages = child.told()
    assert (who, ended) == ("child", error)
    assert sum("goes on in process" in message for message in messages) == 1
    assert child.told() == ("parent", "NoneType", 6)
    assert child.join() == 0
    assert steps_in(path, SIZE) == 40
    with ActivationReader(path) as reader:
        assert reader.problem == ""
        assert reader.token_metadata["total_tokens"] == 40


class Few(torch.nn.Embedding):
    def forward(self, ids):
        return super().forward(ids) if ids.numel() < 10 else None


def call_in_a_fork(tell, path, lengths):
    """The child calls with much text and no tensor. The first tensor would end its capture."""
    model, ids = Few(1, 1), torch.zeros(1, 5 << 20, dtype=torch.int64)
    packing = packed(lengths) if lengths else contextlib.nullcontext()
    with capture_activations(model, path), packing:
        child = os.fork()
        if not child:
            signal.alarm(60)
            for _ in range(3):
                model(ids)
            os._exit(0)
        tell(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        model(ids[:, :3])


@pytest.mark.parametrize("lengths", [None, [1, 2]])
def test_calls_of_a_forked_child_do_not_wait_to_be_written(lengths, path, start):
    """The thread that writes them is not in the child."""
    child = start(call_in_a_fork, path, lengths)
    assert child.told() == 0
    assert child.join() == 0


def pools(tell, path):
    """Starts pools with every start method during a capture, in the thread that captures."""
    model = Noise(SIZE)
    with framework(model).capture_activations(path):
        for step, method in enumerate(["fork", "spawn", "forkserver"] * 2):
            with multiprocessing.get_context(method).Pool(2) as pool:
                model(step)
                assert pool.map(abs, range(-20, 0)) == list(range(20, 0, -1))
    tell(step + 1)


def test_pools_of_processes(path, python):
    """Process pools of every start method work during a capture."""
    done = python(
        "import sys, test_processes\n"
        "if __name__ == '__main__': test_processes.pools(print, sys.argv[1])",
        path,
    )
    assert (done.returncode, done.stdout) == (0, "6\n"), done.stderr
    assert steps_in(path, SIZE) == 6


def hold(tell, path):
    model = Noise(SIZE)
    with framework(model, codec="lz4").capture_activations(path):
        for step in itertools.count():
            model(step)
            if step == 20:
                tell("holding")


def test_a_second_capture_to_the_same_path_is_refused(path, start):
    child = start(hold, path)
    child.told()
    model = Noise(SIZE)
    with (
        pytest.raises(BusyError, match="is being captured by another session"),
        framework(model).capture_activations(path),
    ):
        raise AssertionError("two captures write to one file")
    assert not model._forward_hooks
    length = path.stat().st_size
    while path.stat().st_size <= length:  # the file was not emptied, and the first capture goes on
        time.sleep(0.01)
    child.signal(signal.SIGKILL)
    assert child.join() == -signal.SIGKILL
    with framework(model).capture_activations(path):  # the lock ended with the process
        model(7)
    with ActivationReader(path) as reader:
        assert_noise(reader, [7], SIZE)


def test_a_second_capture_of_the_same_process_is_refused(path):
    model, other = Noise(SIZE), Noise(SIZE)
    with framework(model).capture_activations(path):
        model(0)
        with pytest.raises(BusyError), framework(other).capture_activations(path):
            raise AssertionError("two captures write to one file")
        model(1)
    assert steps_in(path, SIZE) == 2
