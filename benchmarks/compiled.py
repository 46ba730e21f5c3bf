"""Measures the speed that a compiled model keeps while it is captured.

    python benchmarks/compiled.py [--rounds 9] [--layers 8] [--width 768] [--backend inductor]
    python benchmarks/compiled.py --parts [--rounds 9] [--layers 8] [--width 128]

A Llama of random weights is compiled by torch.compile with fullgraph=True. It decodes one token a
step with a static cache, and reads a prompt of 256 tokens. Each round runs all contenders: the
compiled model alone, the same prepared for captures, the same with a capture inside its code, the
model alone without compilation, and with an eager capture; of the decoder layers, and of all
modules. The compiled model alone runs before and after each contender. A time is the least of some
repetitions. The speed kept is the mean of the times before and after over the contender's. The
table has medians and ranges over the rounds. "nothing" is the compiled model alone again; its range
shows the noise. No result is a failure.

`--parts` says where a step of decoding spends the processor time of the model's thread: in the code
that inductor made, or around it, where torch checks guards and a capture begins its step. The
processor's caches are emptied before each step, as the weights of a large model do. PyTorch
uses one thread. Differences of some hundred microseconds in the generated code are noise.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from _common import clean_folder, head, keep, machine, spread, table
from llm_instrumentation import InstrumentationConfig, capture_activations, prepare
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, StaticCache

PROMPT = 256  # tokens
LONGEST = 512  # tokens of the cache
LAYERS = "model.layers.*[0-9]"


def make(layers: int, width: int) -> nn.Module:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=width, intermediate_size=8 * width // 3, num_hidden_layers=layers,
            num_attention_heads=width // 64, num_key_value_heads=width // 128, vocab_size=8192,
            max_position_embeddings=LONGEST,
        )
    ).eval()  # fmt: skip


class Decode:
    """One step: a token after the prompt, which lies in a static cache."""

    def __init__(self, model: nn.Module) -> None:
        self._cache = StaticCache(config=model.config, max_cache_len=LONGEST)
        self._ids = torch.randint(0, 8192, (1, PROMPT))
        model(self._ids, past_key_values=self._cache)
        self._position = torch.tensor([[PROMPT]])
        self._lengths = [
            (layer, layer.cumulative_length.clone())
            for layer in self._cache.layers
            if isinstance(getattr(layer, "cumulative_length", None), Tensor)
        ]

    def __call__(self, model: Callable[..., Any]) -> None:
        for layer, length in self._lengths:
            layer.cumulative_length.copy_(length)
        model(
            self._ids[:, :1], past_key_values=self._cache, position_ids=self._position,
            use_cache=True,
        )  # fmt: skip


class Prefill:
    """One pass over the prompt."""

    def __init__(self, model: nn.Module) -> None:
        self._ids = torch.randint(0, 8192, (1, PROMPT))

    def __call__(self, model: Callable[..., Any]) -> None:
        model(self._ids, use_cache=False)


def least(run: Callable[[], None], repetitions: int) -> float:
    times = []
    for _ in range(repetitions):
        begin = time.perf_counter()
        run()
        times.append(time.perf_counter() - begin)
    return min(times)


def measure(
    work: Any, model: nn.Module, compiled: nn.Module, folder: Path, rounds: int, repetitions: int
) -> dict[str, list[float]]:
    path = folder / "run.stream"
    every = InstrumentationConfig.balanced().with_progress(False)
    layers = dataclasses.replace(every).with_layers(LAYERS)

    def captured(of: nn.Module, config: InstrumentationConfig) -> Any:
        where = "inside" if of is compiled else "eager"
        config = dataclasses.replace(config).with_compiled(where)
        return lambda: capture_activations(of, path, config=config, overwrite=True)

    contenders: dict[str, tuple[nn.Module, Callable[[], Any]]] = {
        "nothing": (compiled, contextlib.nullcontext),
        "prepared for decoder layers": (compiled, lambda: prepare(compiled, layers)),
        "decoder layers captured": (compiled, captured(compiled, layers)),
        "prepared for all modules": (compiled, lambda: prepare(compiled, every)),
        "all modules captured": (compiled, captured(compiled, every)),
        "eager, alone": (model, contextlib.nullcontext),
        "eager, decoder layers captured": (model, captured(model, layers)),
        "eager, all modules captured": (model, captured(model, every)),
    }

    def alone() -> float:
        work(compiled)
        return least(lambda: work(compiled), repetitions)

    ratios: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(rounds + 1):
        for name, (of, begin) in contenders.items():
            before = alone()
            with begin():
                work(of)
                took = least(lambda of=of: work(of), repetitions)
            if number > 0:  # the first round compiles
                ratios[name].append((before + alone()) / 2 / took)
    return ratios


def measure_parts(work: Any, compiled: nn.Module, folder: Path, rounds: int) -> list[list[str]]:
    """Rows of a table: microseconds of processor time in the generated code and around it."""
    from torch._inductor.output_code import CompiledFxGraph

    run, inside = CompiledFxGraph.__call__, 0.0

    def timed(self: Any, inputs: Any) -> Any:
        nonlocal inside
        begin = time.thread_time()
        try:
            return run(self, inputs)
        finally:
            inside += time.thread_time() - begin

    every = InstrumentationConfig.balanced().with_progress(False).with_compiled("inside")
    layers = dataclasses.replace(every).with_layers(LAYERS)

    def captured(config: InstrumentationConfig) -> Any:
        path = folder / "run.stream"
        return capture_activations(compiled, path, config=config, overwrite=True)

    contenders: dict[str, Callable[[], Any]] = {
        "alone": contextlib.nullcontext,
        "prepared for decoder layers": lambda: prepare(compiled, layers),
        "decoder layers captured": lambda: captured(layers),
        "prepared for all modules": lambda: prepare(compiled, every),
        "all modules captured": lambda: captured(every),
    }
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in contenders}
    caches = torch.zeros(16 << 20)  # 64 MB
    torch.set_num_threads(1)
    with mock.patch.object(CompiledFxGraph, "__call__", timed):
        for number in range(rounds + 1):
            for name, begin in contenders.items():
                with begin():
                    work(compiled)
                    for _ in range(10 if number > 0 else 0):  # the first round compiles
                        caches.add_(1)
                        inside, began = 0.0, time.thread_time()
                        work(compiled)
                        whole = time.thread_time() - began
                        times[name].append((inside * 1e6, (whole - inside) * 1e6))
    return [
        [name, *(f"{statistics.quantiles(part, n=20)[0]:.0f}" for part in zip(*of, strict=True))]
        for name, of in times.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, help="default: 768, or 128 for the parts")
    parser.add_argument("--parts", action="store_true", help="where a step spends its time")
    parser.add_argument("--backend", default="inductor")
    parser.add_argument("--json", type=Path, help="keep all ratios in this file")
    options = parser.parse_args()
    options.width = options.width or (128 if options.parts else 768)
    warnings.simplefilter("ignore")
    told = machine(Path(tempfile.gettempdir()), ("torch", "transformers"))
    head("Speed that a compiled model keeps", told)
    found = {}
    with torch.no_grad(), tempfile.TemporaryDirectory() as parent:
        model = make(options.layers, options.width)
        compiled = torch.compile(model, backend=options.backend, fullgraph=True)
        if options.parts:
            with clean_folder(Path(parent)) as folder:
                rows = measure_parts(Decode(model), compiled, folder, options.rounds)
            print(table(["microseconds, 5th percentile", "generated code", "around it"], rows))
            return
        for title, work, repetitions in (
            ("one step of decoding", Decode(model), 20),
            (f"a prompt of {PROMPT} tokens", Prefill(model), 5),
        ):
            with clean_folder(Path(parent)) as folder:
                ratios = measure(work, model, compiled, folder, options.rounds, repetitions)
            found[title] = ratios
            rows = [
                [name, f"{statistics.median(of):.2f}", spread(of)] for name, of in ratios.items()
            ]
            print(table([title, "speed kept", "rounds"], rows), flush=True)
    keep(options.json, told, {"layers": options.layers, "width": options.width}, found)


if __name__ == "__main__":
    main()
