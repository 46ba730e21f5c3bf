"""A disk that stops answering. Writes to a frozen file system wait until it is thawed."""

from __future__ import annotations

import itertools
import os
import re
import signal
import threading
import time
import warnings

import pytest
from children import Noise, framework, freeze, steps_in, thaw
from llm_instrumentation import ActivationReader
from llm_instrumentation.errors import StrapPermissionError, UnsupportedError
from llm_instrumentation.probes import BlockProbe

pytestmark = pytest.mark.root

SIZE = 1 << 20  # elements; a packet has 2 MiB
LARGE = 1 << 23  # a packet has 16 MiB
SMALL, ROOMY = 0.008, 0.1  # memory limits in GB


def interrupt_in(seconds):
    """Sends this process SIGINT after some seconds. Returns a list that will get the time of it."""
    sent = []

    def interrupt():
        sent.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)

    threading.Timer(seconds, interrupt).start()
    return sent


def warned(caught, pattern):
    found = (re.search(pattern, str(w.message)) for w in caught if w.category is RuntimeWarning)
    return [match for match in found if match]


def report(tell, took, caught, steps):
    lost = warned(caught, r"(\d+) packets are not in .*did not answer in time")
    tell({"seconds": took, "lost": [int(m[1]) for m in lost], "steps": steps})


