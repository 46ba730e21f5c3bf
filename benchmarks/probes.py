"""Measures the cost of the probes: their programs in the kernel, and their snapshots.

    python benchmarks/probes.py [--seconds 21] [--rounds 7] [--json FILE]

1. fio reads 4 KiB at random places of a loop device over a file in memory, at depth 16. strap-probe
   (a snapshot every 5 s) and bcc's `biolatency -D` watch at the same time. The kernel's statistics
   (kernel.bpf_stats_enabled) give the time of each program per event. The run is cut into rounds;
   the fastest round is the one that other programs disturbed least.
2. A second strap-probe watches the same device.
3. A shorter run uses an I/O scheduler, so that requests are also inserted into a queue.
4. Threads switch and pages fault while a SystemProbe runs. The kernel counts the runs of its
   programs.

It needs root, fio, losetup, bpftool and Go (make sets GO), and for the comparison bcc's libbpf
tools. No result is a failure.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import mmap
import os
import resource
import shutil
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from _common import machine
from llm_instrumentation.errors import StrapPermissionError, UnsupportedError
from llm_instrumentation.probes import BlockProbe, SystemProbe, program

STATISTICS = Path("/proc/sys/kernel/bpf_stats_enabled")
PEER = "biolatency"


def programs(pid: int | str) -> dict[str, tuple[int, int]]:
    """The BPF programs of a process by name: how often each ran, and its total time in ns."""
    own = set()
    for file in Path(f"/proc/{pid}/fdinfo").iterdir():
        with contextlib.suppress(OSError):
            lines = dict(line.split(":", 1) for line in file.read_text().splitlines())
            own.add(int(lines.get("prog_id", 0)))
    listed = subprocess.run(["bpftool", "prog", "show", "--json"], capture_output=True, check=True)
    return {
        one["name"]: (one.get("run_cnt", 0), one.get("run_time_ns", 0))
        for one in json.loads(listed.stdout)
        if one["id"] in own
    }


def cpu_ns(pid: int) -> int:
    """The time that a process's threads were on the cores, in ns."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks)


@contextlib.contextmanager
def loop_device(folder: str) -> Iterator[Path]:
    file = Path(folder) / "disk"
    with file.open("wb") as out:
        out.truncate(256 << 20)
    made = subprocess.run(
        ["losetup", "--find", "--show", file], capture_output=True, text=True, check=True
    )
    device = Path(made.stdout.strip())
    try:
        yield device
    finally:
        subprocess.run(["losetup", "--detach", device], check=True)


@contextlib.contextmanager
def statistics_on() -> Iterator[None]:
    before = STATISTICS.read_text()
    STATISTICS.write_text("1")
    try:
        yield
    finally:
        STATISTICS.write_text(before)


@contextlib.contextmanager
def running(command: list[str]) -> Iterator[subprocess.Popen]:
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        while len(programs(process.pid)) < 2:
            if process.poll() is not None:
                raise SystemExit(f"{command[0]} ended with {process.returncode}")
            time.sleep(0.1)
        yield process
    finally:
        process.terminate()
        process.wait()


def read_at_random(device: Path, seconds: float) -> None:
    command = ["fio", "--name=bench", f"--filename={device}", "--direct=1", "--rw=randread"]
    command += ["--bs=4k", "--iodepth=16", "--ioengine=libaio", "--time_based"]
    command += [f"--runtime={seconds * 1e3:.0f}ms"]
    subprocess.run(command, stdout=subprocess.DEVNULL, check=True)


def per_event(watchers: dict[str, int], work: Callable[[], None]) -> list[dict]:
    """The time per run of each program that ran at least 1,000 times during `work`."""
    before = {name: programs(pid) for name, pid in watchers.items()}
    work()
    rows = []
    for watcher, pid in watchers.items():
        for name, (runs, ns) in programs(pid).items():
            runs_before, ns_before = before[watcher].get(name, (0, 0))
            if runs - runs_before >= 1000:
                each = (ns - ns_before) / (runs - runs_before)
                rows.append(
                    {"of": watcher, "program": name, "runs": runs - runs_before, "ns": each}
                )
    return rows


def rounds_of(watchers: dict[str, int], work: Callable[[], None], times: int) -> list[dict]:
    """For each program the fastest round and the median of all rounds."""
    found: dict[tuple[str, str], list[dict]] = {}
    for _ in range(times):
        for row in per_event(watchers, work):
            found.setdefault((row["of"], row["program"]), []).append(row)
    return [
        {
            "of": of,
            "program": name,
            "runs": sum(row["runs"] for row in rows),
            "ns": min(row["ns"] for row in rows),
            "median_ns": statistics.median(row["ns"] for row in rows),
        }
        for (of, name), rows in found.items()
    ]


