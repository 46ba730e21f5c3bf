"""Measures `strap serve` on a capture of 100 GB: its start, its memory, and clicks in Chromium.

The capture is synthetic. Its index lists packets of 100 GB, and its stream is a sparse file: most
packets are holes, which read as zeros. A calls file says which tokens each step was given. Numbers
of a capture with real values on a slow disk are higher by the time of the disk.

    python benchmarks/serve.py [--packets 1000000] [--layers 200] [--rounds 5] [--folder .]

`--packets 6000 --layers 32` has few packets of 16 MB instead of many of 100 kB.
"""

from __future__ import annotations

import argparse
import os
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from _common import ROOT, head, machine, table

WIDTH = 4096
CHUNK = 50_000  # rows of a batch of the index

sys.path.insert(0, str(ROOT / "tests"))


# ---- the capture ------------------------------------------------------------------


def make(path: Path, packets: int, layers: int, total: int) -> int:
    """Writes a capture with holes; returns the tokens of a step."""
    from llm_instrumentation._native import Session

    tokens = max(1, total // packets // (2 * WIDTH))
    names = [f"model.layers.{k}" for k in range(layers)]
    steps = packets // layers
    # The index of a small capture has the schema, its metadata, and the first row.
    session = Session(path, codec="none", workers=1, max_memory_bytes=256 << 20)
    session.close()
    payload = 2 * tokens * WIDTH
    lengths = np.array([6 + len(name) + payload for name in names])
    _write_index(path, names, lengths, steps, tokens)
    with open(path, "r+b") as stream:
        stream.truncate(int(lengths.sum()) * steps)
        values = np.random.default_rng(0).standard_normal(tokens * WIDTH).astype(np.float16)
        for step in sorted({*range(min(12, steps)), steps - 1}):
            at = int(lengths.sum()) * step
            for k, name in enumerate(names):
                # The first packet is zeros too, because the index has its checksum.
                real = step > 0 and payload < 1 << 20
                stream.seek(at)
                stream.write(struct.pack("!HI", len(name), payload) + name.encode())
                stream.write(values.tobytes() if real else b"")
                at += int(lengths[k])
    _write_calls(path, steps, tokens)
    return tokens


def _write_index(
    path: Path, names: list[str], lengths: np.ndarray[Any, Any], steps: int, tokens: int
) -> None:
    import pyarrow as pa

    index = Path(f"{path}.index")
    with pa.ipc.open_stream(index.read_bytes()) as opened:
        schema = opened.schema
    rows = len(names) * steps
    offsets = np.concatenate([[0], np.cumsum(np.tile(lengths, steps))[:-1]])
    step = np.repeat(np.arange(steps), len(names))
    constant = {
        "part": 0, "parts": 1, "model": "model", "path": "", "call": 0, "token": None, "rank": 0,
        "thread": 1, "source_dtype": "float32", "stored_dtype": "float16", "codec": "none",
        "transform": None, "parameters": None, "mse": 1e-8, "mantissa_bits": None,
        "request": None, "error": None, "shape": [1, tokens, WIDTH], "crc32c": None,
    }  # fmt: skip
    with pa.OSFile(str(index), "wb") as file, pa.ipc.new_stream(file, schema) as out:
        for first in range(0, rows, CHUNK):
            some = np.arange(first, min(first + CHUNK, rows))
            varies = {
                "sequence": some, "offset": offsets[some], "length": lengths[some % len(names)],
                "layer": np.array(names)[some % len(names)], "step": step[some],
                "time_ns": some * 1000, "mean_square": 1 + 0.3 * np.sin(some / 9e4),
            }  # fmt: skip
            columns = [
                pa.array(varies[field.name], field.type)
                if field.name in varies
                else pa.array([constant[field.name]] * len(some), field.type)
                for field in schema
            ]
            out.write_batch(pa.RecordBatch.from_arrays(columns, schema=schema))


def _write_calls(path: Path, steps: int, tokens: int) -> None:
    from llm_instrumentation._native import capture_id_of
    from llm_instrumentation.core.files.calls_file import (
        AboutModels,
        CallsFile,
        Column,
        calls_path_for,
    )

    calls = CallsFile(calls_path_for(path), str(capture_id_of(path)), AboutModels({}, {}, {}))
    none = [Column(None, steps, 0)]
    ids = np.random.default_rng(1).integers(0, 32_000, steps * tokens)
    lists = {
        f"{side}{name}": none
        for side in ("", "decoder_")
        for name in ("token_ids", "token_hashes", "mask", "positions", "token_types")
    }
    lists["token_ids"] = [Column(ids, steps, tokens)]
    lists["positions"] = [Column(np.tile(np.arange(tokens), steps), steps, tokens)]
    texts = {name: [None] * steps for name in ("request", "labels", "inputs", "kept")}
    calls.write(
        {
            "step": range(steps), "row": [0] * steps, "model": ["model"] * steps,
            "entry": [""] * steps, "sequence": range(steps),
            "document": [f"document {step}" for step in range(steps)], **texts,
        },
        lists,
    )  # fmt: skip
    calls.end()
    calls.close()


# ---- measuring --------------------------------------------------------------------

CLICK = """async (selector) => {
  const found = typeof selector === "string" ? document.querySelector(selector) : selector;
  const begun = performance.now();
  found.click();
  const busy = () => document.body.dataset.state !== "ready"
    || document.querySelector(".heat[data-state=loading]");
  do { await new Promise(requestAnimationFrame); } while (busy());
  await new Promise(requestAnimationFrame);
  return performance.now() - begun;
}"""

FIRST = """async () => {
  const busy = () => document.body?.dataset.state !== "ready";
  while (busy()) await new Promise(requestAnimationFrame);
  await new Promise(requestAnimationFrame);
  return performance.now();
}"""


def resident(pid: int, field: str) -> float:
    """Memory of a process in MB: VmRSS now, VmHWM at its peak."""
    status = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1e3 for line in status if line.startswith(f"{field}:"))


