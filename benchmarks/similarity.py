"""Measures linear CKA of a capture: seconds, multiplications a second, and memory.

The vectors are random, and the capture is read from the page cache. With `--max-bytes` below the
products of all pairs, the capture is read once for each group of pairs.

    python benchmarks/similarity.py [--layers 12] [--width 768] [--tokens 50000] [--folder .]
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import tempfile
import time
from pathlib import Path

import torch
from _common import head, machine, table

STEP = 1000  # tokens of a step


def capture(path: Path, layers: int, width: int, tokens: int) -> None:
    from llm_instrumentation._native import DTYPE_CODES, Session

    session = Session(path, codec="lz4", workers=2, max_memory_bytes=256 << 20)
    for step in range(tokens // STEP):
        for k in range(layers):
            values = torch.randn(STEP, width).half()
            layer, code = session.layer(f"layers.{k}", "", ""), DTYPE_CODES["float16"]
            session.enqueue(layer, code, (STEP, width), values.data_ptr(), step=step)
            session.flush()
    session.close()


def measure(path: Path, max_bytes: int, found: multiprocessing.Queue) -> None:
    """Runs in a process of its own, which tells its peak memory."""
    from llm_instrumentation.analysis.similarity import cka

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    begin = time.perf_counter()
    cka(path, without_calls=True, max_bytes=max_bytes)
    seconds = time.perf_counter() - begin
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    found.put((seconds, (peak - before) / 1024))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    for name, default in (("layers", 12), ("width", 768), ("tokens", 50_000)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--max-bytes", type=int, default=2 << 30)
    parser.add_argument("--quick", action="store_true", help="a small capture")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    sizes = parser.parse_args()
    if sizes.quick:
        sizes.layers, sizes.width, sizes.tokens = 3, 32, 2000
    head("Similarity of layers", machine(sizes.folder, ("torch",)))
    with tempfile.TemporaryDirectory(dir=sizes.folder) as made:
        path = Path(made) / "rows.stream"
        capture(path, sizes.layers, sizes.width, sizes.tokens)
        context = multiprocessing.get_context("spawn")
        found = context.Queue()
        process = context.Process(target=measure, args=(path, sizes.max_bytes, found))
        process.start()
        seconds, memory = found.get()
        process.join()
    pairs = sizes.layers * (sizes.layers + 1) // 2
    work = 2 * pairs * sizes.tokens * sizes.width**2
    print()
    print(
        table(
            ["layers", "width", "tokens", "seconds", "Gflop/s", "products, MB", "peak memory, MB"],
            [
                [
                    f"{sizes.layers}", f"{sizes.width:,}", f"{sizes.tokens:,}", f"{seconds:.1f}",
                    f"{work / seconds / 1e9:.0f}",
                    f"{min(sizes.max_bytes, 8 * pairs * sizes.width**2) / 2**20:.0f}",
                    f"{memory:.0f}",
                ]
            ],
        )
    )  # fmt: skip
    print("\nMemory: beyond that of the imports.")


if __name__ == "__main__":
    main()
