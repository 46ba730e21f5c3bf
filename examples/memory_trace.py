"""Traces how a Llama reads and writes its memory: weights, KV cache and activations.

    python examples/memory_trace.py [--output-dir captures]

Install it with `pip install '.[mrm]'`. It needs no network, no root and no hardware counters: the
tracer watches PyTorch's operators, and the model has random weights.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from llm_instrumentation.mrm import TorchTracer, compute_all, compute_distributions
from transformers import LlamaConfig, LlamaForCausalLM

NEW_TOKENS = 16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--output-dir", type=Path, default=Path("captures"))
    out = parser.parse_args().output_dir
    out.mkdir(parents=True, exist_ok=True)
    trace = out / "trace.parquet"

    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=512, hidden_size=128, intermediate_size=256, num_hidden_layers=4,
            num_attention_heads=4, bos_token_id=None, eos_token_id=None, pad_token_id=0,
        )
    ).eval()  # fmt: skip
    prompt = torch.randint(1, 512, (1, 32))
    with TorchTracer(trace) as tracer, tracer.attach(model):
        model.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=NEW_TOKENS,
            do_sample=False,
        )  # fmt: skip

    moved = compute_distributions(trace)["bandwidth_over_time"]
    moved = moved.groupby("region_type")[["read_bytes", "written_bytes"]].sum() / 2**20
    kept = compute_all(trace)["retention_summary"].set_index("region_type")["retention_p50_s"]
    print("              MiB read  MiB written  ms kept, median")
    for kind in ("weight", "kv_cache", "activation"):
        read, written = moved.loc[kind]
        print(f"{kind:12} {read:9.1f} {written:12.1f} {kept[kind] * 1e3:16.2f}")
    weights = sum(values.nbytes for values in model.parameters()) / 2**20
    print(
        f"{NEW_TOKENS} tokens read {moved.read_bytes['weight'] / weights:.1f} times the "
        f"{weights:.1f} MiB of weights, and write none"
    )
    print(f"{trace} has every row")


if __name__ == "__main__":
    main()