def block(seconds: float, rounds: int, folder: str) -> dict:
    """Measures requests with and without a scheduler, and strap-probe's share of a core."""
    with contextlib.ExitStack() as stack:
        device = stack.enter_context(loop_device(folder))
        scheduler = Path(f"/sys/block/{device.name}/queue/scheduler")
        before = scheduler.read_text().partition("[")[2].partition("]")[0]
        stack.callback(scheduler.write_text, before)
        scheduler.write_text("none")
        ours = stack.enter_context(running([str(program.path()), "block", "--interval", "5"]))
        watchers = {"strap-probe": ours.pid}
        if shutil.which(PEER):
            peer = stack.enter_context(running([PEER, "-D", "3600", "1"]))
            watchers[PEER] = peer.pid
        cpu, begin = cpu_ns(ours.pid), time.monotonic_ns()
        rows = rounds_of(watchers, lambda: read_at_random(device, seconds / rounds), rounds)
        share = (cpu_ns(ours.pid) - cpu) / (time.monotonic_ns() - begin)
        with running([str(program.path()), "block", "--interval", "5"]):
            two = rounds_of(watchers, lambda: read_at_random(device, seconds / rounds), rounds)
        scheduler.write_text("mq-deadline")
        queued = rounds_of(watchers, lambda: read_at_random(device, 5 / rounds), rounds)
    return {"alone": rows, "two probes": two, "mq-deadline": queued, "core_share": share}


def switch(times: int) -> None:
    """Lets two threads take turns, so that each waits for the other."""
    turns = [threading.Semaphore(0), threading.Semaphore(0)]

    def play(me: int) -> None:
        for _ in range(times):
            turns[me].acquire()
            turns[1 - me].release()

    players = [threading.Thread(target=play, args=(me,)) for me in (0, 1)]
    for player in players:
        player.start()
    turns[0].release()
    for player in players:
        player.join()


def fault(pages: int) -> None:
    """Touches pages of memory for the first time."""
    with mmap.mmap(-1, pages * mmap.PAGESIZE) as memory:
        memory.madvise(mmap.MADV_NOHUGEPAGE)
        for at in range(0, len(memory), mmap.PAGESIZE):
            memory[at] = 1


def system() -> dict:
    """Counts the runs of the SystemProbe's programs while threads switch and pages fault."""
    with SystemProbe() as probe:
        probe.snapshot()
        used, before = resource.getrusage(resource.RUSAGE_SELF), programs("self")
        switch(50_000)
        fault(50_000)
        after, now = programs("self"), resource.getrusage(resource.RUSAGE_SELF)
        out = {
            "switches": now.ru_nvcsw + now.ru_nivcsw - used.ru_nvcsw - used.ru_nivcsw,
            "faults": now.ru_minflt - used.ru_minflt,
            "runs": sum(runs - before[name][0] for name, (runs, _) in after.items()),
        }
        out |= snapshots(probe)
    return out | {"threads": sum(1 for _ in Path("/proc").glob("[0-9]*/task/*"))}


def snapshots(probe: BlockProbe | SystemProbe, times: int = 50) -> dict:
    """The median time of a snapshot, and its mean CPU time, in ms."""
    took = []
    cpu = time.process_time()
    for _ in range(times):
        begin = time.perf_counter()
        probe.snapshot()
        took.append(time.perf_counter() - begin)
    cpu = time.process_time() - cpu
    return {"snapshot_ms": statistics.median(took) * 1e3, "snapshot_cpu_ms": cpu / times * 1e3}


def show(report: dict) -> None:
    for name in ("alone", "two probes", "mq-deadline"):
        print(f"block, {name}:")
        for row in report["block"][name]:
            print(
                f"  {row['of']:12} {row['program']:24} {row['runs']:9} x {row['ns']:6.0f} ns "
                f"(median {row['median_ns']:.0f})"
            )
    print(f"strap-probe, at 5 s intervals: {report['block']['core_share']:.3%} of a core")
    one = report["system"]
    print(
        f"system: the programs ran {one['runs']} times in {one['switches']} switches and "
        f"{one['faults']} faults"
    )
    for name in ("block", "system"):
        took = report[name]
        ms, cpu = took["snapshot_ms"], took["snapshot_cpu_ms"]
        print(f"a snapshot, {name}: {ms:.2f} ms, {cpu:.2f} ms of them on a core")
    print(f"({one['threads']} threads on the machine)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=21, help="of fio's first run")
    parser.add_argument("--rounds", type=int, default=7, help="that its runs are cut into")
    parser.add_argument("--json", type=Path, help="write the figures here as well")
    given = parser.parse_args()
    missing = [tool for tool in ("fio", "losetup", "bpftool") if shutil.which(tool) is None]
    if os.getuid() != 0 or missing:
        print("probes: needs root, and", ", ".join(missing) or "has all tools")
        return
    try:
        BlockProbe().start().stop()
    except (StrapPermissionError, UnsupportedError) as error:
        print(f"probes: {error}")
        return
    for what, value in machine(Path("/dev/shm")).items():
        print(f"{what}: {value}")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder, statistics_on():
        report = {"block": block(given.seconds, given.rounds, folder), "system": system()}
        with BlockProbe() as probe:
            report["block"] |= snapshots(probe)
    show(report)
    if given.json is not None:
        given.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
