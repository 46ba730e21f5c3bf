"""Common code of the capture benchmarks: the machine's description, tables, rounds, plots."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
LIBRARY = ROOT / "python" / "llm_instrumentation" / "_native" / "libstrap.so"
HEADER_FOLDER = ROOT / "c_include"

_libc = ctypes.CDLL(None, use_errno=True)


# ---- the machine ------------------------------------------------------------------


def resident(field: str) -> int:
    """Resident memory of the process in bytes, now (VmRSS) or at its peak (VmHWM)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) << 10
    raise LookupError(field)


def machine(folder: Path, packages: Sequence[str] = ()) -> dict[str, str]:
    """Describes the machine: processor, memory, kernel, the disk of a folder, versions."""
    told = {
        "processor": f"{_processor()}, {os.cpu_count()} cores",
        "memory": f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.0f} GiB",
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "captures go to": disk(folder),
        "load before": " ".join(f"{load:.2f}" for load in os.getloadavg()),
        "python": platform.python_version(),
    }
    for package in ("llm_instrumentation", *packages):
        with contextlib.suppress(metadata.PackageNotFoundError):
            told[package] = metadata.version(package)
    return told


def _processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def disk(folder: Path) -> str:
    """File system and device of a folder, such as "ext4 on /dev/vda (49 GB free)"."""
    free = shutil.disk_usage(folder).free / 1e9
    best, found = "", "a file system unknown"
    with contextlib.suppress(OSError):
        for line in Path("/proc/mounts").read_text().splitlines():
            device, point, kind = line.split()[:3]
            inside = folder.resolve().is_relative_to(point)
            if inside and len(point) >= len(best):
                best, found = point, f"{kind} on {device}"
    return f"{found} ({free:.0f} GB free)"


def head(title: str, told: dict[str, str]) -> None:
    """Prints the head of a benchmark's output in Markdown: title, command, machine."""
    print(f"## {title}\n")
    print(f"    {' '.join(['python', os.path.relpath(sys.argv[0], ROOT), *sys.argv[1:]])}\n")
    for key, value in told.items():
        print(f"- {key}: {value}")
    print(flush=True)


# ---- disks ------------------------------------------------------------------------


def sync(folder: Path) -> None:
    """Waits until the disk has all data that was written to the folder's file system."""
    directory = os.open(folder, os.O_RDONLY)
    try:
        if _libc.syncfs(directory) != 0:
            raise OSError(ctypes.get_errno(), "syncfs", str(folder))
    finally:
        os.close(directory)


def stored(folder: Path) -> int:
    """The sizes of all files in a folder together, in bytes."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


@contextlib.contextmanager
def clean_folder(parent: Path) -> Iterator[Path]:
    """Yields an empty folder. Afterwards it removes the folder and waits until the disk is idle."""
    folder = parent / "capture"
    folder.mkdir()
    try:
        yield folder
    finally:
        shutil.rmtree(folder)
        sync(parent)


# ---- figures ----------------------------------------------------------------------


def spread(values: Sequence[float], form: str = "{:.2f}") -> str:
    """Median and range as text: "0.94 (0.91 to 0.97)"."""
    middle = form.format(statistics.median(values))
    if len(values) == 1:
        return middle
    return f"{middle} ({form.format(min(values))} to {form.format(max(values))})"


def table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table whose columns line up as plain text too."""
    lines = [list(headings), *map(list, rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(headings))]
    padded = [
        [cell.ljust(width) for cell, width in zip(line, widths, strict=True)] for line in lines
    ]
    padded.insert(1, ["-" * width for width in widths])
    return "\n".join(f"| {' | '.join(line)} |" for line in padded)


def kept_rounds(path: Path | None, more: bool, settings: dict[str, Any]) -> list[dict[str, Any]]:
    """The rounds of earlier runs in a file; empty without `more` or a file.

    Raises:
        SystemExit: the earlier rounds had other settings.
    """
    if path is None or not more or not path.exists():
        return []
    earlier = json.loads(path.read_text())
    if earlier["settings"] != settings:
        raise SystemExit(f"{path} has rounds of other settings: {earlier['settings']}")
    rounds: list[dict[str, Any]] = earlier["rounds"]
    return rounds


def keep(path: Path | None, told: dict[str, str], settings: dict[str, Any], rounds: Any) -> None:
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        kept = {"machine": told, "settings": settings, "rounds": rounds}
        path.write_text(json.dumps(kept, indent=1) + "\n")


def plot(out: Path | None, name: str, draw: Callable[[Any], None], **how: Any) -> None:
    """Draws OUT/NAME.png if `out` is given. `draw` receives matplotlib's axes."""
    if out is None:
        return
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    out.mkdir(parents=True, exist_ok=True)
    figure, axes = pyplot.subplots(layout="constrained", **how)
    draw(axes)
    figure.savefig(out / f"{name}.png", dpi=120)
    pyplot.close(figure)
    print(f"\n(plot: {out / f'{name}.png'})")


def version_of(*command: str) -> str:
    """The first line that a command prints, for commands that print a version."""
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()[0]
