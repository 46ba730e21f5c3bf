"""Blocks that raise and interpreters that end leave whole files."""

from __future__ import annotations

import os
import signal
import time
import warnings

import pytest
from children import Noise, framework, steps_in
from llm_instrumentation import ActivationReader
from llm_instrumentation._native import Session
from llm_instrumentation.core import tokens
from llm_instrumentation.core.checkpoint import CheckpointFile
from llm_instrumentation.core.recording import ending
from llm_instrumentation.errors import StrapTimeoutError

SIZE = 1 << 18
STEPS = 20


class Mistake(Exception):
    """Raised by the captured program."""


@pytest.mark.parametrize("kind", [Mistake, KeyboardInterrupt, SystemExit, GeneratorExit])
@pytest.mark.parametrize("track", [False, True], ids=["", "tokens"])
def test_an_exception_of_the_block_comes_through(kind, track, path):
    model, raised = Noise(SIZE), kind("mine")
    with (
        warnings.catch_warnings(),
        pytest.raises(kind) as caught,
        framework(model, memory=1).capture_activations(path, track_per_token=track) as tracker,
    ):
        warnings.simplefilter("error")  # no warning comes beside the exception
        for step in range(STEPS):
            model(step)
            if tracker:
                tracker.record_token(step, "")
        raise raised
    assert caught.value is raised
    assert not model._forward_hooks
    assert steps_in(path, SIZE) == STEPS
    with ActivationReader(path) as reader:
        assert reader.info.indexed and reader.problem == ""
        if track:
            assert reader.token_metadata["total_tokens"] == STEPS


def test_an_exception_in_the_model_keeps_what_came_before(path):
    class Fails(Noise):
        def forward(self, step):
            if step == STEPS:
                raise Mistake
            return super().forward(step)

    model = Fails(SIZE)
    with framework(model).capture_activations(path):
        for step in range(STEPS + 1):
            try:
                model(step)
            except Mistake:
                assert step == STEPS
        model(STEPS - 1)  # the call after the failed one is a new step
    with ActivationReader(path) as reader:
        assert len(reader) == STEPS + 1
        assert reader.steps == (*range(STEPS), STEPS + 1)


def test_an_abandoned_generator_closes_its_capture(path):
    model = Noise(SIZE)

    def outputs():
        with framework(model).capture_activations(path):
            for step in range(STEPS):
                yield model(step)

    generator = outputs()
    for _ in range(5):
        next(generator)
    del generator
    assert not model._forward_hooks
    assert steps_in(path, SIZE) == 5


@pytest.mark.timeout(60)
def test_a_signal_handler_may_call_stats_while_stats_runs(path, monkeypatch):
    """A call of stats that a signal handler makes within another one does not deadlock."""
    read, capture, seen = Session.stats, framework(Noise(SIZE)), []

    def interrupted(session):
        monkeypatch.setattr(Session, "stats", read)
        signal.raise_signal(signal.SIGUSR1)
        return read(session)

    before = signal.signal(signal.SIGUSR1, lambda *_: seen.append(capture.stats().tensors))
    try:
        with capture.capture_activations(path):
            capture._models[0](0)
            monkeypatch.setattr(Session, "stats", interrupted)
            assert capture.stats().tensors == 1
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert seen == [1]


# ---- the wait for the disk ---------------------------------------------------------

TOKENS = 5


def captured(path, end=None, **options):
    """Makes a capture with tokens, whose block raises `end` if it is given."""
    model = Noise(SIZE)
    with framework(model).capture_activations(path, track_per_token=True, **options) as tracker:
        for step in range(TOKENS):
            model(step)
            tracker.record_token(step, "")
        if end is not None:
            raise end


def ctrl_c(session, timeout=None):
    signal.raise_signal(signal.SIGINT)


def still_busy(session, timeout=None):
    raise StrapTimeoutError("the disk is slow")


@pytest.fixture
def synced(monkeypatch):
    """The files that Python code syncs, without those that the library syncs."""
    names, fsync = [], os.fsync

    def sync(descriptor):
        names.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", sync)
    return names


def still_written(path):
    with ActivationReader(path, warn=False) as reader:
        return reader.info.live


