"""Measures how fast a data set gives batches, beside the disk and the codec alone.

A model returns random normal float16 vectors, [8, 512, width] in each step, from one layer or from
111. Each round reads the capture in these ways, the first three with a cold cache:

    disk     fio, direct reads of 1 MiB, 8 at once
    none     ActivationDataset, in the order of the capture, 4,096 rows a batch
    pool     the same from a shuffle buffer of 65,536 rows, or a quarter of all; its filling counts
    full     the same in any order, from the folder on disk, without the time to prepare it
    codec    read_many of the first 2 GB of the same packets, with a warm cache
    prepare  how long the folder for "full" takes, in copies of the file (one layer alone)

A way's rate is GB of float16 a second, without the time to open the capture. "of" is the share of
what is possible: the lesser of the codec's rate and the rate at which the disk brings the packets
of one layer. "first batch" includes opening. "distinct" is for "full": how many packets the rows
of a batch come from, beside as many rows drawn from all.

    python benchmarks/dataset.py [--gb 10] [--layers 1] [--codec none zstd archive] [--rounds 3]

Dropping the cache needs root; without it the cache is warm, and the output says so.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _common import head, keep, machine, table
from torch import nn

BATCH, TOKENS, WIDTH, ROWS, POOL = 8, 512, 1024, 4096, 65536
CACHED = 2 * 10**9  # bytes of values that are read again from the page cache
QUICK = "--quick" in sys.argv  # also of the processes that this one starts


class Source(nn.Module):
    """Gives its layers values, [8, 512, width] of float16."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Identity() for _ in range(layers))
        shape = (4, BATCH, TOKENS, WIDTH)
        self.values = torch.randn(shape, generator=torch.Generator().manual_seed(0)).half()

    def forward(self, input_ids: torch.Tensor) -> None:
        for k, layer in enumerate(self.layers):
            layer(self.values[k % 4])


def steps(gb: float, layers: int) -> int:
    """The steps that capture so many GB."""
    return max(1, round(gb * 1e9 / (layers * BATCH * TOKENS * WIDTH * 2)))


def capture(path: Path, gb: float, layers: int, codec: str) -> None:
    from llm_instrumentation import InstrumentationConfig, capture_activations

    config = InstrumentationConfig.balanced()
    config = config.with_archive() if codec == "archive" else config.with_compression(codec)
    model = Source(layers)
    ids = torch.randint(50_000, (BATCH, TOKENS))
    with torch.no_grad(), capture_activations(model, path, config=config.with_layers("layers.*")):
        for _ in range(steps(gb, layers)):
            model(ids)


def drop_cache() -> bool:
    """Empties the page cache; returns False where that needs root, and in a quick run."""
    if QUICK:
        return False
    os.sync()
    try:
        Path("/proc/sys/vm/drop_caches").write_text("3")
    except OSError:
        return False
    return True


def fio(path: Path) -> float:
    """Bytes a second of direct reads of a file; NaN without fio."""
    if shutil.which("fio") is None:
        return math.nan
    size = path.stat().st_size >> 20 << 20
    done = subprocess.run(
        [
            "fio", "--name=read", f"--filename={path}", "--rw=read", "--bs=1m", "--direct=1",
            "--ioengine=libaio", "--iodepth=8", f"--size={size}", "--readonly",
            "--output-format=json",
        ],
        capture_output=True,
        text=True,
        check=True,
    )  # fmt: skip
    return float(json.loads(done.stdout)["jobs"][0]["read"]["bw_bytes"])


