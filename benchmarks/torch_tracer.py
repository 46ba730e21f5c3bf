"""Measures the speed that a model keeps under the torch tracer.

    python benchmarks/torch_tracer.py [--rounds 15] [--threads 2] [--device cpu] [--json FILE]
                                      [--hidden 512] [--layers 8]

A random-weight Llama runs a prefill and a greedy generation. Each round runs it untraced and with
each contender, in turns. A ratio is within one round; the output has the median of all rounds and
the quartiles. The last column is the ratio of CPU times, each at the lowest decile of the rounds.
With --threads 1 that is the most precise figure on a machine that other programs use too.

The contenders beside the tracer are the tracer without C, a dispatch mode that does nothing, and a
simple dispatch mode of 15 lines. No result is a failure.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from llm_instrumentation.mrm.collector import TorchTracer
from llm_instrumentation.mrm.collector.torch import recorder
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import LlamaConfig, LlamaForCausalLM

PROMPT = 256
TOKENS = 32


class Nothing(TorchDispatchMode):
    """Runs each operator and records nothing."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


class FifteenLines(TorchDispatchMode):
    """Records times, addresses and lengths, but no regions: the simplest tracer."""

    def __init__(self):
        super().__init__()
        self.rows = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        now = time.monotonic_ns()
        out = func(*args, **(kwargs or {}))
        for op, tree in (("load", (args, kwargs)), ("store", out)):
            for leaf in tree_leaves(tree):
                if isinstance(leaf, torch.Tensor):
                    self.rows.append((now, leaf.data_ptr(), leaf.nbytes, op, func))
        return out


def build(device: str, hidden: int, layers: int) -> torch.nn.Module:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=4096, hidden_size=hidden, intermediate_size=hidden * 11 // 4,
        num_hidden_layers=layers, num_attention_heads=8, num_key_value_heads=8,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval().to(device)


def workloads(model: torch.nn.Module) -> dict[str, Callable[[], None]]:
    ids = torch.randint(0, 4096, (1, PROMPT), device=model.device)

    def prefill() -> None:
        model(ids)

    def generation() -> None:
        step, cache = ids, None
        for _ in range(TOKENS):
            out = model(input_ids=step, past_key_values=cache, use_cache=True, logits_to_keep=1)
            cache, step = out.past_key_values, out.logits[:, -1:].argmax(-1)
        step.tolist()

    return {"prefill": prefill, "generation": generation}


def contenders(
    model: torch.nn.Module, folder: str
) -> dict[str, Callable[[], contextlib.AbstractContextManager]]:
    tracers = {
        "TorchTracer": TorchTracer(Path(folder) / "all.parquet"),
        "TorchTracer, 1 operator in 10": TorchTracer(
            Path(folder) / "some.parquet", sample_every=10
        ),
    }
    attach = {
        name: (lambda tracer=tracer: tracer.attach(model)) for name, tracer in tracers.items()
    }
    in_c, recorder.view_in_c = recorder.view_in_c, lambda: 0
    without_c = TorchTracer(Path(folder) / "without_c.parquet")
    with without_c.attach(model):  # creates its recorder, which keeps the choice
        recorder.view_in_c = in_c
    return {
        "untraced": contextlib.nullcontext,
        "mode that does nothing": Nothing,
        "15 lines": FifteenLines,
        "TorchTracer without C": lambda: without_c.attach(model),
        **attach,
    }


def measure(rounds: int, model: torch.nn.Module) -> dict:
    results: dict[str, dict] = {}
    with tempfile.TemporaryDirectory() as folder:
        ways = contenders(model, folder)
        for guard in (torch.no_grad, torch.inference_mode):
            for what, work in workloads(model).items():
                label = f"{what}, {guard.__name__}"
                wall: dict[str, list[float]] = {name: [] for name in ways}
                cpu: dict[str, list[float]] = {name: [] for name in ways}
                for number in range(rounds + 2):
                    for name, way in ways.items():
                        with guard(), way():
                            start, used = time.perf_counter(), time.process_time()
                            work()
                            if model.device.type != "cpu":
                                torch.cuda.synchronize()
                            if number > 1:  # the first two rounds warm up
                                wall[name].append(time.perf_counter() - start)
                                cpu[name].append(time.process_time() - used)
                results[label] = {
                    name: _told(wall["untraced"], wall[name])
                    | {"cpu_kept": _low(cpu["untraced"]) / _low(cpu[name])}
                    for name in ways
                }
                _show(label, results[label])
    return results


def _told(untraced: list[float], traced: list[float]) -> dict:
    kept = [a / b for a, b in zip(untraced, traced, strict=True)]
    low, middle, high = statistics.quantiles(kept, n=4)
    return {"median_s": statistics.median(traced), "kept": middle, "quartiles": [low, high]}


def _low(seconds: list[float]) -> float:
    return statistics.quantiles(seconds, n=10)[0]


def _show(label: str, result: dict) -> None:
    print(f"\n{label}")
    for name, one in result.items():
        low, high = one["quartiles"]
        print(
            f"  {name:32s} {one['median_s'] * 1e3:9.2f} ms   "
            f"{one['kept']:.3f} of the speed ({low:.3f} to {high:.3f})   "
            f"{one['cpu_kept']:.3f} of the CPU time"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    machine = {
        "machine": platform.machine(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "device": options.device,
    }
    print(", ".join(f"{key} {value}" for key, value in machine.items()))
    model = build(options.device, options.hidden, options.layers)
    results = measure(options.rounds, model)
    if options.json is not None:
        options.json.write_text(json.dumps({"machine": machine, "results": results}, indent=2))


if __name__ == "__main__":
    main()
