"""Measures `strap report` on captures of a million packets: seconds, peak memory, size of the page.

The captures have the tensors of a model that is called step after step, each time with 8 tokens:
5,000 steps of 200 layers, and 1,000 steps of 1,000 layers. Beside the whole command stands a Python
that only imports what the command imports. Each round is a process of its own.

    python benchmarks/report.py [--packets 1000000] [--rounds 5]
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from _common import ROOT, head, keep, machine, spread, table

IMPORTS = "import llm_instrumentation.cli.strap, llm_instrumentation.cli.commands.report"
IMPORTS += ", llm_instrumentation.report._writing"


def capture(path: Path, layers: int, steps: int) -> None:
    import torch
    from llm_instrumentation import capture_activations
    from torch import nn

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(1000, 32)
            self.layers = nn.ModuleList(nn.LayerNorm(32) for _ in range(layers - 2))

        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            x = self.embed(input_ids)
            for layer in self.layers:
                x = layer(x)
            return x

    torch.manual_seed(0)
    model = Model().eval()
    with torch.no_grad(), capture_activations(model, path):
        for _ in range(steps):
            model(input_ids=torch.randint(0, 1000, (1, 8)))


def measured(*arguments: object) -> tuple[float, float]:
    """Seconds of a Python process, and its peak memory in MB."""
    environment = os.environ | {"PYTHONPATH": str(ROOT / "python")}
    begun = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, *map(str, arguments)], env=environment, stdout=subprocess.DEVNULL
    )
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        sys.exit(f"{arguments} ended with {process.returncode}")
    return time.perf_counter() - begun, used.ru_maxrss * 1024 / 1e6


def main() -> None:
    arguments = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    arguments.add_argument("--packets", type=int, default=1_000_000)
    arguments.add_argument("--rounds", type=int, default=5)
    arguments.add_argument("--folder", type=Path, help="of the captures; a temporary one")
    arguments.add_argument("--quick", action="store_true", help="little, to see that it works")
    arguments.add_argument("--json", type=Path)
    arguments.add_argument("--capture", nargs=3, metavar=("PATH", "LAYERS", "STEPS"),
                           help=argparse.SUPPRESS)  # fmt: skip
    o = arguments.parse_args()
    if o.capture:
        capture(Path(o.capture[0]), int(o.capture[1]), int(o.capture[2]))
        return
    if o.quick:
        o.packets, o.rounds = 10_000, 1
    rounds: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(dir=o.folder) as name:
        told = machine(Path(name), ("numpy", "matplotlib", "pandas"))
        head("Reports of captures of many packets", told)
        ways: dict[str, tuple[object, ...]] = {"imports": ("-c", IMPORTS)}
        for layers in (200, 1000):
            stream = Path(name, f"{layers}.stream")
            measured(__file__, "--capture", stream, layers, max(1, o.packets // layers))
            told_by = f"report, {layers:,} layers"
            ways[told_by] = ("-m", "llm_instrumentation.cli", "report", stream)
        for _ in range(o.rounds):
            for way, command in ways.items():
                rounds.setdefault(way, []).append(measured(*command))
        pages = {
            f"report, {layers:,} layers": Path(name, f"{layers}.stream.report.html").stat().st_size
            for layers in (200, 1000)
        }
    lines = [
        [way, spread([one[0] for one in each]), spread([one[1] for one in each], "{:.0f}"),
         f"{pages[way] / 1e6:.2f}" if way in pages else ""]
        for way, each in rounds.items()
    ]  # fmt: skip
    print(table(["", "s", "peak, MB", "page, MB"], lines))
    keep(o.json, told, {"packets": o.packets}, [rounds])


if __name__ == "__main__":
    main()