def read(path: Path, way: str, pool: int) -> dict[str, float]:
    """In a process of its own: seconds to the first batch and in all, bytes, and memory."""
    began = time.perf_counter()
    if way == "codec":
        from llm_instrumentation import ActivationReader

        with ActivationReader(path) as reader:
            view = reader["layers.0"]
            sizes = np.full(len(view), BATCH * TOKENS * WIDTH * 2, np.int64)
            room = np.empty(4 * int(sizes[0]), np.uint8)
            rows = view._rows.astype(np.uint64)[: CACHED // int(sizes[0])]
            ends = np.empty(4, np.uint64)
            for _ in range(2):  # the first time brings them to the cache
                began, total = time.perf_counter(), 0
                for first in range(0, len(rows), 4):
                    some = rows[first : first + 4]
                    reader._snapshot.packets.read_many(some, room.ctypes.data, len(room), ends)
                    total += int(sizes[: len(some)].sum())
        return {"seconds": time.perf_counter() - began, "bytes": total}
    from llm_instrumentation.analysis.dataset import ActivationDataset

    np.unique(np.arange(ROWS))  # what the loop below calls, so that its code is in memory
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = peak()
    opened, total, first_batch = time.perf_counter(), 0, 0.0
    data = ActivationDataset(path, "layers.0", batch_size=ROWS, shuffle=way, pool_rows=pool)
    began = time.perf_counter()
    opening = began - opened
    if way == "full":
        data.prepare()
        prepared = time.perf_counter() - began
        memory_to_prepare = peak() - before
        Path("/proc/self/clear_refs").write_text("5")
        os.sync()
        drop_cache()
        began = time.perf_counter()
    sources = []
    for batch in data:
        first_batch = first_batch or time.perf_counter() - began + opening
        total += batch["layers.0"].nbytes
        sources.append(len(np.unique(batch["step"].numpy())))
    seconds = time.perf_counter() - began
    found = {
        "seconds": seconds, "bytes": total, "first": first_batch, "memory": peak() - before,
    }  # fmt: skip
    if way == "full":
        rows = np.random.default_rng(0).integers(data.rows, size=(len(sources), ROWS))
        drawn = [len(np.unique(some // (BATCH * TOKENS))) for some in rows]
        distinct = float(np.mean(sources) / np.mean(drawn))
        found |= {"prepare": prepared, "distinct": distinct, "memory 1": memory_to_prepare}
    return found


def peak() -> int:
    """The most bytes that this process has had in memory."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024


def copied(path: Path) -> float:
    """Seconds to copy a file and wait for the disk."""
    drop_cache()
    copy = path.with_name("copy")
    began = time.perf_counter()
    shutil.copyfile(path, copy)
    with open(copy, "rb") as file:
        os.fsync(file.fileno())
    seconds = time.perf_counter() - began
    copy.unlink()
    return seconds


def measured(path: Path, way: str, pool: int, *, cold: bool) -> dict[str, Any]:
    if cold:
        drop_cache()
    command = [sys.executable, __file__, "--read", str(path), way, str(pool)]
    command += ["--quick"] if QUICK else []
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--gb", type=float, default=10)
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--codec", nargs="+", default=["none", "lz4", "zstd", "archive"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="little data, a round, warm cache")
    parser.add_argument("--folder", default=".")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--read", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.read:
        path, way, pool = arguments.read
        print(json.dumps(read(Path(path), way, int(pool))))
        return
    if arguments.quick:
        arguments.gb, arguments.rounds, arguments.codec = 0.1, 1, ["zstd"]
    pool = min(POOL, steps(arguments.gb, arguments.layers) * BATCH * TOKENS // 4)
    lines, results = [], []
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        told = machine(Path(folder))
        told["cache"] = "dropped" if drop_cache() else "warm"
        for codec in arguments.codec:
            path = Path(folder) / ("run.archive" if codec == "archive" else "run.stream")
            capture(path, arguments.gb, arguments.layers, codec)
            rounds: list[dict[str, float]] = []
            for _ in range(arguments.rounds):
                drop_cache()
                disk = fio(path)
                found = {
                    way: measured(path, way, pool, cold=True) for way in ("none", "pool", "full")
                }
                shutil.rmtree(f"{path}.shuffled")
                found["codec"] = measured(path, "codec", pool, cold=False)
                copy = copied(path)
                rate = {way: one["bytes"] / one["seconds"] for way, one in found.items()}
                decoded = found["none"]["bytes"]
                stored = path.stat().st_size / arguments.layers
                possible = min(disk * decoded / stored, rate["codec"])
                rounds.append({
                    "disk": disk / 1e9, **{way: one / 1e9 for way, one in rate.items()},
                    "none of": rate["none"] / possible, "pool of": rate["pool"] / possible,
                    "prepare": found["full"]["prepare"] / copy,
                    "first batch": found["none"]["first"],
                    "distinct": found["full"]["distinct"],
                    "MB, none": found["none"]["memory"] / 1e6,
                    "MB beyond the pool": (found["pool"]["memory"] - pool * WIDTH * 2) / 1e6,
                    "MB, preparing": found["full"]["memory 1"] / 1e6,
                    "MB, full": found["full"]["memory"] / 1e6,
                })  # fmt: skip
            results.append({"codec": codec, "rounds": rounds})
            middle = {name: statistics.median(one[name] for one in rounds) for name in rounds[0]}
            lines.append([codec, *(f"{value:.2f}" for value in middle.values())])
            names = ["codec", *middle]
            path.unlink()
    head("Data sets", told)
    print(table(names, lines))
    keep(arguments.json, told, {"gb": arguments.gb, "layers": arguments.layers}, results)


if __name__ == "__main__":
    main()
