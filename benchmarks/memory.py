"""Measures the memory of a capture with a slow disk, and the time of its close.

    python benchmarks/memory.py [--rate 50] [--limit 0.25] [--gigabytes 2] [--out DIR]

It creates a file system on a loop device and limits its writers to 50 MB/s with a control group. A
separate process for each preset captures more to it than the memory limit, tensor by tensor. The
model waits while the memory is full. "growth" is the process's peak resident memory above that
before the capture. Afterwards every packet is read and its values are compared. The close writes
the staged bytes; the table has its time beside the staged bytes divided by the disk's rate.

It needs root, mkfs.ext4 and a control group for block devices. No result is a failure.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from _common import head, keep, machine, plot, table
from llm_instrumentation import ActivationReader, InstrumentationFramework
from llm_instrumentation.core.config import from_preset
from torch import Tensor, nn

PRESETS = ("fast_capture", "balanced", "max_compression")
ELEMENTS = 1 << 20  # of a tensor: 4 MiB of float32
Figures = dict[str, Any]


# ---- a slow disk ------------------------------------------------------------------


@contextlib.contextmanager
def slow_disk(size: int, rate: int, within: Path) -> Iterator[tuple[Path, Path]]:
    """Mounts a file system whose writers are limited to `rate` bytes per second.

    It is mounted with sync, so that the processes' own writes wait, not those of the kernel.

    Yields:
        The folder of the file system, and the `cgroup.procs` of the control group. Only processes
        of this group are limited.

    Raises:
        SystemExit: this is not possible here; the message says why.
    """
    folder, image = within / "disk", within / "disk.img"
    folder.mkdir()
    with image.open("wb") as file:
        file.truncate(size)
    with contextlib.ExitStack() as stack:
        _run("mkfs.ext4", "-q", "-E", "lazy_itable_init=1", image)
        _run("mount", "-o", "loop,sync", image, folder)
        stack.callback(_run, "umount", "--lazy", folder)
        yield folder, stack.enter_context(_throttle(os.stat(folder).st_dev, rate))


@contextlib.contextmanager
def _throttle(device: int, rate: int) -> Iterator[Path]:
    number = f"{os.major(device)}:{os.minor(device)}"
    first, second = Path("/sys/fs/cgroup/blkio"), Path("/sys/fs/cgroup")
    if (first / "blkio.throttle.write_bps_device").exists():
        root, file, rule = first, "blkio.throttle.write_bps_device", f"{number} {rate}"
    elif (second / "cgroup.controllers").exists():
        root, file, rule = second, "io.max", f"{number} wbps={rate}"
    else:
        raise SystemExit("memory: left out: no control group limits the rate of a disk here")
    group = root / f"strap-bench-{os.getpid()}"
    try:
        if root is second:
            (second / "cgroup.subtree_control").write_text("+io")
        group.mkdir()
        (group / file).write_text(rule)
    except OSError as error:
        raise SystemExit(f"memory: left out: the disk cannot be slowed down: {error}") from None
    try:
        yield group / "cgroup.procs"
    finally:
        group.rmdir()


def _run(*command: object) -> None:
    done = subprocess.run([*map(str, command)], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"memory: left out: {' '.join(map(str, command))}: {done.stderr.strip()}")


# ---- a capture in a separate process ------------------------------------------------


def values(step: int) -> Tensor:
    """The model's output in a step: normally distributed, the same for the same step."""
    return torch.randn(ELEMENTS, generator=torch.Generator().manual_seed(step))


class Model(nn.Module):
    def forward(self, step: int) -> Tensor:
        return values(step)


