"""Probes of one process: its system calls and its waits, counted in the kernel."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from llm_instrumentation.errors import (
    InvalidArgumentError,
    NotFoundError,
    StrapPermissionError,
    UnsupportedError,
)
from llm_instrumentation.probes import OffCpuProbe, SyscallProbe, folded_stacks
from llm_instrumentation.probes.probe import KernelProbe

#: A program that prints "ready" and waits for a line, again and again. For each line it does a step
#: of system calls and sleeps.
CHILD = """
import os, sys, time
zeros = os.open("/dev/zero", os.O_RDONLY)
while True:
    os.write(1, b"ready\\n")
    if not os.read(0, 1):
        break
    for _ in range(500):
        os.pread(zeros, 4096, 0)
    try:
        os.pread(0, 1, 0)
    except OSError:
        pass
    for _ in range(10):
        time.sleep(0.02)
"""

#: The least time asleep that the probe sees of a step's 200 ms. Some micro virtual machines hide
#: switches from process 1 to another process.
SLEPT_NS = 0.1e9


@pytest.fixture(autouse=True)
def skip_unless_here() -> None:
    try:
        SyscallProbe().start().stop()
    except (StrapPermissionError, UnsupportedError) as error:
        pytest.skip(str(error))


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    """A process of CHILD that is ready for its first step."""
    running = subprocess.Popen(
        [sys.executable, "-c", CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
    )
    with running:
        await_step(running)
        yield running
        running.kill()


def await_step(running: subprocess.Popen[bytes]) -> None:
    assert running.stdout is not None
    assert running.stdout.readline() == b"ready\n"


def step(running: subprocess.Popen[bytes]) -> None:
    """Lets the program do a step, and waits for the end of the step."""
    assert running.stdin is not None
    running.stdin.write(b"\n")
    await_step(running)


def by_name(snapshot: dict) -> dict[str, dict]:
    return {one["name"]: one for one in snapshot["syscalls"]}


def eventually(probe: KernelProbe, true: Callable[[dict], bool]) -> dict:
    """The first snapshot for which `true` returns True."""
    deadline = time.monotonic() + 60
    while not true(snapshot := probe.snapshot()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return snapshot


def test_system_calls_are_counted(child):
    with SyscallProbe(child.pid) as probe:
        step(child)
        snapshot = probe.snapshot()
        later = probe.snapshot()
    assert (snapshot["pid"], snapshot["ended"]) == (child.pid, False)
    calls = by_name(snapshot)
    pread = calls["pread64"]
    assert (pread["count"], pread["errors"]) == (501, 1)
    assert sum(b["count"] for b in pread["latency_histogram"]) == 501
    (sleep,) = (call for name, call in calls.items() if name.endswith("nanosleep"))
    assert sleep["count"] >= 10
    assert sleep["total_ns"] >= 0.2e9
    assert sleep["latency_histogram"][-1]["bucket_high"] >= 20_000
    assert snapshot["losses"].keys() == {"unseen_start", "other_abi", "no_room", "missed"}
    assert snapshot["losses"]["no_room"] == snapshot["losses"]["missed"] == 0
    assert "pread64" not in by_name(later)


def test_call_in_flight_is_seen_until_the_process_ends(child):
    with SyscallProbe(child.pid) as probe:
        step(child)
        waiting = eventually(
            probe,
            lambda s: [(i["name"], i["thread"]) for i in s["inflight"]] == [("read", child.pid)],
        )
        (read,) = waiting["inflight"]
        assert read["before_start"] is False
        (again,) = probe.snapshot()["inflight"]
        assert again["age_ns"] > read["age_ns"] > 0
        child.kill()
        child.wait(240)
        assert probe.snapshot()["ended"] is True
        last = probe.snapshot()
    assert last["ended"] is True
    assert last["syscalls"] == last["inflight"] == []
    assert set(last["losses"].values()) == {0}


def test_this_process_is_the_default():
    with SyscallProbe() as probe:
        for _ in range(10):
            with pytest.raises(OSError, match="Bad file"):
                os.pread(-1, 1, 0)
        snapshot = probe.snapshot()
    assert snapshot["pid"] == os.getpid()
    assert by_name(snapshot)["pread64"]["errors"] >= 10


def by_reason(snapshot: dict) -> dict[str, dict]:
    return {one["reason"]: one for one in snapshot["waits"]}


def test_waits_are_counted(child):
    with OffCpuProbe(child.pid) as probe:
        step(child)
        snapshot = probe.snapshot()
    assert (snapshot["pid"], snapshot["ended"]) == (child.pid, False)
    assert "stacks" not in snapshot
    assert snapshot["losses"].keys() == {
        *("unseen_start", "unseen_wakeup", "unseen_end"),
        *("no_room", "no_stack", "missed"),
    }
    sleep = by_reason(snapshot)["sleeping"]
    assert sleep["sleep_ns"] >= SLEPT_NS
    assert sleep["latency_histogram"][-1]["bucket_high"] >= 19_000
    for wait in snapshot["waits"]:
        assert wait["sleep_ns"] + wait["runqueue_ns"] == wait["total_ns"]
        for histogram in ("latency_histogram", "runqueue_histogram"):
            assert sum(b["count"] for b in wait[histogram]) == wait["count"]


def test_wait_in_flight_is_seen_until_the_process_ends(child):
    with OffCpuProbe(child.pid) as probe:
        step(child)
        waiting = eventually(
            probe, lambda s: [i["thread"] for i in s["inflight"] if not i["ready"]] == [child.pid]
        )
        (wait,) = waiting["inflight"]
        assert (wait["reason"], wait["before_start"]) == ("sleeping", False)
        (again,) = probe.snapshot()["inflight"]
        assert again["age_ns"] > wait["age_ns"] > 0
        child.kill()
        child.wait(240)
        assert probe.snapshot()["ended"] is True
        last = probe.snapshot()
    assert last["ended"] is True
    assert last["waits"] == last["inflight"] == []


def test_stacks_of_waits(child):
    """Each wait has the kernel stack where it happened."""
    with OffCpuProbe(child.pid, stacks=True) as probe:
        step(child)
        snapshot = probe.snapshot()
    longest = max(
        (stack for stack in snapshot["stacks"] if stack["reason"] == "sleeping"),
        key=lambda stack: stack["total_ns"],
    )
    assert longest["total_ns"] >= SLEPT_NS
    assert longest["kernel"]
    line = next(folded_stacks([snapshot]))
    frames, microseconds = line.rsplit(" ", 1)
    assert frames.endswith(f"{longest['kernel'][0]}_[k]")
    assert int(microseconds) >= longest["total_ns"] // 1000


def test_large_snapshot():
    """A snapshot may need more room than the library allocates at first."""
    done = threading.Event()
    threads = [threading.Thread(target=done.wait, daemon=True) for _ in range(900)]
    try:
        with OffCpuProbe() as probe:
            for thread in threads:
                thread.start()
            snapshot = eventually(probe, lambda s: len(s["inflight"]) >= len(threads))
        assert len(json.dumps(snapshot)) > 1 << 16
    finally:
        done.set()


def test_folded_stacks():
    """Folded stacks sum up the same stacks, in microseconds."""

    def snapshot(ns: int) -> dict:
        place = {"reason": "sleeping", "count": 1, "total_ns": ns}
        return {
            "stacks": [
                {**place, "user": ["read", "f(a;b)", "main"], "kernel": ["schedule", "vfs_read"]},
                {**place, "user": [], "kernel": ["schedule"], "total_ns": 1500},
            ]
        }

    assert list(folded_stacks([snapshot(2000), {"waits": []}, snapshot(3500)])) == [
        "main;f(a:b);read;vfs_read_[k];schedule_[k] 5",
        "schedule_[k] 3",
    ]


@pytest.mark.parametrize("probe", [SyscallProbe, OffCpuProbe])
def test_no_such_process(probe, child):
    """A process that has ended, or an invalid pid, is an error."""
    child.kill()
    child.wait(240)
    with pytest.raises(NotFoundError, match=f"no process {child.pid}"):
        probe(child.pid).start()
    with pytest.raises(InvalidArgumentError, match="pid = -5"):
        probe(-5).start()
