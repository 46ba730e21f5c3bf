"""The block probe's counts and latencies agree with those of fio."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from llm_instrumentation.errors import StrapPermissionError, UnsupportedError
from llm_instrumentation.probes import BlockProbe
from llm_instrumentation.probes.blocks.analysis import percentiles_us

SIZE = 16 << 20


@pytest.fixture(autouse=True)
def skip_unless_here() -> None:
    try:
        BlockProbe().start().stop()
    except (StrapPermissionError, UnsupportedError) as error:
        pytest.skip(str(error))
    if os.getuid() != 0:
        pytest.skip("a loop device needs root")
    for tool in ("fio", "losetup"):
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is not installed")


@pytest.fixture
def loop(tmp_path: Path) -> Iterator[Callable[..., Path]]:
    """Makes loop devices that merge no requests, over a file or a device."""
    made: list[Path] = []
    before: list[tuple[Path, str]] = []

    def make(over: Path | None = None, *options: str) -> Path:
        if over is None:
            over = tmp_path / "disk"
            over.write_bytes(os.urandom(SIZE))
        done = subprocess.run(
            ["losetup", "--find", "--show", *options, over], capture_output=True, text=True
        )
        if done.returncode != 0:
            pytest.skip(f"no loop device: {done.stderr.strip()}")
        device = Path(done.stdout.strip())
        made.append(device)
        merges = Path(f"/sys/block/{device.name}/queue/nomerges")
        before.append((merges, merges.read_text()))
        merges.write_text("2")
        return device

    yield make
    for setting, text in before:
        setting.write_text(text)
    for device in reversed(made):
        subprocess.run(["losetup", "--detach", device], check=True)


class Fio:
    """A process that becomes fio at `begin`. Its pid is known before."""

    def __init__(self, device: Path, rw: str, depth: int, block: str, requests: int) -> None:
        size = requests * int(block[:-1]) << 10
        command = f"fio --name=test --filename={device} --thread --direct=1 --ioengine=libaio"
        command += f" --rw={rw} --iodepth={depth} --bs={block} --io_size={size} --size={SIZE}"
        command += " --clat_percentiles=1 --percentile_list=50:90:99 --output-format=json"
        # If allowed, fio gets a real-time priority: its latencies include its own waits for a core.
        self._running = subprocess.Popen(
            ["sh", "-c", f"read line || exit 1; chrt -f -p 1 $$ 2>/dev/null; exec {command}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self.pid = self._running.pid
        self._operation = "write" if "write" in rw else "read"

    def begin(self) -> None:
        assert self._running.stdin is not None
        self._running.stdin.write(b"go\n")
        self._running.stdin.flush()

    def runs(self) -> bool:
        return self._running.poll() is None

    def result(self) -> dict[str, Any]:
        """fio's report on its requests."""
        out, _ = self._running.communicate(timeout=600)
        assert self._running.returncode == 0
        job: dict[str, Any] = json.loads(out[out.index(b"{") :])["jobs"][0][self._operation]
        return job


class Seen:
    """The sums of the snapshots of one device."""

    def __init__(self, probe: BlockProbe, operation: str) -> None:
        self._probe, self._operation = probe, operation
        self.counts: Counter[str] = Counter()
        self.latencies = np.zeros(32, np.int64)
        self.disks: dict[str, Counter[str]] = {}
        self.losses: Counter[str] = Counter()
        self.depths: list[int] = []

    def read(self) -> None:
        snapshot = self._probe.snapshot()
        for one in snapshot["operations"]:
            assert one["inflight"] >= 0
            if one["operation"] == self._operation:
                for name in ("completed", "latency_ns", "bytes", "errors", "merges"):
                    self.counts[name] += one[name]
                for bucket in one["latency_histogram"]:
                    self.latencies[bucket["slot"]] += bucket["count"]
        for row in snapshot.get("diskstats", ()):
            numbers = {k: v for k, v in row.items() if isinstance(v, int) and k != "device_id"}
            self.disks.setdefault(row["operation"], Counter()).update(numbers)
        self.losses.update(snapshot["losses"])
        self.depths += [d["count"] for d in snapshot["inflight"]]


