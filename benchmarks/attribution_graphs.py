"""Time and memory of attribution graphs, by the number of features that are kept.

A GPT-2 with random weights, and random transcoders of eight times its width, of which some hundred
features are active at each token.

    python benchmarks/attribution_graphs.py
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from _common import head, machine, resident, table
from llm_instrumentation.interventions.features import attribution_graph
from transformers import GPT2Config, GPT2LMHeadModel

TOKENS, VOCABULARY = 16, 5_000


def made(layers: int, width: int) -> tuple[Any, dict[str, Any]]:
    """A model and its transcoders, by the names of the MLPs."""
    from sae_lens import Transcoder, TranscoderConfig

    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=layers, n_embd=width, n_head=width // 64, vocab_size=VOCABULARY,
        bos_token_id=0, eos_token_id=0, attn_implementation="eager",
    )  # fmt: skip
    transcoders = {}
    for layer in range(layers):
        one = Transcoder(
            TranscoderConfig(d_in=width, d_out=width, d_sae=8 * width, apply_b_dec_to_input=False)
        )
        with torch.no_grad():
            one.W_enc.normal_(std=0.3 * width**-0.5)
            one.W_dec.normal_(std=0.3 / width)
            one.b_enc.fill_(-0.72)
            one.b_dec.normal_(std=0.3)
        transcoders[f"transformer.h.{layer}.mlp"] = one.eval()
    return GPT2LMHeadModel(config).eval(), transcoders


def measured(function: Callable[[], Any]) -> tuple[Any, float, int]:
    """What a function returns, its CPU seconds, and by how much memory grew at most."""
    Path("/proc/self/clear_refs").write_text("5")  # the highest memory so far counts from here
    before, begin = resident("VmRSS"), time.process_time()
    found = function()
    return found, time.process_time() - begin, resident("VmHWM") - before


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a small model")
    quick = parser.parse_args().quick
    torch.set_num_threads(1)
    model, transcoders = made(*((2, 128) if quick else (12, 768)))
    ids = torch.randint(VOCABULARY, (1, TOKENS))
    head(
        f"Attribution graphs of {TOKENS} tokens",
        machine(Path(tempfile.gettempdir()), ("torch", "transformers", "sae-lens")),
    )
    attribution_graph(model, ids, transcoders, max_features=10)  # what the first run alone takes
    rows = []
    for most in (100, 1_000, None):
        graph, seconds, size = measured(
            lambda most=most: attribution_graph(model, ids, transcoders, max_features=most)
        )
        circuit, pruned_in, pruned_with = measured(graph.pruned)
        rows.append(
            (
                "all" if most is None else f"{most:,}", f"{len(graph.features):,}",
                f"{graph.edges.nbytes / 1e6:,.0f}", f"{seconds:.1f}", f"{size / 1e6:,.0f}",
                f"{len(circuit.edges):,}", f"{pruned_in:.2f}", f"{pruned_with / 1e6:,.0f}",
            )
        )  # fmt: skip
    columns = [
        "max_features", "features", "edges, MB", "CPU s", "memory, MB", "edges left", "pruning, s",
        "memory, MB",
    ]  # fmt: skip
    print(table(columns, rows))


if __name__ == "__main__":
    main()
