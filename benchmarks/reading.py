"""Measures the reading of a capture of many small packets.

The capture has tensors of 64 float32 values of 200 layers, step after step. Each round opens it in
a separate process and reads a part of the packets in each of these ways:

    parser      the few lines of docs/STREAM_FORMAT.md, without an index
    iterate     for activation in reader: activation.to_numpy()
    one by one  reader.select()[k].to_numpy(), which decodes that packet alone
    stack       reader.select()[:N].stack()
    at          reader[layer].at(step=k)

    python benchmarks/reading.py [--packets 1000000] [--beside OTHER_CHECKOUT/python]

With --commands it measures whole commands instead, from their start to their end: `strap info`,
`strap ls` and `strap timeline -o`, and a Python that does nothing.

With --parts it measures the reading of parts of large packets instead, in turns with whole ones:

    one row     768 bytes of a packet of 4 MB; beside it the whole packet
    in order    4,095 ranges of 768 bytes that are 3 packets of 1 MB; beside it read_many of these
    random      4,096 ranges of 768 bytes of 64 packets of 1 MB; beside it read_many of all 64
"""

from __future__ import annotations

import argparse
import json
import os
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from _common import ROOT, head, keep, machine, resident, spread, table

LAYERS, VALUES = 200, 64
LINE, LINES, PACKETS = 768, 1365, 64  # of --parts: bytes of a range, ranges of a packet of 1 MB
WAYS = ("parser", "iterate", "one by one", "stack", "at")


