"""Measures what the effects of edges cost on a model as large as GPT-2 small: time and memory.

Weights and texts are random. Memory is the peak of a process of its own, beside that of a process
that makes one backward pass, in units of the residual stream, [batch, tokens, width] in float32.

    python benchmarks/edges.py [--examples 8] [--tokens 24] [--quick]
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _common import head, machine, table
from llm_instrumentation.analysis.significance import bootstrap_interval
from llm_instrumentation.interventions import edge_attribution, run_circuit
from llm_instrumentation.interventions.metrics import Metric
from llm_instrumentation.interventions.prompts import Prompts
from transformers import GPT2Config, GPT2LMHeadModel

METRIC = Metric("a logit", lambda logits, batch: logits[:, -1, 0])
# Of the processes for memory: 16 texts of 128 tokens.
BATCH, LENGTH, WIDTH = 16, 128, 512
RESIDUAL = BATCH * LENGTH * WIDTH * 4


def made(layers: int, heads: int, width: int, vocabulary: int) -> Any:
    config = GPT2Config(
        n_layer=layers, n_head=heads, n_embd=width, vocab_size=vocabulary,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return GPT2LMHeadModel(config).eval().requires_grad_(False)


def pairs(examples: int, tokens: int, vocabulary: int) -> Prompts:
    clean = torch.randint(vocabulary, (examples, tokens))
    return Prompts(clean, (clean + 1) % vocabulary)


def print_peak(layers: int, heads: int, edges: int) -> None:
    """Prints the peak memory of this process in bytes."""
    model, prompts = made(layers, heads, WIDTH, 50), pairs(BATCH, LENGTH, 50)
    if edges:
        edge_attribution(model, prompts, METRIC, batch_size=BATCH, confidence=None)
    else:
        embedded = model.transformer.wte(prompts.clean["input_ids"]).requires_grad_()
        model(inputs_embeds=embedded).logits[:, -1, 0].sum().backward()
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)


def beside(layers: int, heads: int) -> float:
    """The peak of edge_attribution minus that of a backward pass, in residual streams."""

    def peak(edges: int) -> int:
        command = [sys.executable, __file__, "--peak", str(layers), str(heads), str(edges)]
        # Large blocks that are freed go back at once, so the peak is what was in use.
        env = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"}
        return int(subprocess.run(command, check=True, stdout=subprocess.PIPE, env=env).stdout)

    return (peak(1) - peak(0)) / RESIDUAL


def best(work: Callable[[], Any], rounds: int) -> str:
    """The shortest time of some rounds."""

    def once() -> float:
        begin = time.perf_counter()
        work()
        return time.perf_counter() - begin

    return f"{min(once() for _ in range(rounds)):.2f} s"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--examples", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="a small model, and no memory")
    parser.add_argument("--peak", type=int, nargs=3, help=argparse.SUPPRESS)
    given = parser.parse_args()
    torch.manual_seed(0)
    if given.peak:
        print_peak(*given.peak)
        return
    if given.quick:
        given.examples, given.tokens, given.rounds = 2, 8, 1
    head("Effects of edges", machine(Path(tempfile.gettempdir()), ("torch", "transformers")))
    model = made(2, 4, 64, 50) if given.quick else made(12, 12, 768, 50_257)
    prompts = pairs(given.examples, given.tokens, model.config.vocab_size)
    options = {"batch_size": given.examples}
    graph = edge_attribution(model, prompts, METRIC, confidence=None, **options)
    effects = np.random.default_rng(0).normal(size=(given.examples, len(graph.edges)))

    def forward() -> None:
        with torch.no_grad():
            model(**prompts.clean)

    works: dict[str, Callable[[], Any]] = {
        "forward pass": forward,
        "EAP": lambda: edge_attribution(model, prompts, METRIC, confidence=None, **options),
        "intervals": lambda: bootstrap_interval(effects),
        "circuit of all edges": lambda: run_circuit(model, prompts, METRIC, graph, **options),
    }
    print(f"\n{given.examples} texts of {given.tokens} tokens, {len(graph.edges):,} edges\n")
    print(table(["work", "time"], [[name, best(one, given.rounds)] for name, one in works.items()]))
    if given.quick:
        return
    two, eight, wide = beside(2, 8), beside(8, 8), beside(2, 32)
    print("\nMemory of EAP beside a backward pass, in residual streams:")
    print(f"{(eight - two) / 6:.1f} for each layer, {(wide - two) / 24:.1f} for each head of one")


if __name__ == "__main__":
    main()