@pytest.mark.parametrize("busy", [False, True], ids=["", "busy"])
@pytest.mark.parametrize("end", [None, Mistake("mine")], ids=["", "an exception"])
def test_ctrl_c_while_the_disk_syncs_loses_nothing(end, busy, path, synced, monkeypatch):
    """All packets and tokens are in the files, and a warning says that they are not yet on disk."""
    monkeypatch.setattr(Session, "checkpoint", ctrl_c)
    if busy:
        monkeypatch.setattr(Session, "close", still_busy)
        monkeypatch.setattr(ending, "_PATIENCE_SECONDS", 0.2)
    with (
        pytest.warns(RuntimeWarning, match=rf"all packets are in {path}, but not on disk") as told,
        pytest.raises(KeyboardInterrupt),
    ):
        captured(path, end)
    assert len(told) == 1
    assert synced == []
    until = time.monotonic() + 60
    while busy and still_written(path) and time.monotonic() < until:
        time.sleep(0.05)  # a writer that nobody waits for ends its index in its own time
    assert steps_in(path, SIZE) == TOKENS
    with ActivationReader(path, warn=False) as reader:
        assert reader.token_metadata["total_tokens"] == TOKENS
        assert busy or (reader.info.indexed and reader.problem == "")


def test_ctrl_c_while_the_token_file_is_synced_keeps_the_tokens(path, monkeypatch):
    fsync = os.fsync

    def interrupted(descriptor):
        monkeypatch.setattr(os, "fsync", fsync)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(os, "fsync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        captured(path)
    with ActivationReader(path) as reader:
        assert reader.token_metadata["total_tokens"] == TOKENS


def test_without_all_packets_there_is_no_token_file(path, monkeypatch):
    monkeypatch.setattr(Session, "flush", ctrl_c)
    with pytest.warns(RuntimeWarning, match="packets are not in"), pytest.raises(KeyboardInterrupt):
        captured(path)
    with ActivationReader(path, warn=False) as reader:
        assert reader.token_metadata is None


def test_a_capture_warns_once_of_a_disk_that_is_slow_to_sync(path, monkeypatch):
    checkpoint, left = Session.checkpoint, [1] * 5

    def slow(session, timeout=None):
        if left and left.pop():
            raise StrapTimeoutError("not yet")
        return checkpoint(session, timeout)

    monkeypatch.setattr(Session, "checkpoint", slow)
    monkeypatch.setattr(ending, "_SILENCE_SECONDS", 0)
    text = r"all packets are in .*, but its disk did not confirm that for 0 s; Ctrl-C ends the wait"
    with pytest.warns(RuntimeWarning, match=text) as told:
        captured(path)
    assert len(told) == 1 and not left


@pytest.mark.parametrize("end", [None, Mistake, KeyboardInterrupt])
def test_the_stream_is_on_disk_before_the_tokens_and_both_before_the_checkpoint_goes(
    end, path, monkeypatch
):
    """After Ctrl-C nothing waits for the disk, and the checkpoint stays after any exception."""
    steps, checkpoint = [], Session.checkpoint
    save, remove = tokens.save_token_metadata, CheckpointFile.remove

    def then(name, function):
        def call(*args, **options):
            result = function(*args, **options)
            steps.append((name, options.get("durable", True)))
            return result

        return call

    with pytest.raises(end) if end else warnings.catch_warnings():
        monkeypatch.setattr(Session, "checkpoint", then("on disk", checkpoint))
        monkeypatch.setattr(tokens, "save_token_metadata", then("tokens", save))
        monkeypatch.setattr(CheckpointFile, "remove", then("checkpoint removed", remove))
        captured(path, end, checkpoint_interval_tokens=TOKENS - 1)
    assert steps[0] == ("on disk", True)  # the checkpoint after the interval
    ends = {
        None: [("on disk", True), ("tokens", True), ("checkpoint removed", True)],
        Mistake: [("on disk", True), ("on disk", True), ("tokens", True)],
        KeyboardInterrupt: [("tokens", False)],
    }
    assert steps[1:] == ends[end]


# ---- the end of the interpreter ---------------------------------------------------

# Each text follows `BEGIN`. It captures 20 steps and then ends the interpreter in its own way.
BEGIN = """
import os, signal, sys, threading
from children import Noise, framework
model = Noise(int(sys.argv[2]))
capture = framework(model, memory=1)
def outputs():
    with capture.capture_activations(sys.argv[1]):
        for step in range(100):
            yield model(step)
"""

ENDS = {
    "exit in the block": """
with capture.capture_activations(sys.argv[1]):
    for step in range(20):
        model(step)
    sys.exit(3)
""",
    "exit with a generator in the block": """
generator = outputs()
for _ in range(20):
    next(generator)
sys.exit(3)
""",
    "exit with a context that is never closed": """
context = capture.capture_activations(sys.argv[1])
context.__enter__()
for step in range(20):
    model(step)
sys.exit(3)
""",
    "exit while a thread is in the block": """
def work():
    for _ in generator:
        count.append(1)
        if len(count) == 20:
            ready.set()
            forever.wait()
generator, count, ready, forever = outputs(), [], threading.Event(), threading.Event()
threading.Thread(target=work, daemon=True).start()
ready.wait()
sys.exit(3)
""",
    "exit while a daemon thread goes on with the model": """
def work():
    for step in range(20):
        model(step)
    ready.set()
    forever.wait()
    for step in range(20, 10_000):
        model(step)
forever, ready = threading.Event(), threading.Event()
context = capture.capture_activations(sys.argv[1])
context.__enter__()
threading.Thread(target=work, daemon=True).start()
ready.wait()
sys.exit(3)
""",
    "exit with threads that wait for each other's end": """
def work(step):
    if step:
        turns[step - 1].join()
    model(step)
context = capture.capture_activations(sys.argv[1])
context.__enter__()
turns = [threading.Thread(target=work, args=(step,)) for step in range(20)]
for turn in turns:
    turn.start()
sys.exit(3)
""",
    "exit with a model in atexit": """
import atexit
context = capture.capture_activations(sys.argv[1])
def last():  # registered behind the capture's own, so it runs before
    for step in range(10, 20):
        model(step)
context.__enter__()
atexit.register(last)
for step in range(10):
    model(step)
sys.exit(3)
""",
    "an exception that nobody catches": """
with capture.capture_activations(sys.argv[1]):
    for step in range(20):
        model(step)
    raise RuntimeError("mine")
""",
    "ctrl-c that nobody catches": """
with capture.capture_activations(sys.argv[1]):
    for step in range(20):
        model(step)
    signal.raise_signal(signal.SIGINT)
    for step in range(20, 1000):
        pass
""",
}
EXPECTED = {
    "an exception that nobody catches": (1, "RuntimeError: mine"),
    "ctrl-c that nobody catches": (-signal.SIGINT, "KeyboardInterrupt"),
}


@pytest.mark.parametrize("end", ENDS)
def test_a_capture_is_whole_after(end, path, python):
    """The capture is closed at the end of the interpreter, without a warning."""
    done = python(BEGIN + ENDS[end], path, SIZE)
    code, last_line = EXPECTED.get(end, (3, ""))
    assert done.returncode == code, done.stderr
    assert done.stderr.strip().endswith(last_line)
    assert done.stderr.count("Traceback") == (1 if last_line else 0), done.stderr
    assert "Warning" not in done.stderr, done.stderr
    assert steps_in(path, SIZE) == STEPS
    with ActivationReader(path) as reader:
        assert reader.info.indexed and reader.problem == ""


RUNS_ON = """
def work():
    for step in range(1_000_000):
        model(step)
        if step == 20:
            ready.set()
ready = threading.Event()
context = capture.capture_activations(sys.argv[1])
context.__enter__()
threading.Thread(target=work, daemon=True).start()
ready.wait()
sys.exit(3)
"""


def test_a_daemon_thread_may_be_in_a_hook_at_the_end(path, python):
    """If the interpreter ends while a thread captures, the capture up to then is whole.

    Up to Python 3.13 the interpreter ends the thread with pthread_exit. Then torch's C++ code calls
    abort(), with a capture or without. The capture is closed before that.
    """
    done = python(BEGIN + RUNS_ON, path, SIZE)
    assert done.returncode in (3, -signal.SIGABRT), done.stderr
    assert "Fatal" not in done.stderr and "Traceback" not in done.stderr, done.stderr
    assert steps_in(path, SIZE) >= 20
    with ActivationReader(path) as reader:
        assert reader.info.indexed and reader.problem == ""


WITHOUT_AN_END = {
    "os._exit": "os._exit(3)",
    "abort": "os.abort()",
    "SIGTERM": "signal.raise_signal(signal.SIGTERM)",
}


@pytest.mark.parametrize("end", WITHOUT_AN_END)
def test_a_stream_is_readable_after(end, path, python):
    """If the process ends without cleanup, the packets that a checkpoint covers are there."""
    checkpointed = """
with capture.capture_activations(sys.argv[1], track_per_token=True,
                                 checkpoint_interval_tokens=10) as tracker:
    for step in range(25):
        model(step)
        tracker.record_token(step, "")
    """
    done = python(BEGIN + checkpointed + WITHOUT_AN_END[end], path, SIZE)
    assert done.returncode == {"os._exit": 3}.get(end, done.returncode) != 0
    assert 20 <= steps_in(path, SIZE) <= 25
