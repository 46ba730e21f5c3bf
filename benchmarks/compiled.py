"""Measures the speed that a compiled model keeps while it is captured.

    python benchmarks/compiled.py [--rounds 9] [--layers 8] [--width 768] [--backend inductor]

A Llama of random weights is compiled by torch.compile with fullgraph=True. It decodes one token a
step with a static cache, and reads a prompt of 256 tokens. Each round runs all contenders one after
the other: the compiled model alone, the same with a capture inside its code, the model alone
without compilation, and with an eager capture; of the decoder layers, and of all modules. A time is
the least of a round's repetitions. The table has the median over rounds of the time of the compiled
model alone over that of the contender: the speed kept. No result is a failure.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from _common import clean_folder, head, keep, machine, spread, table
from llm_instrumentation import InstrumentationConfig, capture_activations
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
    balanced = InstrumentationConfig.balanced
    contenders: dict[str, tuple[nn.Module, InstrumentationConfig | None]] = {
        "compiled, alone": (compiled, None),
        "compiled, decoder layers captured": (compiled, balanced().with_layers(LAYERS)),
        "compiled, all modules captured": (compiled, balanced()),
        "eager, alone": (model, None),
        "eager, decoder layers captured": (model, balanced().with_layers(LAYERS)),
        "eager, all modules captured": (model, balanced()),
    }
    ratios: dict[str, list[float]] = {name: [] for name in contenders}
    path = folder / "run.stream"
    for number in range(rounds + 1):
        times = {}
        for name, (of, config) in contenders.items():
            capture: Any = contextlib.nullcontext()
            if config is not None:
                where = "inside" if of is compiled else "eager"
                config = config.with_compiled(where).with_progress(False)
                capture = capture_activations(of, path, config=config, overwrite=True)
            with capture:
                work(of)
                times[name] = least(lambda of=of: work(of), repetitions)
        if number > 0:  # the first round compiles
            for name, took in times.items():
                ratios[name].append(times["compiled, alone"] / took)
    return ratios


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--backend", default="inductor")
    parser.add_argument("--json", type=Path, help="keep all ratios in this file")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    told = machine(Path(tempfile.gettempdir()), ("torch", "transformers"))
    head("Speed that a compiled model keeps", told)
    found = {}
    with torch.no_grad(), tempfile.TemporaryDirectory() as parent:
        model = make(options.layers, options.width)
        compiled = torch.compile(model, backend=options.backend, fullgraph=True)
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