def capture(path: Path, packets: int, codec: str) -> None:
    from llm_instrumentation._native import DTYPE_CODES, Session
    from llm_instrumentation._native.session import Layout

    values = np.random.default_rng(0).standard_normal((packets, VALUES), np.float32)
    session = Session(path, codec=codec, workers=1, max_memory_bytes=256 << 20)
    layers = [session.layer(f"model.layers.{k // 8}.part{k % 8}") for k in range(LAYERS)]
    layouts = [Layout(layer, DTYPE_CODES["float32"], (1, VALUES)) for layer in layers]
    address, each = values.ctypes.data, values.strides[0]
    for k in range(packets):
        session.put(layouts[k % LAYERS], address + k * each, k // LAYERS, k // LAYERS, 0)
    session.close()


def parser(path: str, most: int) -> None:
    import lz4.frame
    import zstandard

    decode = {b"\x04\x22\x4d\x18": lz4.frame.decompress, b"\x28\xb5\x2f\xfd": zstandard.decompress}
    with open(path, "rb") as file:
        for _ in range(most):
            name_len, data_len = struct.unpack("!HI", file.read(6))
            file.read(name_len).decode()
            payload = file.read(data_len)
            decode.get(payload[:4], bytes)(payload)


def measure(path: str, most: int) -> None:
    """Prints the figures of one round as JSON."""
    import torch  # noqa: F401  loads it before the clock runs
    from llm_instrumentation import ActivationReader
    from llm_instrumentation._native import library_version

    library_version()  # loads libstrap before the clock runs
    before, begun = resident("VmRSS"), time.perf_counter()
    reader = ActivationReader(path)
    figures = {"open": time.perf_counter() - begun}
    figures["memory"] = (resident("VmHWM") - before) / 1e6
    some = reader.select()[:most]
    layer, few = reader.layers[0], min(most, 5000)
    steps = min(1000, len(reader.steps))

    def iterate() -> None:
        for activation in some:
            activation.to_numpy()

    ways: dict[str, tuple[Callable[[], object], int]] = {
        "parser": (lambda: parser(path, most), most),
        "iterate": (iterate, most),
        "one by one": (lambda: [some[k].to_numpy() for k in range(few)], few),
        "stack": (some.stack, most),
        "at": (lambda: [reader[layer].at(step=k) for k in range(steps)], steps),
    }
    for name, (way, times) in ways.items():
        begun = time.perf_counter()
        way()
        figures[name] = (time.perf_counter() - begun) / times * 1e6
    print(json.dumps(figures))


def large(path: Path, codec: str, half: bool) -> None:
    """Captures a packet of 4 MB of float16 and 64 of 1 MB; half of the values zero if asked."""
    from llm_instrumentation._native import DTYPE_CODES, Session
    from llm_instrumentation._native.session import Layout

    values = np.random.default_rng(0).standard_normal(2 << 20, np.float32).astype(np.float16)
    if half:
        values = np.maximum(values, 0)
    session = Session(path, codec=codec, workers=1, max_memory_bytes=256 << 20)
    layer = session.layer("layer")
    for k in range(1 + PACKETS):
        some = values[k : k + LINE * LINES // 2] if k else values
        layout = Layout(layer, DTYPE_CODES["float16"], some.shape)
        session.put(layout, some.ctypes.data, k, k, 0)
    session.close()


def parts(o: argparse.Namespace) -> None:
    """Prints a table of parts and whole packets: medians of the rounds, and ratios within them."""
    from llm_instrumentation._native import Reader

    rng = np.random.default_rng(1)
    size = LINE * LINES
    in_order = [(1 + k // LINES, k % LINES * LINE, LINE) for k in range(3 * LINES)]
    starts = zip(rng.integers(0, PACKETS, 4096), rng.integers(0, size - LINE, 4096), strict=True)
    random = [(1 + row, first, LINE) for row, first in starts]
    calls = {
        "one row": ([(0, 2_000_000, LINE)], [0]),
        "in order": (in_order, [1, 2, 3]),
        "random": (random, list(range(1, 1 + PACKETS))),
    }
    data = np.empty(80 << 20, np.uint8)
    rounds: dict[str, list[tuple[float, float]]] = {}
    with tempfile.TemporaryDirectory(dir=o.folder) as folder:
        told = machine(Path(folder), ("numpy",))
        head("Reading parts of packets", told)
        lines = []
        for codec, half in [("none", 0), ("lz4", 0), ("lz4", 1), ("zstd", 0), ("archive", 0)]:
            path = Path(folder, f"{codec}.{'archive' if codec == 'archive' else 'stream'}")
            large(path, codec, bool(half))
            line = [codec + ", half zeros" * half]
            with Reader(path) as reader:
                for call, (given, whole) in calls.items():
                    rows, lengths = np.array(whole, np.uint64), [one[2] for one in given]
                    places = np.cumsum([0, *lengths[:-1]])
                    ranges = np.column_stack([given, places]).astype(np.uint64)
                    ends = np.empty(len(rows), np.uint64)
                    times = rounds[f"{line[0]}, {call}"] = []
                    for k in range(o.rounds):
                        both = [0.0, 0.0]
                        for way in (k % 2, 1 - k % 2):
                            begun = time.perf_counter()
                            if way:
                                reader.read_many(rows, data.ctypes.data, data.nbytes, ends)
                            else:
                                reader.read_ranges(ranges, data.ctypes.data, data.nbytes)
                            both[way] = (time.perf_counter() - begun) * 1e3
                        times.append((both[0], both[1]))
                    line += [spread([a for a, _ in times], "{:.3f}")]
                    line += [spread([b for _, b in times], "{:.3f}")]
                    line += [spread([b / a for a, b in times])]
            lines.append(line)
    headings = ["codec"]
    for call in calls:
        headings += [f"{call}, ms", "whole, ms", "times as fast"]
    print(table(headings, lines))
    keep(o.json, told, {"rounds": o.rounds}, rounds)


def commands(o: argparse.Namespace) -> None:
    """Prints how long the commands take on the capture, in seconds."""
    packages = {"this": ROOT / "python"} | ({"beside": o.beside.resolve()} if o.beside else {})
    with tempfile.TemporaryDirectory(dir=o.folder) as name:
        folder = Path(name)
        told = machine(folder, ("numpy", "pyarrow", "typer"))
        head("Commands on a capture of many small packets", told)
        took: dict[tuple[str, str], list[float]] = {}
        for name, package in packages.items():
            stream = folder / f"{name}.stream"
            run(package, "--packets", o.packets, "--codec", o.codec, "--capture", stream)
        for _ in range(o.rounds):
            for name, package in packages.items():
                stream = str(folder / f"{name}.stream")
                strap = ["-m", "llm_instrumentation.cli"]
                ways = {
                    "python": ["-c", "pass"],
                    "info": [*strap, "info", stream],
                    "ls": [*strap, "ls", stream],
                }
                if name == "this":
                    ways["timeline"] = [*strap, "timeline", stream, "-o", f"{stream}.pftrace"]
                for way, arguments in ways.items():
                    environment = os.environ | {"PYTHONPATH": str(package)}
                    process, begun = [sys.executable, *arguments], time.perf_counter()
                    subprocess.run(process, env=environment, stdout=subprocess.DEVNULL, check=True)
                    took.setdefault((name, way), []).append(time.perf_counter() - begun)
    print(table(["", "command", "s"], [[*way, spread(each)] for way, each in took.items()]))
    keep(o.json, told, {"packets": o.packets}, [{" ".join(k): v} for k, v in took.items()])


def main() -> None:
    arguments = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    arguments.add_argument("--packets", type=int, default=1_000_000)
    arguments.add_argument("--read", type=int, default=200_000, help="packets that are decoded")
    arguments.add_argument("--rounds", type=int, default=5)
    arguments.add_argument("--codec", default="lz4")
    arguments.add_argument("--commands", action="store_true", help="measure whole commands")
    arguments.add_argument("--parts", action="store_true", help="measure parts of large packets")
    arguments.add_argument("--beside", type=Path, help="python/ of a checkout to measure in turns")
    arguments.add_argument("--folder", type=Path, help="of the capture; a temporary one")
    arguments.add_argument("--quick", action="store_true", help="little, to see that it works")
    arguments.add_argument("--json", type=Path)
    arguments.add_argument("--measure", help=argparse.SUPPRESS)
    arguments.add_argument("--capture", type=Path, help=argparse.SUPPRESS)
    o = arguments.parse_args()
    if o.quick:
        o.packets, o.read, o.rounds = 10_000, 5000, 1
    if o.parts:
        parts(o)
    elif o.commands:
        commands(o)
    elif o.capture:
        capture(o.capture, o.packets, o.codec)
    elif o.measure:
        measure(o.measure, o.read)
    else:
        compare(o)


def compare(o: argparse.Namespace) -> None:
    packages = {"this": ROOT / "python"} | ({"beside": o.beside.resolve()} if o.beside else {})
    settings = {"packets": o.packets, "read": o.read, "codec": o.codec}
    rounds: list[dict[str, dict[str, float]]] = []
    with tempfile.TemporaryDirectory(dir=o.folder) as folder:
        told = machine(Path(folder), ("numpy", "pyarrow", "lz4", "zstandard"))
        head("Reading many small packets", told)
        # Each checkout reads its own capture, because the format of the index may differ.
        paths = {}
        for name, package in packages.items():
            paths[name] = Path(folder, f"{name}.stream")
            run(package, "--packets", o.packets, "--codec", o.codec, "--capture", paths[name])
        for _ in range(o.rounds):
            rounds.append({})
            for name, package in packages.items():
                rounds[-1][name] = json.loads(
                    run(package, "--measure", paths[name], "--read", o.read)
                )
        sizes = {
            n: [f.stat().st_size / 1e6 for f in (p, Path(f"{p}.index"))] for n, p in paths.items()
        }
    lines = []
    for name in packages:
        figures = {key: [each[name][key] for each in rounds] for key in rounds[0][name]}
        stream, index = sizes[name]
        lines.append(
            [
                name,
                f"{stream:.0f}",
                f"{index:.0f}",
                spread(figures["open"]),
                spread(figures["memory"], "{:.0f}"),
            ]
            + [spread(figures[way], "{:.1f}") for way in WAYS]
        )
    headings = ["", "stream, MB", "index, MB", "open, s", "memory, MB", *(f"{w}, us" for w in WAYS)]
    print(table(headings, lines))
    keep(o.json, told, settings, rounds)


def run(package: Path, *arguments: object) -> str:
    process = [sys.executable, __file__, *map(str, arguments)]
    environment = os.environ | {"PYTHONPATH": str(package)}
    done = subprocess.run(process, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return done.stdout


if __name__ == "__main__":
    main()