def at_work(fio: Fio, *all_seen: Seen) -> dict[str, Any]:
    """Runs fio, takes snapshots meanwhile, and returns fio's report."""
    fio.begin()
    while fio.runs():
        for seen in all_seen:
            seen.read()
        time.sleep(0.02)
    for _ in range(2):  # a completion that the probe missed shows only in the next snapshot
        for seen in all_seen:
            seen.read()
    return fio.result()


@pytest.mark.parametrize("block", ["4k", "64k"])
@pytest.mark.parametrize("depth", [1, 16])
@pytest.mark.parametrize("rw", ["randread", "randwrite", "read", "write"])
def test_counts_are_those_of_fio_and_of_diskstats(loop, rw, depth, block):
    disk = loop()
    operation = "write" if "write" in rw else "read"
    fio = Fio(disk, rw, depth, block, requests=1000)
    with (
        BlockProbe([disk.name]) as of_all,
        BlockProbe([disk.name], pid=fio.pid) as of_fio,
    ):
        everything, own = Seen(of_all, operation), Seen(of_fio, operation)
        said = at_work(fio, everything, own)
    assert said["total_ios"] == 1000
    assert own.counts["completed"] + own.losses["unseen_end"] == 1000
    assert own.counts["bytes"] == own.counts["completed"] * int(block[:-1]) * 1024
    assert own.counts["errors"] == own.counts["merges"] == 0
    assert own.latencies.sum() == own.counts["completed"]
    assert own.depths[-1] == everything.depths[-1] == 0
    # Other programs may have read the new device; their requests are in both counts.
    row = everything.disks[operation]
    assert row["completed"] == row["followed"] + row["lost"] >= 1000
    assert row["difference"] == 0
    assert row["followed"] == everything.counts["completed"]


@pytest.fixture
def slow(loop: Callable[..., Path]) -> Iterator[tuple[Path, Path]]:
    """A device on which requests of a cgroup take 0.1 s, and the cgroup.

    It is a loop device over another loop device, which the kernel throttles for the cgroup. The
    kernel passes requests to the upper device on to the lower one in the name of the cgroup.
    """
    lower = loop()
    upper = loop(lower, "--direct-io=on")
    number = lower.stat().st_rdev
    device = f"{os.major(number)}:{os.minor(number)}"
    for mount, limits in (
        ("/sys/fs/cgroup", {"io.max": f"{device} riops=10 wiops=10"}),
        (
            "/sys/fs/cgroup/blkio",
            {f"blkio.throttle.{way}_iops_device": f"{device} 10" for way in ("read", "write")},
        ),
    ):
        cgroup = Path(mount) / f"strap-test-{os.getpid()}"
        try:
            cgroup.mkdir()
        except OSError:
            continue
        try:
            if all((cgroup / name).exists() for name in limits):
                for name, limit in limits.items():
                    (cgroup / name).write_text(limit)
                yield upper, cgroup
                return
        finally:
            cgroup.rmdir()
    pytest.skip("no cgroup here can be throttled")


@pytest.mark.parametrize(
    ("rw", "depth", "block"),
    [("randread", 1, "4k"), ("randwrite", 16, "64k"), ("read", 16, "4k"), ("write", 1, "64k")],
)
def test_latencies_are_those_of_fio(slow, rw, depth, block):
    # fio measures from handing over a request until it looks for the completion. So fio's latencies
    # are comparable only on a slow device. fio waits for the last `depth` requests together, and
    # may report up to twice the latency for them.
    disk, cgroup = slow
    fio = Fio(disk, rw, depth, block, requests=2 * depth + 18)
    (cgroup / "cgroup.procs").write_text(str(fio.pid))
    with BlockProbe([disk.name], pid=fio.pid) as probe:
        seen = Seen(probe, "write" if "write" in rw else "read")
        said = at_work(fio, seen)["clat_ns"]
    mean_us = seen.counts["latency_ns"] / seen.counts["completed"] / 1e3
    assert mean_us > 50_000 * depth  # the device was throttled
    expected = {"mean": (mean_us, said["mean"] / 1e3)}
    for (name, ns), us in zip(
        said["percentile"].items(), percentiles_us(seen.latencies, [50, 90, 99]), strict=True
    ):
        expected[name] = (float(us), ns / 1e3)
    for name, (ours, fios) in expected.items():
        assert abs(math.floor(math.log2(ours)) - math.floor(math.log2(fios))) <= 1, (name, expected)
