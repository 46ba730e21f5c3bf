"""Measures how fast a C program captures activations to disk, compared with fio.

    python benchmarks/throughput.py [--rounds 5] [--gigabytes 6] [--out DIR]

throughput.c is compiled against libstrap. It captures the outputs of MiniLM's modules for English
texts from memory, again and again; no model runs. The table has 10^9 source bytes (float32) per
second: until fsync has returned ("durable"), until the stream is closed ("to close"), and until the
last tensor is taken ("taken"), which is the time that a model would wait.

fio writes as many bytes as the raw float16 has to the same file system: O_DIRECT, in sequence,
1 MiB at a time with 8 requests in flight. Each round runs all contenders. Each ratio to fio is
within one round. No result is a failure.

To use several quiet moments of a machine, run it with --json FILE --more: that adds rounds to those
of the earlier runs.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from _activations import outputs
from _common import (
    HEADER_FOLDER,
    LIBRARY,
    clean_folder,
    head,
    keep,
    kept_rounds,
    machine,
    plot,
    spread,
    table,
    version_of,
)

SOURCE = Path(__file__).with_name("throughput.c")
CODECS = {"none": 0, "lz4": 1, "zstd": 2}
BOUND = 1e-4  # normalised mean squared error of a packet
Figures = dict[str, float]


def compiled(folder: Path) -> tuple[Path, bool]:
    """Compiles the program; also returns whether the library supports an error bound."""
    program, library = folder / "throughput", folder / "libstrap.so.1"
    library.symlink_to(LIBRARY)
    command = [*os.environ.get("CC", "cc").split(), "-O2", "-std=gnu11", "-Wall", "-Wextra"]
    command += [f"-I{HEADER_FOLDER}", str(SOURCE), str(library), f"-Wl,-rpath,{folder}"]
    command += ["-o", str(program)]
    bounded = subprocess.run([*command, "-DHAVE_ERROR_BOUND"], capture_output=True)
    if bounded.returncode:
        subprocess.run(command, check=True)
    return program, bounded.returncode == 0


def saved(folder: Path) -> tuple[Path, Path]:
    """Writes the program's files TENSORS and LENGTHS."""
    tensors = [tensor.ravel() for tensor in outputs().values()]
    values, lengths = folder / "tensors", folder / "lengths"
    np.concatenate(tensors).astype(np.float32).tofile(values)
    np.array([len(tensor) for tensor in tensors], np.int64).tofile(lengths)
    return values, lengths


def by_libstrap(
    program: Path, data: tuple[Path, Path], codec: str, bound: float, options: argparse.Namespace,
    parent: Path,
) -> Figures:  # fmt: skip
    size, memory = int(options.gigabytes * 1e9), int(options.memory * 1e9)
    with clean_folder(parent) as folder:
        command = [program, *data, folder / "a.stream", CODECS[codec], bound, size, memory]
        done = subprocess.run(
            [*map(str, command), str(options.workers)], capture_output=True, text=True
        )
        if done.returncode:
            raise SystemExit(f"throughput, {codec}: {done.stderr}")
        figures: Figures = json.loads(done.stdout)
    return figures


def by_fio(options: argparse.Namespace, parent: Path) -> Figures:
    size = max(1, int(options.gigabytes * 1e9 / 2) >> 20) << 20
    with clean_folder(parent) as folder:
        command = [
            "fio", "--name=write", f"--filename={folder / 'file'}", f"--size={size}",
            "--rw=write", "--bs=1M", "--iodepth=8", "--ioengine=libaio", "--direct=1",
            "--end_fsync=1", "--output-format=json",
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"fio: {done.stdout}{done.stderr}")
        told = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]["write"]
    seconds = told["runtime"] / 1e3 or 1e-3
    return {"bytes": size, "taken": seconds, "closed": seconds, "durable": seconds, "stored": size}


