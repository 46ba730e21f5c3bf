"""Measures zstd payloads of activations, compared with klauspost/compress and libzstd.

    python benchmarks/zstd_peers.py [--rounds 11] [--json FILE]

The tensors are the outputs of every module of a trained MiniLM for 8 English texts: as float16, as
float16 rounded to 5 bits of mantissa (max_compression does this), and as bfloat16. libstrap encodes
them at level 0 with each set of loops that this processor can run. klauspost/compress is libstrap's
level 1 to 4. libzstd is the one in the package zstandard.

Each contender runs in one thread, and all are on one core. They take turns: in each round, each
contender encodes each kind once. Speeds are medians, in 10^6 bytes of source a second of CPU time.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

import _one_core  # before the other imports, which start threads
import numpy as np
import torch
from _activations import outputs
from _common import ROOT, head, keep, machine, table
from capture_peers import add_packages

Turn = tuple[float, int]  # CPU seconds, bytes of payloads
Round = dict[str, dict[str, Turn]]  # by contender and kind


def kinds(tensors: dict[str, np.ndarray]) -> dict[str, list[bytes]]:
    """The bytes of each tensor in each kind of 16-bit floats."""
    halves = [array.astype(np.float16) for array in tensors.values()]
    brain = [torch.from_numpy(array).to(torch.bfloat16) for array in tensors.values()]
    return {
        "float16": [array.tobytes() for array in halves],
        "float16 of 5 bits": [rounded(array.view(np.uint16), 5).tobytes() for array in halves],
        "bfloat16": [tensor.view(torch.int16).numpy().tobytes() for tensor in brain],
    }


def rounded(words: np.ndarray, bits: int) -> np.ndarray:
    """Rounds finite float16 words to `bits` bits of mantissa: to nearest, ties to even."""
    drop = 10 - bits
    last = words >> drop & 1
    return (words + ((1 << (drop - 1)) - 1) + last) >> drop << drop


class Own:
    """libstrap's encoder, in a separate process."""

    def __init__(self, program: Path, loops: str, level: int) -> None:
        self.process = subprocess.Popen(
            [program, loops, str(level)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def turn(self, folder: Path) -> Turn:
        assert self.process.stdin is not None and self.process.stdout is not None
        print(folder, file=self.process.stdin, flush=True)
        seconds, stored = self.process.stdout.readline().split()
        return float(seconds), int(stored)

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


class Libzstd:
    """libzstd in this process."""

    def __init__(self, level: int) -> None:
        import zstandard

        self.compressor = zstandard.ZstdCompressor(level=level)

    def turn(self, folder: Path) -> Turn:
        seconds, stored = 0.0, 0
        for path in sorted(folder.iterdir()):
            source = bytearray(path.read_bytes())  # a fresh copy, as in libstrap's process
            began = time.thread_time()
            payload = self.compressor.compress(source)
            seconds += time.thread_time() - began
            stored += len(payload)
        return seconds, stored

    def close(self) -> None: ...


def built(folder: Path) -> Path:
    program = folder / "encodetest"
    package = "./libstrap/internal/codec/encodetest"
    go = os.environ.get("GO", "go")
    subprocess.run([go, "build", "-o", program, package], cwd=ROOT, check=True)
    return program


def contenders(program: Path) -> dict[str, Own | Libzstd]:
    loops = subprocess.run([program], capture_output=True, text=True, check=True).stdout.split()
    found: dict[str, Own | Libzstd] = {f"libstrap, {one}": Own(program, one, 0) for one in loops}
    for level in range(1, 5):
        found[f"klauspost/compress {level}"] = Own(program, loops[0], level)
    return found | {f"libzstd {level}": Libzstd(level) for level in (1, 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--json", type=Path, help="write the rounds here as well")
    parser.add_argument("--quick", action="store_true", help="a few tensors once: only a test")
    options = parser.parse_args()
    torch.set_num_threads(1)
    add_packages()
    tensors = outputs()
    if options.quick:
        options.rounds, tensors = 1, dict(list(tensors.items())[:5])
    with tempfile.TemporaryDirectory(prefix="zstd-peers-") as name:
        folder = Path(name)
        told = machine(folder, ("torch", "zstandard"))
        told["core"] = f"{_one_core.CORE} alone"
        head("zstd payloads", told)
        sources = {}
        for kind, encoded in kinds(tensors).items():
            (folder / kind).mkdir()
            for number, source in enumerate(encoded):
                (folder / kind / f"{number:03d}").write_bytes(source)
            sources[kind] = sum(map(len, encoded))
        found = contenders(built(folder))
        try:
            measure(found, folder, sources)  # warms up
            rounds = [measure(found, folder, sources) for _ in range(options.rounds)]
        finally:
            for one in found.values():
                one.close()
    show(rounds, sources)
    keep(options.json, told, {"bytes": sources}, rounds)


def measure(found: dict[str, Own | Libzstd], folder: Path, kinds: Iterable[str]) -> Round:
    return {name: {kind: one.turn(folder / kind) for kind in kinds} for name, one in found.items()}


def show(rounds: list[Round], sources: dict[str, int]) -> None:
    rows = []
    for name in rounds[0]:
        row = [name]
        for kind, source in sources.items():
            seconds = statistics.median(one[name][kind][0] for one in rounds)
            row += [f"{source / rounds[0][name][kind][1]:.3f}", f"{source / seconds / 1e6:.0f}"]
        rows.append(row)
    headings = ["encoder", *(f"{kind}, {what}" for kind in sources for what in ("ratio", "MB/s"))]
    print(table(headings, rows), flush=True)


if __name__ == "__main__":
    main()
