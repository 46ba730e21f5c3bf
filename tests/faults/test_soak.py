"""A long run of probes keeps its memory and number of open files, and writes each snapshot."""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path

import llm_instrumentation
import pytest

pytestmark = pytest.mark.root

PROGRAM = Path(llm_instrumentation.__file__).parent / "_native" / "strap-probe"
SNAPSHOTS = 720  # one hour has as many at the default interval


@pytest.fixture
def busy(tmp_path):
    """Keeps the machine busy: processes that start and end, and writes that reach a disk."""
    stop = threading.Event()

    def work() -> None:
        while not stop.wait(0.02):
            subprocess.run([sys.executable, "-S", "-c", ""], check=True)
            with (tmp_path / "scratch").open("wb") as file:
                file.write(os.urandom(1 << 16))
                os.fsync(file.fileno())

    thread = threading.Thread(target=work)
    thread.start()
    yield
    stop.set()
    thread.join()


def anonymous_kib(pid: int) -> int:
    """The anonymous memory of a process in KiB, without mapped files."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1])
    raise AssertionError("no RssAnon")


@pytest.mark.usefixtures("busy")
@pytest.mark.parametrize("kind", ["block", "system"])
def test_an_hour_of_snapshots_takes_no_more_memory_than_a_minute(kind, long, tmp_path):
    """By default the snapshots of an hour come in a short time, with --faults-long in an hour."""
    interval = 5.0 if long else 0.02
    path = tmp_path / "lines.jsonl"
    command = [PROGRAM, kind, "--interval", interval, "--output", path, "--flush-every", "10"]
    running = subprocess.Popen([*map(str, command)], stderr=subprocess.PIPE, text=True)
    try:
        sizes: list[int] = []
        handles: list[int] = []
        deadline = time.monotonic() + 10 * SNAPSHOTS * interval + 120
        while (lines := path.read_bytes().count(b"\n") if path.exists() else 0) < SNAPSHOTS:
            if running.poll() in (3, 4):
                pytest.skip(running.stderr.read().strip())
            assert running.poll() is None
            assert time.monotonic() < deadline, f"{lines} lines"
            if lines >= SNAPSHOTS // 6:  # by now the program has the memory that it needs
                sizes.append(anonymous_kib(running.pid))
                handles.append(len(os.listdir(f"/proc/{running.pid}/fd")))
            time.sleep(interval)
        running.send_signal(signal.SIGTERM)
        assert running.wait(240) == 0
    finally:
        running.kill()
        running.wait()
        running.stderr.close()
    quarter = len(sizes) // 4
    early, late = statistics.median(sizes[:quarter]), statistics.median(sizes[-quarter:])
    print(f"{kind}: {early:.0f} KiB, later {late:.0f} KiB; {max(sizes)} at most")
    assert late - early < 2048  # a leak of 5 KiB a snapshot would exceed this
    assert max(handles) - min(handles) <= 2
    snapshots = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(snapshots) >= SNAPSHOTS
    # The intervals of the snapshots leave no gaps.
    whole_s = (snapshots[-1]["monotonic_ns"] - snapshots[0]["monotonic_ns"]) / 1e9
    assert sum(one["interval_s"] for one in snapshots[1:]) == pytest.approx(whole_s, rel=0.01)