def contenders(
    program: Path, bounded: bool, data: tuple[Path, Path], options: argparse.Namespace
) -> dict[str, Callable[[Path], Figures]]:
    def strap(codec: str, bound: float = 0) -> Callable[[Path], Figures]:
        return lambda parent: by_libstrap(program, data, codec, bound, options, parent)

    ways = {codec: strap(codec) for codec in CODECS}
    if bounded:
        ways[f"zstd, rounded to {BOUND:g}"] = strap("zstd", BOUND)
    if shutil.which("fio") is None:
        print("fio: left out: it is not installed", flush=True)
    else:
        ways["fio"] = lambda parent: by_fio(options, parent)
    return ways


def measure(options: argparse.Namespace, told: dict[str, str]) -> list[dict[str, Figures]]:
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="throughput-") as scratch:
        parent = Path(scratch)
        program, bounded = compiled(parent)
        data = saved(parent)
        head("Throughput to disk", told)
        if not bounded:
            print("zstd, rounded: left out: this library has no error bound")
        ways = contenders(program, bounded, data, options)
        rounds = []
        for number in range(options.rounds):
            turn = number % len(ways)
            names = [*ways][turn:] + [*ways][:turn]
            rounds.append({name: ways[name](parent) for name in names})
    return rounds


def rate(one: Figures, clock: str) -> float:
    return one["bytes"] / one[clock] / 1e9


def show(rounds: list[dict[str, Figures]]) -> None:
    rows = []
    for name in dict.fromkeys(name for one in rounds for name in one):
        having = [one for one in rounds if name in one]
        beside = [one for one in having if "fio" in one]
        results = [one[name] for one in having]
        to_fio = [rate(one[name], "durable") / rate(one["fio"], "durable") for one in beside]
        rows.append(
            [
                name,
                spread(to_fio) if to_fio else "",
                *(spread([rate(one, clock) for one in results]) for clock in CLOCKS),
                f"{results[0]['bytes'] / results[0]['stored']:.2f}",
                f"{results[0]['mse']:.1e}" if "mse" in results[0] else "",
                f"{results[0]['normalized_mse']:.1e}" if "normalized_mse" in results[0] else "",
                str(len(results)),
            ]
        )
    headings = [
        "contender", "to fio's, durable", "GB/s durable", "GB/s to close", "GB/s taken", "ratio",
        "MSE", "normalised MSE", "rounds",
    ]  # fmt: skip
    print("\n10^9 source bytes a second, median (range); the ratio is to float32\n")
    print(table(headings, rows), flush=True)


CLOCKS = ("durable", "closed", "taken")


def draw(rounds: list[dict[str, Any]], axes: Any) -> None:
    names = list(rounds[0])[::-1]
    for shift, clock in enumerate(CLOCKS):
        values = [[rate(one[name], clock) for one in rounds if name in one] for name in names]
        places = [place + 0.27 * (1 - shift) for place in range(len(names))]
        axes.barh(places, [statistics.median(v) for v in values], 0.25, label=clock)
    axes.set(yticks=range(len(names)), yticklabels=names, xlabel="10^9 source bytes a second")
    axes.legend()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--gigabytes", type=float, default=6.0, help="of float32, at least")
    parser.add_argument("--memory", type=float, default=0.5, help="of the staging, GB")
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    parser.add_argument("--folder", help="where streams go, and are deleted (a temporary one)")
    parser.add_argument("--out", type=Path, help="folder for the plot")
    parser.add_argument("--json", type=Path, help="write the rounds here as well")
    parser.add_argument("--more", action="store_true", help="add to the rounds of --json")
    parser.add_argument("--quick", action="store_true", help="a tenth of a gigabyte: only a test")
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.gigabytes, options.memory = 1, 0.1, 0.02
    told = machine(Path(options.folder or tempfile.gettempdir()))
    told["staging memory"] = f"{options.memory} GB"
    told["compression threads"] = str(options.workers)
    if shutil.which("fio"):
        told["fio"] = version_of("fio", "--version")
    settings = {name: getattr(options, name) for name in ("gigabytes", "memory", "workers")}
    rounds = kept_rounds(options.json, options.more, settings) + measure(options, told)
    show(rounds)
    keep(options.json, told, settings, rounds)
    plot(options.out, "throughput", lambda axes: draw(rounds, axes), figsize=(8, 4))


if __name__ == "__main__":
    main()
