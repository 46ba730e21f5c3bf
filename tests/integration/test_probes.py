"""Block devices, watched in the kernel by the library, the script and the program."""

from __future__ import annotations

import json
import mmap
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from llm_instrumentation.errors import (
    CorruptError,
    InvalidArgumentError,
    NotFoundError,
    StrapPermissionError,
    UnsupportedError,
)
from llm_instrumentation.probes import (
    BlockProbe,
    SnapshotWriter,
    SystemProbe,
    collect,
    read_snapshots,
)

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "tracepoints.py"


def skip_unless_here() -> None:
    try:
        BlockProbe().start().stop()
    except (StrapPermissionError, UnsupportedError) as error:
        pytest.skip(str(error))


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A new loop device."""
    skip_unless_here()
    if os.getuid() != 0 or shutil.which("losetup") is None:
        pytest.skip("a loop device needs root and losetup")
    file = tmp_path / "disk"
    with file.open("wb") as out:
        out.truncate(16 << 20)
    made = subprocess.run(["losetup", "--find", "--show", file], capture_output=True, text=True)
    if made.returncode != 0:
        pytest.skip(f"no loop device: {made.stderr.strip()}")
    device = Path(made.stdout.strip())
    yield device
    subprocess.run(["losetup", "--detach", device], check=True)


@pytest.mark.parametrize("name", ["tracepoints", "system_metrics"])
def test_the_scripts_need_no_package(name):
    """The scripts also start in a Python without packages, such as the one that sudo runs."""
    command = [sys.executable, "-I", "-S", ROOT / "scripts" / f"{name}.py", "--help"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0
    assert "strap-probe" in done.stdout + done.stderr


def read_at_random(device: Path, times: int) -> None:
    """Reads 4 KiB at random places, past the page cache."""
    with mmap.mmap(-1, 4096) as page:
        fd = os.open(device, os.O_RDONLY | os.O_DIRECT)
        try:
            for _ in range(times):
                assert os.preadv(fd, [page], random.randrange(4096) * 4096) == 4096
        finally:
            os.close(fd)


def test_requests_are_counted(disk):
    with BlockProbe(devices=[disk.name]) as probe:
        read_at_random(disk, 300)
        snapshot = probe.snapshot()
        later = probe.snapshot()
    assert later["latency_histogram"] == later["operations"] == []  # counts are per interval
    (reads,) = snapshot["operations"]
    assert (reads["device_name"], reads["operation"]) == (disk.name, "read")
    # Some micro virtual machines hide completions that happen while process 1 runs.
    losses = snapshot["losses"]
    unseen = losses.pop("unseen_end") + later["losses"]["unseen_end"]
    assert losses.pop("missed") >= 0
    assert set(losses.values()) == {0}
    completed = reads["completed"]
    assert completed == 300 - unseen >= 285
    assert reads["bytes"] == completed * 4096
    assert [(b["slot"], b["count"]) for b in reads["size_histogram"]] == [(12, completed)]
    (latencies,) = snapshot["latency_histogram"]
    assert latencies["total"] == sum(b["count"] for b in latencies["buckets"]) == completed
    for bucket in latencies["buckets"]:
        assert bucket["bucket_low"] == 2 ** bucket["slot"]
        assert bucket["bucket_high"] == 2 ** (bucket["slot"] + 1) - 1
    major, minor = os.major(disk.stat().st_rdev), os.minor(disk.stat().st_rdev)
    assert latencies["device_id"] == major << 20 | minor
    assert [d["count"] for d in snapshot["inflight"]] == [reads["inflight"]] == [0]
    assert abs(snapshot["timestamp"] - time.time()) < 60
    assert abs(snapshot["monotonic_ns"] - time.monotonic_ns()) < 60e9


def test_a_probe_that_is_not_started_has_no_snapshot(disk):
    probe = BlockProbe(devices=[str(disk)])
    with pytest.raises(RuntimeError, match="start it"):
        probe.snapshot()
    probe.start()
    assert probe.start() is probe
    probe.stop()
    probe.stop()
    with pytest.raises(RuntimeError, match="start it"):
        probe.snapshot()


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"requests": 1000}, InvalidArgumentError, "requests = 1000"),
        ({"expire_s": -1.0}, InvalidArgumentError, "expire_s = -1"),
        ({"devices": ["nosuch"]}, NotFoundError, '"nosuch"'),
        ({"pid": -1}, InvalidArgumentError, "pid = -1"),
        ({"pid": 1 << 30}, NotFoundError, "no process 1073741824"),
        ({"cgroup": Path("/nosuch")}, NotFoundError, '"/nosuch"'),
        ({"cgroup": "/proc"}, InvalidArgumentError, "cgroup v2"),
    ],
)
def test_bad_options(options, error, says):
    """An invalid option is an error that names its value."""
    with pytest.raises(error, match=says):
        BlockProbe(**options).start()


def test_user_without_privilege_gets_an_error():
    if os.getuid() != 0 or shutil.which("setpriv") is None:
        pytest.skip("becoming another user needs root and setpriv")
    if Path("/proc/sys/kernel/unprivileged_bpf_disabled").read_text().strip() == "0":
        pytest.skip("here everybody may load programs")
    other = ["setpriv", "--reuid", "65534", "--clear-groups"]
    reachable = subprocess.run([*other, sys.executable, "-c", "import llm_instrumentation"])
    if reachable.returncode != 0:
        pytest.skip("the package lies where other users cannot read it")
    done = subprocess.run(
        [*other, sys.executable, SCRIPT, "--no-output"], capture_output=True, text=True
    )
    assert done.returncode in (3, 4)
    if done.returncode == 3:
        assert "CAP_BPF and CAP_PERFMON" in done.stderr
    assert "Traceback" not in done.stderr


def wait_for_lines(path: Path, n: int, running: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 240
    while not path.exists() or path.read_bytes().count(b"\n") < n:
        assert running.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)


# ---- processes ----


def test_processes_are_counted():
    skip_unless_here()
    with SystemProbe() as probe:
        with mmap.mmap(-1, 2000 * 4096) as memory:
            memory.madvise(mmap.MADV_NOHUGEPAGE)
            for at in range(0, len(memory), 4096):
                memory[at] = 1
        begin = time.thread_time()
        while time.thread_time() < begin + 0.1:
            pass
        time.sleep(0.1)
        snapshot = probe.snapshot()
    documented = {"timestamp", "iso_timestamp", "interval_s", "off_cpu_ns", "page_faults"}
    assert snapshot.keys() >= {*documented, "scope", "pressure", "processes", "losses"}
    pid = str(os.getpid())
    own = snapshot["processes"][pid]
    assert own["name"] == Path("/proc/self/comm").read_text().strip()
    assert own["on_cpu_ns"] >= 0.1e9
    assert own["off_cpu_ns"] == snapshot["off_cpu_ns"][pid] >= 0.1e9
    assert own["minor_faults"] + own["major_faults"] == snapshot["page_faults"][pid] >= 2000
    assert snapshot["losses"] == {"ended": 0}
    for resource, stalls in snapshot["pressure"].items():
        assert resource in {"cpu", "io", "memory"}
        assert stalls["some"].keys() == {"avg10", "avg60", "avg300", "total"}


def test_script_of_the_system(tmp_path):
    """The script of the system probe writes snapshots that contain the script itself."""
    skip_unless_here()
    running = subprocess.Popen(
        [sys.executable, SCRIPT.with_name("system_metrics.py"), "--interval", "0.1", "--fsync"],
        cwd=tmp_path,
    )
    path = tmp_path / "system_metrics.jsonl"
    wait_for_lines(path, 1, running)
    running.send_signal(signal.SIGINT)
    assert running.wait(240) == 0
    snapshots = list(read_snapshots(path))
    assert any(str(running.pid) in snapshot["processes"] for snapshot in snapshots)


# ---- the script ----


def script(*arguments: str | Path) -> list[str]:
    return [sys.executable, str(SCRIPT), *map(str, arguments)]


def test_script_writes_the_documented_lines(disk, tmp_path):
    path = tmp_path / "trace.jsonl"
    running = subprocess.Popen(
        script("--interval", "0.2", "--output", path, "--flush-every", "1", "--device", disk.name)
    )
    wait_for_lines(path, 1, running)
    read_at_random(disk, 100)
    running.send_signal(signal.SIGTERM)
    assert running.wait(240) == 0
    snapshots = list(read_snapshots(path))
    documented = {"timestamp", "iso_timestamp", "interval_s", "latency_histogram", "inflight"}
    assert all(snapshot.keys() >= documented for snapshot in snapshots)
    total = sum(d["total"] for s in snapshots for d in s["latency_histogram"])
    unseen = (
        sum(s["losses"]["unseen_end"] for s in snapshots) + snapshots[-1]["inflight"][0]["count"]
    )
    assert total + unseen == 100
    times = [snapshot["timestamp"] for snapshot in snapshots]
    assert times == sorted(times)


def test_killed_script_leaves_whole_lines(disk, tmp_path):
    path = tmp_path / "trace.jsonl"
    running = subprocess.Popen(
        script("--interval", "0.02", "--output", path, "--flush-every", "2", "--fsync")
    )
    wait_for_lines(path, 6, running)
    running.kill()
    running.wait(240)
    text = path.read_bytes()
    assert text.endswith(b"\n")
    assert len(list(read_snapshots(path))) == text.count(b"\n")


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["--interval", "0"], 2, ["--interval", "0"]),
        (["--interval", "nan"], 2, ["--interval", "NaN"]),
        (["--flush-every", "0"], 2, ["--flush-every", "0"]),
        (["--device", "nosuch", "--no-output"], 5, ["nosuch"]),
        (["--output", "/proc/nowhere/x.jsonl"], 1, ["/proc/nowhere/x.jsonl"]),
    ],
)
def test_errors_of_the_script(arguments, code, says, tmp_path):
    if code == 5:
        skip_unless_here()
    done = subprocess.run(script(*arguments), capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == code
    assert all(part in done.stderr for part in says)
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("name", ["tracepoints.py", "system_metrics.py"])
def test_script_helps(name):
    command = [sys.executable, SCRIPT.with_name(name), "--help"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0
    assert "-flush-every" in done.stdout + done.stderr


# ---- lines in files ----


def test_lines_come_back(tmp_path):
    path = tmp_path / "lines.jsonl"
    lines = [{"timestamp": float(i), "latency_histogram": []} for i in range(7)]
    with SnapshotWriter(path, flush_every=3) as writer:
        for i, line in enumerate(lines, 1):
            writer.write(line)
            assert len(path.read_bytes().splitlines()) == i // 3 * 3
    assert list(read_snapshots(path)) == lines
    with SnapshotWriter(path) as writer:  # appends to the file
        writer.write({"timestamp": 7.0})
    assert len(list(read_snapshots(path))) == 8


def test_torn_line_is_passed_over(tmp_path):
    path = tmp_path / "lines.jsonl"
    path.write_text('{"timestamp": 1}\n{"timestamp": 2, "infl')
    with SnapshotWriter(path) as writer:
        writer.write({"timestamp": 3})
    with pytest.warns(UserWarning, match="1 lines are no snapshots, the first of them line 2"):
        assert [s["timestamp"] for s in read_snapshots(path)] == [1, 3]


def test_file_of_something_else(tmp_path):
    """A file without snapshots is refused."""
    path = tmp_path / "notes.txt"
    path.write_text("one\ntwo\n")
    with pytest.raises(CorruptError, match="none of its 2 lines"):
        list(read_snapshots(path))


def test_full_disk_keeps_the_lines_for_later(tmp_path):
    writer = SnapshotWriter("/dev/full", flush_every=2)
    writer.write({"timestamp": 1})
    for _ in range(2):
        with pytest.raises(OSError, match="No space left"):
            writer.write({"timestamp": 2})
    with pytest.raises(OSError, match="No space left"):
        writer.close()
    writer.close()


def test_snapshots_come_at_intervals():
    stop, times = threading.Event(), []

    def snapshot():
        times.append(time.monotonic())
        time.sleep(0.03)
        if len(times) == 20:
            stop.set()
        return {"timestamp": times[-1]}

    begin = time.monotonic()
    assert len(list(collect(snapshot, interval_s=0.05, stop=stop))) == 20
    assert times[-1] - begin >= 0.99
    for wrong in (-1, 0, float("nan"), 1e10):
        with pytest.raises(InvalidArgumentError, match="interval_s = "):
            collect(snapshot, interval_s=wrong)


def test_snapshot_is_json_of_a_line(disk):
    with BlockProbe(devices=[disk.name]) as probe:
        assert "\n" not in json.dumps(probe.snapshot())
