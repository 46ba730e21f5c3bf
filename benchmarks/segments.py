"""Measures how long a model waits where a capture goes on in a new segment.

    python benchmarks/segments.py [--gb 0.25] [--rolls 8] [--rounds 3] [--folder DIR] [--quick]

A model of linear layers runs step after step. The same steps are captured to one stream and in
segments, in turns. The table has the steps' times, and those of the steps that began a segment.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import time
from pathlib import Path

import torch
from _common import head, machine, table
from llm_instrumentation import ActivationReader, InstrumentationConfig, capture_activations
from torch import nn

WIDTH, LAYERS, ROWS = 1024, 8, 256
STEP_BYTES = LAYERS * WIDTH * ROWS * 2


def step_times(folder: Path, gb: float | None, steps: int) -> tuple[list[float], list[int]]:
    """The seconds of each step, and the steps that began a segment after the first."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)])
    config = InstrumentationConfig.balanced().with_memory_limit(0.5).with_progress(False)
    config.with_layers(include=nn.Linear).with_segments(gb=gb)
    path = folder / "run"
    shutil.rmtree(path, ignore_errors=True)
    inputs, seconds = torch.randn(ROWS, WIDTH), []
    with torch.no_grad(), capture_activations(model, f"{path}/", config=config):
        for _ in range(steps):
            begin = time.perf_counter()
            model(inputs)
            seconds.append(time.perf_counter() - begin)
            time.sleep(0.004)  # the rest of a real step
    with ActivationReader(path) as reader:
        begun = [shard.first_step or 0 for shard in reader.run.shards if shard.segment]
    return seconds, begun


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--gb", type=float, default=0.25, help="of a segment")
    parser.add_argument("--rolls", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--quick", action="store_true", help="little data, one round")
    given = parser.parse_args()
    if given.quick:
        given.gb, given.rolls, given.rounds = 0.02, 3, 1
    head("Segments", machine(given.folder, ("torch",)))
    steps = int(given.gb * 1e9 / STEP_BYTES * (given.rolls + 1.5))
    plain: list[float] = []
    segmented: list[float] = []
    rolls: list[float] = []
    for _ in range(given.rounds):
        with tempfile.TemporaryDirectory(dir=given.folder) as name:
            plain += step_times(Path(name), None, steps)[0]
            seconds, begun = step_times(Path(name), given.gb, steps)
            segmented += seconds
            rolls += [seconds[step] for step in begun]
    rows = [
        [
            what,
            f"{len(its):,}",
            f"{statistics.median(its) * 1e3:.1f}",
            f"{statistics.quantiles(its, n=1000)[-1] * 1e3:.1f}" if len(its) > 99 else "",
            f"{max(its) * 1e3:.1f}",
        ]
        for what, its in {
            "one stream": plain,
            "segments": segmented,
            "steps that began one": rolls,
        }.items()
    ]
    print(f"\nSegments of {given.gb:g} GB, milliseconds of a step\n")
    print(table(["capture", "steps", "median", "99.9 %", "longest"], rows))


if __name__ == "__main__":
    main()