def measure(path: Path, browser: Any) -> dict[str, list[float]]:
    begun = time.perf_counter()
    server = subprocess.Popen(
        [sys.executable, "-m", "llm_instrumentation.cli", "serve", path],
        stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": str(ROOT / "python")},
    )  # fmt: skip
    figures: dict[str, list[float]] = {}
    try:
        assert server.stdout is not None
        server.stdout.readline()
        url = server.stdout.readline().strip()
        figures["from start to listening, ms"] = [1e3 * (time.perf_counter() - begun)]
        with browser.new_context(viewport={"width": 1280, "height": 900}) as context:
            page = context.new_page()
            page.goto(url, wait_until="commit")
            figures["from navigation to first view, ms"] = [page.evaluate(FIRST)]
            figures["memory after the first view, MB"] = [resident(server.pid, "VmRSS")]
            click = lambda selector: page.evaluate(CLICK, selector)  # noqa: E731
            some = figures.setdefault
            some("a layer, ms", []).append(click("#layers tbody tr:nth-child(3) a"))
            for k in range(2, 12):
                some("a step, ms", []).append(click(f".items li:nth-child({k}) a"))
            for _ in range(4):
                some("zoom, ms", []).append(click(".heat .tools button"))
            some("texts, ms", []).append(click("#views a[data-view=tokens]"))
            some("a text, ms", []).append(click(".items li:nth-child(5) a"))
            for k in range(1, 1 + min(10, page.locator(".token").count())):
                some("a token, ms", []).append(click(f".token:nth-child({k})"))
            page.goto(url.partition("?")[0] + "?view=search&kind=id")
            page.evaluate(FIRST)
            page.locator("input[type=search]").fill("7")
            some("search, ms", []).append(click("form button"))
            some("overview, ms", []).append(click("#views a[data-view=overview]"))
        figures["memory at its peak, MB"] = [resident(server.pid, "VmHWM")]
    finally:
        server.terminate()
        server.wait(60)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--packets", type=int, default=1_000_000)
    parser.add_argument("--layers", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=Path())
    parser.add_argument("--quick", action="store_true", help="one round with little data")
    arguments = parser.parse_args()
    packets, total = arguments.packets, 100_000_000_000
    if arguments.quick:
        packets, total, arguments.layers, arguments.rounds = 2_000, 100_000_000, 20, 1

    from browser import chromium

    head("strap serve", machine(arguments.folder, ("starlette", "uvicorn", "playwright")))
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder, chromium() as browser:
        path = Path(folder) / "run.stream"
        tokens = make(path, packets, arguments.layers, total)
        print(
            f"{packets:,} packets of {arguments.layers} layers, [1, {tokens:,}, {WIDTH:,}] in "
            f"float16: {path.stat().st_size / 1e9:.1f} GB, sparse\n"
        )
        found: dict[str, list[float]] = {}
        for _ in range(arguments.rounds):
            for name, values in measure(path, browser).items():
                found.setdefault(name, []).extend(values)
    rows = [
        [name, f"{statistics.median(values):.0f}", f"{min(values):.0f}", f"{max(values):.0f}"]
        for name, values in found.items()
    ]
    print(table(["what", "median", "least", "most"], rows))


if __name__ == "__main__":
    main()
