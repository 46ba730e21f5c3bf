"""Captures in segments to an S3 server through a network with faults, and reads all of it back.

    python benchmarks/object_storage.py [--gb 20] [--segment-gb 1] [--folder DIR] [--quick]

The server is versitygw, which packaging/versitygw.py builds. A proxy between resets some of the
requests, refuses some, delays some, and changes a byte of some. A process captures a model of
linear layers and uploads the segments meanwhile; each is deleted here once it is proven there.
Another process reads every tensor from there, computes it again, and compares. A tensor that
differs or is missing is an error, and so are more memory or more fetched bytes than are allowed.
Memory is the highest of each process beyond what it has before its work.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch
from _common import head, machine, table
from torch import nn

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))

WIDTH, LAYERS, ROWS = 1024, 8, 256
STEP_BYTES = LAYERS * WIDTH * ROWS * 2
MEMORY_GB = 0.5
URL = "s3://captures/run/"
FAULTS = ("reset", "503", "slow", "wrong", "wrong upload", "truncated")
SHARE = 0.01  # of the requests
MORE_BYTES = 150e6  # that a capture may take beyond its limit
MOST_FETCHED = 1.1  # of the bytes that are needed


def model_of() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)])


def inputs_of(step: int) -> torch.Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(step))


def status(field: str) -> int:
    """A number of /proc/self/status, in bytes."""
    text = Path("/proc/self/status").read_text()
    return int(text.partition(f"{field}:")[2].split()[0]) << 10


@torch.no_grad()
def capture(run: Path, steps: int, segment_gb: float) -> dict[str, Any]:
    """Captures and uploads; the numbers of the capture."""
    from llm_instrumentation import InstrumentationConfig, capture_activations
    from llm_instrumentation.storage import StorageOptions, Uploader

    model = model_of()
    config = InstrumentationConfig.balanced().with_memory_limit(MEMORY_GB).with_progress(False)
    with capture_activations(model, run.parent / "small.stream", config=config):
        model(inputs_of(0))
    config.with_segments(gb=segment_gb).with_layers(exclude=[""])
    before, most = status("VmRSS"), 0
    options = StorageOptions(timeout_s=10.0, deadline_s=60.0)
    ended = threading.Event()

    def watch() -> None:
        nonlocal most
        while not ended.wait(0.5):
            most = max(most, sum(file.stat().st_size for file in run.glob("*.stream")))

    watching = threading.Thread(target=watch)
    begin, longest = time.perf_counter(), 0.0
    with Uploader(run, URL, delete_local=True, options=options) as uploader:
        watching.start()
        with capture_activations(model, f"{run}/", config=config) as running:
            for step in range(steps):
                start = time.perf_counter()
                model(inputs_of(step))
                longest = max(longest, time.perf_counter() - start)
        captured = time.perf_counter() - begin
    ended.set()
    watching.join()
    stats = running.stats()
    return {
        "captured_s": captured,
        "seconds": time.perf_counter() - begin,
        "stored": stats.stored_bytes,
        "stalls": stats.stall_seconds,
        "longest": longest,
        "sent": uploader.report.sent_bytes,
        "disk": most,
        "memory": status("VmHWM") - before,
        "left": len(list(run.glob("*.stream*"))),
    }


@torch.no_grad()
def read(steps: int) -> dict[str, Any]:
    """Reads all from the store, and compares it with the model."""
    from llm_instrumentation import ActivationReader

    model, wrong, needed = model_of(), 0, 0
    inputs_of(0)
    before, begin = status("VmRSS"), time.perf_counter()
    with ActivationReader(URL) as reader:
        opened = reader.fetched_bytes
        seen = 0
        for activation in reader:
            if seen % LAYERS == 0:
                value = inputs_of(activation.step or 0)
            value = model[int(activation.name)](value)
            wrong += not torch.equal(activation.to_torch(), value.half())
            needed += activation.stored_bytes
            seen += 1
        fetched = reader.fetched_bytes - opened
        complete = reader.steps == tuple(range(steps)) and seen == steps * LAYERS
        problem = reader.problem
    return {
        "seconds": time.perf_counter() - begin,
        "wrong": wrong,
        "complete": complete and not problem,
        "fetched": fetched / needed,
        "opened": opened,
        "memory": status("VmHWM") - before,
    }


def child(*arguments: object) -> dict[str, Any]:
    """What a process of its own tells."""
    done = subprocess.run(
        [sys.executable, __file__, "--child", *map(str, arguments)],
        stdout=subprocess.PIPE, text=True, check=True,
    )  # fmt: skip
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--gb", type=float, default=20.0)
    parser.add_argument("--segment-gb", type=float, default=1.0)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--quick", action="store_true", help="0.2 GB")
    parser.add_argument("--child", nargs="+", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        what, *rest = given.child
        if what == "capture":
            print(json.dumps(capture(Path(rest[0]), int(rest[1]), float(rest[2]))))
        else:
            print(json.dumps(read(int(rest[0]))))
        return
    if given.quick:
        given.gb, given.segment_gb = 0.2, 0.05
    from faulty_proxy import faulty_proxy
    from s3_server import s3_server

    steps, chance = max(1, int(given.gb * 1e9 / STEP_BYTES)), random.Random(0)
    counts = dict.fromkeys(FAULTS, 0)

    def fault(_: object) -> str:
        if chance.random() >= SHARE:
            return ""
        chosen = chance.choice(FAULTS)
        counts[chosen] += 1
        return chosen

    head("Captures to object storage", machine(given.folder, ("torch", "obstore")))
    with tempfile.TemporaryDirectory(dir=given.folder) as name:
        folder = Path(name)
        (folder / "s3").mkdir()
        with s3_server(folder / "s3") as server, faulty_proxy(server.url) as proxy:
            server.create_bucket("captures")
            os.environ.update(server.environment)
            os.environ.update(AWS_ENDPOINT_URL=proxy.url, STRAP_CACHE_FOLDER=str(folder / "cache"))
            proxy.fault = fault
            sent = child("capture", folder / "run", steps, given.segment_gb)
            back = child("read", steps)
    if back["wrong"] or not back["complete"] or sent["left"]:
        raise SystemExit(f"not all came back: {sent} {back}")
    rows = [
        ["captured", f"{sent['stored'] / 1e9:.2f} GB in {sent['captured_s']:.0f} s"],
        ["uploaded", f"{sent['sent'] / 1e9:.2f} GB, {sent['seconds']:.0f} s after the beginning"],
        ["the model waited", f"{sent['stalls']:.1f} s; the longest step {sent['longest']:.2f} s"],
        ["most on this disk", f"{sent['disk'] / 1e9:.2f} GB"],
        [
            "memory to capture and upload",
            f"{sent['memory'] / 1e6:.0f} MB, limit {MEMORY_GB * 1e3:.0f}",
        ],
        ["read back", f"every tensor equal, {back['seconds']:.0f} s"],
        ["fetched of what was needed", f"{back['fetched']:.3f}"],
        ["memory to read", f"{back['memory'] / 1e6:.0f} MB"],
        ["faults", ", ".join(f"{name} {count}" for name, count in counts.items())],
    ]
    print(table(["", f"{given.gb:g} GB, segments of {given.segment_gb:g} GB"], rows))
    if sent["memory"] > MEMORY_GB * 1e9 + MORE_BYTES or back["fetched"] > MOST_FETCHED:
        raise SystemExit("more memory or more bytes than allowed")


if __name__ == "__main__":
    main()
