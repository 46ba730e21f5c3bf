"""Measures the cost of a hooked module, for larger tensors, more hooks and more workers.

    python benchmarks/hook_cost.py [--rounds 5] [--out DIR]

The modules of the model return an existing tensor, so the model itself does no work. It runs
without hooks, with hooks that do nothing, and in a capture. The memory of the capture has room for
all tensors, so that only the hook, the conversion and the copy count. Each round runs all
contenders. The table has the medians of microseconds per module above the model without hooks. No
result is a failure.
"""

from __future__ import annotations

import argparse
import functools
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from _common import clean_folder, head, keep, machine, plot, table
from llm_instrumentation import InstrumentationConfig, InstrumentationFramework
from torch import Tensor, nn

SIZES = (1 << 10, 1 << 14, 1 << 18, 1 << 20, 1 << 22, 1 << 24)
HOOKS = (16, 128, 1024)
WORKERS = (1, 2, 4)
AT_ONCE = 128 << 20  # the most bytes of float32 in a capture
MEMORY = 2.0  # GB of a capture; more than AT_ONCE
CALLS = 1000  # of modules in a measurement, fewer if that would exceed AT_ONCE


class Again(nn.Module):
    """Returns its tensor."""

    def __init__(self, tensor: Tensor) -> None:
        super().__init__()
        self.tensor = tensor

    def forward(self) -> Tensor:
        return self.tensor


class Chain(nn.Module):
    """Calls many modules. Together they return at most four different tensors."""

    def __init__(self, modules: int, elements: int) -> None:
        super().__init__()
        tensors = [torch.randn(elements) for _ in range(min(modules, 4))]
        self.links = nn.ModuleList(Again(tensors[i % len(tensors)]) for i in range(modules))

    def forward(self) -> None:
        for link in self.links:
            link()


def seconds(model: nn.Module, passes: int) -> float:
    began = time.perf_counter()
    for _ in range(passes):
        model()
    return time.perf_counter() - began


def empty_hooks(model: nn.Module, passes: int, parent: Path) -> float:
    handles = [module.register_forward_hook(lambda *_: None) for module in model.modules()]
    took = seconds(model, passes)
    for handle in handles:
        handle.remove()
    return took


def captured(
    config: Callable[[], InstrumentationConfig], model: nn.Module, passes: int, parent: Path
) -> float:
    framework = InstrumentationFramework(config().with_progress(False).with_memory_limit(MEMORY))
    framework.instrument_model(model)
    with clean_folder(parent) as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        with framework.capture_activations(folder / "a.stream"):
            model()  # registers the layers before the clock runs
            took = seconds(model, passes)
    return took


def contenders() -> dict[str, Callable[[nn.Module, int, Path], float]]:
    own = InstrumentationConfig
    ways: dict[str, Callable[[nn.Module, int, Path], float]] = {"empty hooks": empty_hooks}
    for name, make in (("none", own.fast_capture), ("lz4", own.balanced)):
        ways[f"{name}, workers chosen"] = functools.partial(captured, make)
    for workers in WORKERS:
        ways[f"zstd, {workers} workers"] = functools.partial(
            captured, lambda n=workers: own.max_compression().with_workers(n)
        )
    return ways


def one_case(modules: int, elements: int, rounds: int, parent: Path) -> dict[str, list[float]]:
    """Microseconds per module, for each contender a value per round."""
    model = Chain(modules, elements)
    calls = min(max(CALLS, modules), max(modules, AT_ONCE // (4 * elements)))
    passes = max(1, calls // modules)
    ways = contenders()
    found: dict[str, list[float]] = {name: [] for name in ways}
    model()
    for _ in range(rounds):
        for name, way in ways.items():
            alone = seconds(model, passes)
            took = way(model, passes, parent)
            found[name].append((took - alone) / passes / modules * 1e6)
    return found


def cases(quick: bool) -> list[tuple[int, int]]:
    """(modules, elements): first larger and larger tensors, then more and more hooks."""
    if quick:
        return [(8, 1 << 10), (16, 1 << 10)]
    by_size = [(max(1, min(64, AT_ONCE // (4 * size))), size) for size in SIZES]
    return [*by_size, *((hooks, 1 << 10) for hooks in HOOKS)]


def human(elements: int) -> str:
    return f"{elements >> 20} M" if elements >= 1 << 20 else f"{elements >> 10} K"


def show(found: list[dict[str, Any]]) -> None:
    names = list(found[0]["us"])
    rows = []
    for case in found:
        middles = {name: statistics.median(case["us"][name]) for name in names}
        fast = middles["none, workers chosen"]
        rows.append(
            [
                str(case["modules"]), human(case["elements"]),
                *(f"{middles[name]:.1f}" for name in names),
                f"{4e-3 * case['elements'] / fast:.1f}" if fast > 0 else "",
            ]
        )  # fmt: skip
    print("\nmicroseconds a module above the model without hooks, medians\n")
    print(table(["hooks", "elements", *names, "GB/s, none"], rows), flush=True)


def draw(found: list[dict[str, Any]], axes: Any) -> None:
    sizes = [case for case in found if case["modules"] <= 64]
    for name in found[0]["us"]:
        values = [max(0.01, statistics.median(case["us"][name])) for case in sizes]
        axes.plot([case["elements"] for case in sizes], values, ".-", label=name)
    axes.set(xscale="log", yscale="log", xlabel="elements", ylabel="microseconds a module")
    axes.legend()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", help="where captures go, and are deleted (a temporary one)")
    parser.add_argument("--out", type=Path, help="folder for the plot")
    parser.add_argument("--json", type=Path, help="write the rounds here as well")
    parser.add_argument("--quick", action="store_true", help="two cases once: only a test")
    options = parser.parse_args()
    rounds = 1 if options.quick else options.rounds
    torch.set_grad_enabled(False)
    told = machine(Path(options.folder or tempfile.gettempdir()), ("torch",))
    told["threads of torch"] = str(torch.get_num_threads())
    head("Cost of a hook", told)
    found = []
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="hook-cost-") as parent:
        for modules, elements in cases(options.quick):
            us = one_case(modules, elements, rounds, Path(parent))
            found.append({"modules": modules, "elements": elements, "us": us})
    show(found)
    keep(options.json, told, {"cores": os.cpu_count()}, found)
    plot(options.out, "hook_cost", lambda axes: draw(found, axes), figsize=(8, 5))


if __name__ == "__main__":
    main()
