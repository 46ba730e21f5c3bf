"""Compares the three ways past a norm behind heads, see `PostNorms`, with exact effects of edges.

Models of two layers, of Gemma 2 and OLMo 2: with random weights, and trained to repeat the second
token of a text. The error is that of the estimated effects of the edges from heads, as a share of
the size of the exact effects. The last column is the note "post-norm errors" of the graph.

    python benchmarks/post_norms.py
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any, get_args

import torch
from _common import head, machine, table
from llm_instrumentation.interventions import edge_attribution, edge_patching
from llm_instrumentation.interventions.decoders import PostNorms
from llm_instrumentation.interventions.metrics import logit_difference
from llm_instrumentation.interventions.prompts import Prompts
from transformers import AutoConfig, AutoModelForCausalLM

VOCABULARY, TOKENS = 16, 6
FIELDS = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": VOCABULARY, "bos_token_id": None,
    "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip


def made(kind: str, rounds: int) -> Any:
    """A model after some rounds of training; without any its random weights are made larger."""
    torch.manual_seed(0)
    own = {"query_pre_attn_scalar": 16} if kind == "gemma2" else {}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **FIELDS, **own))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(rounds):
        ids = torch.randint(VOCABULARY, (64, TOKENS))
        loss = torch.nn.functional.cross_entropy(model(ids).logits[:, -1], ids[:, 1])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    if not rounds:
        with torch.no_grad():
            for weight in model.parameters():
                weight.add_(0.15 * torch.randn_like(weight))
    return model.eval()


def pairs() -> Prompts:
    torch.manual_seed(1)
    clean = torch.randint(VOCABULARY, (16, TOKENS))
    corrupted = clean.clone()
    corrupted[:, 1] = (clean[:, 1] + 5) % VOCABULARY
    return Prompts(clean, corrupted, labels={"correct": clean[:, 1], "wrong": corrupted[:, 1]})


def main() -> None:
    head(
        "Effects of edges from heads behind a norm",
        machine(Path(tempfile.gettempdir()), ("torch", "transformers")),
    )
    rows = []
    prompts, metric = pairs(), logit_difference()
    for kind in ("gemma2", "olmo2"):
        for rounds in (0, 250):
            model = made(kind, rounds)
            exact = edge_patching(model, prompts, metric, confidence=None, batch_size=128)
            of_heads = [edge.source[0] == "a" for edge in exact.edges]
            truth = torch.tensor([edge.effect for edge in exact.edges])[of_heads]
            for steps in (None, 5):
                for choice in get_args(PostNorms):
                    found = edge_attribution(
                        model, prompts, metric, steps=steps, post_norms=choice, confidence=None
                    )
                    values = torch.tensor([edge.effect for edge in found.edges])[of_heads]
                    error = float((values - truth).norm() / truth.norm())
                    together = float(torch.corrcoef(torch.stack([values, truth]))[0, 1])
                    noted = found.notes.get("post-norm errors", {})
                    rows.append(
                        [
                            f"{kind}, {'trained' if rounds else 'random'}",
                            "EAP" if steps is None else "EAP-IG", choice, f"{error:.2f}",
                            f"{together:.3f}", ", ".join(f"{one:.2f}" for one in noted.values()),
                        ]
                    )  # fmt: skip
    print(table(["model", "method", "post_norms", "error", "correlation", "norm errors"], rows))


if __name__ == "__main__":
    main()