def interrupted_in_a_hook(tell, folder, track, size, probes=()):
    model, steps, sent = Noise(size), 0, []
    capture = framework(model, memory=SMALL)
    capture.config.with_probes(probes, interval_s=0.1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            with capture.capture_activations(folder / "a.stream", track_per_token=track) as tracker:
                for step in itertools.count():
                    if step == 3:
                        freeze(folder)
                        sent = interrupt_in(1.5)
                    model(step)
                    steps += 1
                    if tracker:
                        tracker.record_token(step, "")
        except KeyboardInterrupt:
            took = time.monotonic() - sent[0]
    assert capture.stats().stalls > 0, "the hooks did not wait"
    report(tell, took, caught, steps)


def interrupted_at_the_end(tell, folder, track, size):
    model, sent = Noise(size), []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            with framework(model, memory=ROOMY).capture_activations(
                folder / "a.stream", track_per_token=track
            ) as tracker:
                for step in range(8):
                    if step == 3:
                        freeze(folder)
                    model(step)
                    if tracker:
                        tracker.record_token(step, "")
                sent = interrupt_in(1)
        except KeyboardInterrupt:
            took = time.monotonic() - sent[0]
    report(tell, took, caught, 8)


@pytest.mark.parametrize("track", [False, True], ids=["", "tokens"])
@pytest.mark.parametrize(
    ("capture", "size"),
    [
        (interrupted_in_a_hook, SIZE),
        (interrupted_in_a_hook, LARGE),  # in the middle of a tensor larger than the memory
        (interrupted_at_the_end, SIZE),
    ],
)
def test_ctrl_c_ends_the_block_within_a_second(capture, size, track, disk, start, record_property):
    child = start(capture, disk, track, size)
    told = child.told(30)
    print(f"{capture.__name__}: {told['seconds']:.3f} s from the signal to the end of the block")
    record_property("seconds", told["seconds"])
    (lost,) = told["lost"]
    assert lost > 0
    thaw(disk)
    assert child.join() == 0
    assert told["seconds"] < 1
    # A write that was under way when the packets were given up may have succeeded since.
    assert told["steps"] - lost <= steps_in(disk / "a.stream", size) <= told["steps"]


def test_snapshots_for_the_frozen_disk_do_not_delay_the_end(disk, start):
    try:
        BlockProbe().start().stop()
    except (StrapPermissionError, UnsupportedError) as error:
        pytest.skip(str(error))
    child = start(interrupted_in_a_hook, disk, False, SIZE, ["block", "system"])
    told = child.told(60)
    assert told["lost"]
    thaw(disk)
    assert child.join() == 0
    assert told["seconds"] < 1
    files = list(disk.glob("a.stream.*.jsonl"))
    assert len(files) == 3
    assert all(file.read_text()[-1:] in ("", "\n") for file in files)


def interrupted_beside_a_thread(tell, folder):
    model = Noise(SIZE)
    capture = framework(model, memory=SMALL)

    def work():
        for step in range(100):
            model(step)

    thread = threading.Thread(target=work)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        try:
            with capture.capture_activations(folder / "a.stream"):
                model(0)
                freeze(folder)
                thread.start()
                sent = interrupt_in(1.5)
                thread.join()
        except KeyboardInterrupt:
            took = time.monotonic() - sent[0]
        thread.join(30)
    tell({"seconds": took, "thread ended": not thread.is_alive()})


def test_a_thread_that_waits_in_a_hook_goes_on_after_ctrl_c(disk, start):
    child = start(interrupted_beside_a_thread, disk)
    told = child.told()
    assert told["seconds"] < 1
    assert told["thread ended"]
    thaw(disk)
    assert child.join() == 0


def enqueued_by_threads_that_end(tell, folder):
    """Starts and ends threads that capture, while none of their packets can be written."""
    model = Noise(1 << 14)
    with framework(model, memory=ROOMY).capture_activations(folder / "a.stream"):
        freeze(folder)
        for first in range(0, 200, 10):
            batch = [threading.Thread(target=model, args=(first + k,)) for k in range(10)]
            for thread in batch:
                thread.start()
                thread.join()
        tell(len(threading.enumerate()))
        thaw(folder)


def test_packets_of_threads_that_have_ended_are_written(disk, start):
    child = start(enqueued_by_threads_that_end, disk)
    child.told()
    assert child.join() == 0
    assert steps_in(disk / "a.stream", 1 << 14) == 200


def alarmed_in_a_hook(tell, folder):
    """A signal handler runs while the model waits. It reads the statistics and thaws the disk."""
    model, ticks = Noise(SIZE), []
    capture = framework(model, memory=SMALL)

    def tick(number, frame):
        ticks.append(capture.stats().queued_packets)
        if len(ticks) == 10:
            thaw(folder)

    signal.signal(signal.SIGALRM, tick)
    with capture.capture_activations(folder / "a.stream"):
        freeze(folder)
        signal.setitimer(signal.ITIMER_REAL, 0.05, 0.05)
        for step in range(12):
            model(step)
        signal.setitimer(signal.ITIMER_REAL, 0)
    tell((len(ticks), ticks[9], capture.stats().stall_seconds))


def test_signal_handlers_run_while_a_hook_waits(disk, start):
    child = start(alarmed_in_a_hook, disk)
    ticks, queued, waited = child.told()
    assert ticks >= 10 and queued > 0 and waited > 0.1
    assert child.join() == 0
    assert steps_in(disk / "a.stream", SIZE) == 12


def waited_for(tell, folder, seconds):
    """The disk answers again after some seconds, before the capture gives up."""
    model = Noise(SIZE)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with framework(model, memory=ROOMY).capture_activations(folder / "a.stream"):
            for step in range(8):
                if step == 3:
                    freeze(folder)
                    threading.Timer(seconds, thaw, [folder]).start()
                model(step)
    tell(len(warned(caught, r"nothing was written .* packets wait; Ctrl-C gives them up")))


def test_a_block_waits_for_its_disk(disk, start, long):
    """All packets are written in the end. A long wait gives one warning."""
    child = start(waited_for, disk, 15 if long else 2)
    assert child.told() == (1 if long else 0)
    assert child.join() == 0
    assert steps_in(disk / "a.stream", SIZE) == 8


def killed_on_a_frozen_disk(tell, folder):
    model = Noise(SIZE)
    with framework(model, memory=SMALL).capture_activations(folder / "a.stream"):
        for step in range(3):
            model(step)
        freeze(folder)
        tell(3)
        for step in itertools.count(3):
            model(step)


def test_kill_9_on_a_frozen_disk(disk, start):
    """A process that is killed while it waits for the disk leaves a readable stream."""
    child = start(killed_on_a_frozen_disk, disk)
    child.told()
    while not child.waits_for_a_disk():
        time.sleep(0.01)
    child.signal(signal.SIGKILL)
    thaw(disk)
    assert child.join() == -signal.SIGKILL
    with ActivationReader(disk / "a.stream", warn=False) as reader:
        assert reader.info.valid_bytes > 0
    assert steps_in(disk / "a.stream", SIZE) >= 2
