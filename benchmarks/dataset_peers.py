"""Measures how fast batches of shuffled rows come from disk, beside other stores of the same rows.

The rows are those of `benchmarks/dataset.py`, of one layer. Each way gives batches of 4,096 rows
from a shuffle buffer of 65,536, which it fills first, in a process of its own with a cold cache:

    ours         ActivationDataset, shuffle="pool"; the codec stands behind the name
    safetensors  shards of 65,536 rows read in turn by safe_open, and a buffer in torch
    torchlens    what extract_dataset wrote of the same values, a shard for each step, read in turn
                 by open_extraction, and the same buffer
    SAELens      ActivationsStore with use_cached_activations, whose folder
                 `export_rows(format="datasets", context=512)` writes; its own buffer

"disk" is fio with direct reads of a shard. A rate is GB of float16 a second, without the time to
open. torchlens needs `python benchmarks/capture_peers/install.py`.

    python benchmarks/dataset_peers.py [--gb 10] [--rounds 3] [--ways ours-none safetensors ...]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from _common import head, keep, machine, spread, table
from capture_peers import add_packages
from dataset import BATCH, POOL, ROWS, TOKENS, WIDTH, Source, capture, drop_cache, fio, steps

OURS = ("ours-none", "ours-lz4", "ours-zstd", "ours-archive")
WAYS = (*OURS, "safetensors", "torchlens", "SAELens")
LAYER = "layers.0"


def pooled(chunks: Iterator[Any]) -> Iterator[Any]:
    """Batches from a shuffle buffer, which rows [rows, width] fill in turn."""
    import torch

    pool, filled, left = torch.empty(POOL, WIDTH, dtype=torch.float16), 0, None
    random = torch.Generator().manual_seed(0)
    for chunk in chunks:
        while len(chunk):
            if filled < POOL:
                some = chunk[: POOL - filled]
                pool[filled : filled + len(some)] = some
                filled, chunk = filled + len(some), chunk[len(some) :]
                continue
            if left is not None:
                chunk, left = torch.cat([left, chunk]), None
            if len(chunk) < ROWS:
                left, chunk = chunk, chunk[:0]
                continue
            slots = torch.randperm(POOL, generator=random)[:ROWS]
            batch = pool[slots]
            pool[slots] = chunk[:ROWS]
            chunk = chunk[ROWS:]
            yield batch
    order = torch.randperm(filled, generator=random)
    for first in range(0, filled, ROWS):
        yield pool[order[first : first + ROWS]]


def ours(path: Path) -> Iterator[Any]:
    from llm_instrumentation.analysis.dataset import ActivationDataset

    data = ActivationDataset(
        path, LAYER, batch_size=ROWS, shuffle="pool", pool_rows=POOL, columns=()
    )
    return (batch[LAYER] for batch in data)


def safetensors(path: Path) -> Iterator[Any]:
    from safetensors import safe_open

    def chunks() -> Iterator[Any]:
        for shard in sorted(path.glob("*.safetensors")):
            with safe_open(shard, "pt") as file:
                part = file.get_slice(LAYER)
                for first in range(0, part.get_shape()[0], ROWS):
                    yield part[first : first + ROWS]

    return pooled(chunks())


def torchlens(path: Path) -> Iterator[Any]:
    add_packages()
    from torchlens._extraction import open_extraction

    reader = open_extraction(path)
    (key,) = reader.keys
    return pooled(batch[key].view(-1, WIDTH) for batch in reader.iter_batches())


def saelens(path: Path, batches: int) -> Iterator[Any]:
    import torch
    from sae_lens import ActivationsStore

    store = ActivationsStore(
        model=torch.nn.Identity(),  # it is not called: the activations are on disk
        dataset=None, streaming=False, hook_name=LAYER, hook_head_index=None, context_size=TOKENS,
        d_in=WIDTH, n_batches_in_buffer=POOL // TOKENS, total_training_tokens=batches * ROWS,
        store_batch_size_prompts=BATCH, train_batch_size_tokens=ROWS, prepend_bos=False,
        normalize_activations="none", device=torch.device("cpu"), dtype="float16",
        cached_activations_path=str(path),
    )  # fmt: skip
    return (next(store) for _ in range(batches))


def read(way: str, path: Path, batches: int) -> dict[str, float]:
    """In a process of its own: the rate, and the time to the first batch."""
    import torch  # noqa: F401 - its import counts for nobody

    began = time.perf_counter()
    if way == "SAELens":
        found = saelens(path, batches - POOL // ROWS)  # then it begins anew
    else:
        found = {"safetensors": safetensors, "torchlens": torchlens}.get(way, ours)(path)
    opened, first, total = time.perf_counter(), 0.0, 0
    for batch in found:
        first = first or time.perf_counter() - began
        total += batch.nbytes
    return {"rate": total / (time.perf_counter() - opened) / 1e9, "first": first, "bytes": total}


def write_torchlens(folder: Path, count: int) -> None:
    """In a process of its own: extracts the same values."""
    add_packages()
    import torch
    from torchlens import extract_dataset

    class Stored(Source):
        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            given = self.values[0] + 0 * input_ids[:, :, None]  # it traces what comes of its input
            return self.layers[0](given)[:, :1, :1]

    inputs = torch.zeros(count * BATCH, 1, dtype=torch.float16)
    extract_dataset(
        Stored(1), inputs, [LAYER], batch_size=BATCH, output_dir=folder, progress=False,
        model_identity="none",
    )  # fmt: skip


def made(folder: Path, way: str, gb: float) -> Path:
    """Writes the rows for one way."""
    from llm_instrumentation.analysis.exports import export_rows

    codec = way.removeprefix("ours-") if way in OURS else "none"
    path = folder / ("run.archive" if codec == "archive" else "run.stream")
    out = folder / way
    if way == "torchlens":
        apart("--write", str(out), str(steps(gb, 1)))
        return out
    capture(path, gb, 1, codec)
    if way in OURS:
        return path
    if way == "safetensors":
        export_rows(path, out, LAYER, format="safetensors", shard_bytes=POOL * WIDTH * 2)
    else:
        export_rows(path, out, LAYER, format="datasets", context=TOKENS)
    for file in folder.glob("run.*"):
        file.unlink()
    return out


def apart(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, __file__, *arguments], stdout=subprocess.PIPE, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(arguments)}: status {done.returncode}")
    return done.stdout.splitlines()[-1] if done.stdout else ""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--gb", type=float, default=10)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--quick", action="store_true", help="little data, a round, warm cache")
    parser.add_argument("--folder", default=".")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--read", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--write", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.write:
        write_torchlens(Path(arguments.write[0]), int(arguments.write[1]))
        return
    if arguments.read:
        way, path, batches = arguments.read
        with contextlib.redirect_stdout(sys.stderr):
            found = read(way, Path(path), int(batches))
        print(json.dumps(found))
        return
    if arguments.quick:
        arguments.gb, arguments.rounds, arguments.ways = 0.3, 1, ["ours-none", "safetensors"]
    os.environ["TQDM_DISABLE"] = "1"  # SAELens shows its bars on every output
    batches = steps(arguments.gb, 1) * BATCH * TOKENS // ROWS
    rounds: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        told = machine(Path(folder), ("torch", "safetensors", "sae-lens"))
        told["cache"] = "dropped" if drop_cache() else "warm"
        paths: dict[str, Path] = {}
        for way in arguments.ways:
            place = Path(folder) / f"of {way}"
            place.mkdir()
            paths[way] = made(place, way, arguments.gb)
        for number in range(arguments.rounds):
            one: dict[str, Any] = {}
            # The order changes, so that a machine that slows down is fair to all.
            for way in sorted(paths, reverse=number % 2 == 1):
                drop_cache()
                one[way] = json.loads(apart("--read", way, str(paths[way]), str(batches)))
            if "safetensors" in paths:
                drop_cache()
                one["disk"] = {"rate": fio(min(paths["safetensors"].glob("*.safetensors"))) / 1e9}
            rounds.append(one)
    head("Batches of shuffled rows, beside others", told)
    print(
        table(
            ["", "GB/s", "ours-none is", "first batch, s"],
            [
                [
                    way,
                    spread([one[way]["rate"] for one in rounds]),
                    spread([one["ours-none"]["rate"] / one[way]["rate"] for one in rounds])
                    if "ours-none" in paths
                    else "",
                    spread([one[way].get("first", 0) for one in rounds]),
                ]
                for way in rounds[0]
            ],
        )
    )
    keep(arguments.json, told, {"gb": arguments.gb}, rounds)


if __name__ == "__main__":
    main()