def status(field: str) -> int:
    """A field of /proc/self/status, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise KeyError(field)


class Watch(threading.Thread):
    """Reads resident memory and staged bytes ten times a second."""

    def __init__(self, framework: InstrumentationFramework, before: int) -> None:
        super().__init__(daemon=True)
        self.framework, self.before = framework, before
        self.began, self.over = time.perf_counter(), threading.Event()
        self.points: list[tuple[float, int, int]] = []

    def run(self) -> None:
        while not self.over.wait(0.1):
            now = time.perf_counter() - self.began
            staged = self.framework.stats().queued_bytes
            self.points.append((now, status("VmRSS") - self.before, staged))


def capture(preset: str, path: str, limit: float, steps: int) -> Figures:
    model = Model()
    model(0)
    config = from_preset(preset).with_memory_limit(limit).with_progress(False)
    framework = InstrumentationFramework(config)
    framework.instrument_model(model)
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak of resident memory, proc(5)
    before = status("VmRSS")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # "the model waited"
        with framework.capture_activations(path):
            watch = Watch(framework, before)
            watch.start()
            for step in range(steps):
                model(step)
            staged, left = framework.stats().queued_bytes, time.perf_counter()
        closed = time.perf_counter() - left
    watch.over.set()
    watch.join()
    stats = framework.stats()
    return {
        "growth": status("VmHWM") - before, "staging_peak": stats.memory_peak,
        "limit": stats.memory_limit, "raw": stats.raw_bytes, "stored": stats.stored_bytes,
        "dropped": stats.dropped, "stalls": stats.stalls, "stall_seconds": stats.stall_seconds,
        "seconds": stats.seconds, "staged_at_exit": staged, "close_seconds": closed,
        "points": watch.points,
    }  # fmt: skip


def lost(path: Path, steps: int) -> int:
    """The number of steps that are missing, or whose normalised MSE is 1e-3 or more."""
    with ActivationReader(path, warn=False) as reader:
        good = 0
        for step, activation in enumerate(reader):
            wanted, found = values(step), activation.to_torch().float().flatten()
            off = (found - wanted).square().mean() / wanted.square().mean()
            good += bool(off < 1e-3)
    return steps - good


def apart(preset: str, folder: Path, group: Path, options: argparse.Namespace) -> Figures:
    """Runs `capture` in a separate process in the control group, then counts lost steps."""
    path, steps = folder / f"{preset}.stream", int(options.gigabytes * 1e9 / 4 / ELEMENTS)
    how = [preset, str(path), str(options.limit), str(steps), str(group)]
    command = [sys.executable, __file__, "--child", *how]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    found: Figures = json.loads(done.stdout.splitlines()[-1])
    found["lost"] = lost(path, steps)
    found["packets"] = steps
    for file in folder.glob(f"{preset}.stream*"):
        file.unlink()
    return found


# ---- showing ----------------------------------------------------------------------


def show(found: dict[str, Figures], rate: float) -> None:
    rows = [
        [
            preset, f"{one['growth'] / 1e6:.0f}", f"{one['limit'] / 1e6:.0f}",
            f"{one['staging_peak'] / 1e6:.0f}", f"{one['lost'] + one['dropped']}",
            f"{one['packets']}", f"{one['raw'] / 1e6:.0f}",
            f"{one['stored'] / one['seconds'] / 1e6:.0f}", f"{one['stall_seconds']:.1f}",
            f"{one['close_seconds']:.1f}", f"{one['staged_at_exit'] / rate / 1e6:.1f}",
        ]
        for preset, one in found.items()
    ]  # fmt: skip
    headings = [
        "preset", "growth, MB", "limit, MB", "staging at most, MB", "lost", "packets",
        "float32, MB", "to disk, MB/s", "model waited, s", "close took, s", "staged / rate, s",
    ]  # fmt: skip
    print()
    print(table(headings, rows), flush=True)


def draw(found: dict[str, Figures], axes: Any) -> None:
    for preset, one in found.items():
        times = [point[0] for point in one["points"]]
        (line,) = axes.plot(times, [point[1] / 1e6 for point in one["points"]], label=preset)
        staged = [point[2] / 1e6 for point in one["points"]]
        axes.plot(times, staged, ":", color=line.get_color())
    limit = next(iter(found.values()))["limit"] / 1e6
    axes.axhline(limit, color="grey", linewidth=0.5)
    axes.set(xlabel="seconds", ylabel="MB: growth; dotted: staged; grey: the limit")
    axes.legend()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rate", type=float, default=50, help="of the disk, MB/s")
    parser.add_argument("--limit", type=float, default=0.25, help="of the staging memory, GB")
    parser.add_argument("--gigabytes", type=float, default=2, help="of float32 to capture")
    parser.add_argument("--presets", nargs="+", choices=PRESETS, default=PRESETS)
    parser.add_argument("--folder", help="where the disk's file stands (a temporary folder)")
    parser.add_argument("--out", type=Path, help="folder for the plot")
    parser.add_argument("--json", type=Path, help="write the figures here as well")
    parser.add_argument("--quick", action="store_true", help="little, once: only a test")
    parser.add_argument("--child", nargs=5, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        preset, path, limit, steps, group = options.child
        Path(group).write_text(str(os.getpid()))
        print(json.dumps(capture(preset, path, float(limit), int(steps))))
        return
    if options.quick:
        options.limit, options.gigabytes, options.presets = 0.016, 0.1, PRESETS[:1]
    told = machine(Path(options.folder or tempfile.gettempdir()), ("torch",))
    told["disk"] = f"ext4, sync, on a loop device, {options.rate:g} MB/s"
    head("Memory with a slow disk", told)
    if os.geteuid() != 0 or shutil.which("mkfs.ext4") is None:
        print("memory: left out: it takes root and mkfs.ext4")
        return
    size = int(options.gigabytes * 0.6e9) + (256 << 20)
    with (
        tempfile.TemporaryDirectory(dir=options.folder, prefix="memory-") as within,
        slow_disk(size, int(options.rate * 1e6), Path(within)) as (folder, group),
    ):
        found = {preset: apart(preset, folder, group, options) for preset in options.presets}
    show(found, options.rate)
    keep(options.json, told, {"rate": options.rate, "limit": options.limit}, found)
    plot(options.out, "memory", lambda axes: draw(found, axes), figsize=(8, 4))


if __name__ == "__main__":
    main()
