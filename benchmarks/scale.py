"""What captures of large models write, and where disks and networks end; docs/explanation/scale.md.

    python benchmarks/scale.py [--check] [--slow-disk]

It prints the tables of the page. They are computed from the models' published sizes and from
figures that other benchmarks measured. `--check` captures small models of the same architectures,
and compares the bytes with the formulas. `--slow-disk` captures to a disk of 50 MB/s, and compares
the time with the simulation; it needs root, as benchmarks/memory.py does.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from _common import table

# ---- what is given ----------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Model:
    """The sizes of a decoder, as its published configuration has them.

    Attributes:
        key_heads: heads of keys and values.
        head: width of a head.
        mlp: width within the feed-forward blocks; 0: it differs, as of experts.
    """

    name: str
    layers: int
    width: int
    heads: int
    key_heads: int
    head: int
    mlp: int
    vocabulary: int


LLAMA_70B = Model("Llama 3 70B", 80, 8192, 64, 8, 128, 28_672, 128_256)
KIMI_K2 = Model("Kimi K2, 1T", 61, 7168, 64, 64, 128, 0, 163_840)
MODELS = (LLAMA_70B, KIMI_K2)

# Ratios to 16-bit values, and MB of float32 a second on one core: benchmarks/ratio.py.
CODECS = {"none": (1.0, 2232), "zstd, rounded": (1.56, 1328), "archive": (2.86, 1807)}

# Assumed, not measured, in bytes a second.
RATES = {"NVMe disk": 3e9, "100 Gbit/s": 12.5e9, "object store": 1e9}
SPEEDS = {"decoding": 3_000, "prefill": 20_000}  # tokens a second of a node with 8 GPUs
CONTEXT = 4096

# ---- formulas ---------------------------------------------------------------------------------


def of_blocks(m: Model) -> int:
    """Values a token: what each block returns."""
    return m.layers * m.width


def of_parts(m: Model) -> int:
    """What each block, its attention and its MLP return."""
    return 3 * of_blocks(m)


def of_modules(m: Model) -> int:
    """What all modules of a Llama return."""
    queries, keys = m.heads * m.head, m.key_heads * m.head
    attention = queries + 2 * keys + 2 * m.width  # q, k, v; o and the attention itself
    feed_forward = 3 * m.mlp + 2 * m.width  # gate, up, activation; down and the MLP itself
    norms_and_block = 3 * m.width
    # Embedding, last norm and inner model; head and outer model; cosines and sines of positions.
    around = 3 * m.width + 2 * m.vocabulary + 2 * m.head
    return m.layers * (attention + feed_forward + norms_and_block) + around


def of_patterns(m: Model) -> int:
    """The attention of each head to all tokens before, in a text of CONTEXT tokens."""
    return m.layers * m.heads * CONTEXT


CHOICES = {
    "blocks": of_blocks,
    "blocks, attention, MLP": of_parts,
    "every module": of_modules,
    f"attention patterns at {CONTEXT:,}": of_patterns,
}


def choices(m: Model) -> dict[str, int]:
    """The values a token of each choice."""
    return {name: of(m) for name, of in CHOICES.items() if m.mlp or of is not of_modules}


# ---- the tables of the page -------------------------------------------------------------------


def size(value: float) -> str:
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if value < 1000:
            return f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:,.3g} PB"


def of_tokens() -> str:
    """Bytes a token and an hour."""
    rows = []
    for m in MODELS:
        for name, values in choices(m).items():
            token = 2 * values
            hours = [size(token * speed * 3600) for speed in SPEEDS.values()]
            rows.append([m.name, name, size(token), size(token / CODECS["archive"][0]), *hours])
    return table(
        ["model", "what", "a token", "as an archive", *(f"an hour of {one}" for one in SPEEDS)],
        rows,
    )


def of_rates() -> str:
    """The tokens a second that each medium takes."""
    rows = []
    for m in MODELS:
        for name, values in choices(m).items():
            for codec in ("none", "archive"):
                token = 2 * values / CODECS[codec][0]
                rows.append(
                    [m.name, name, codec, *(f"{rate / token:,.0f}" for rate in RATES.values())]
                )
    return table(["model", "what", "codec", *RATES], rows)


def of_cores() -> str:
    """The cores that compress at each speed."""
    rows = []
    for m in MODELS:
        for name, values in choices(m).items():
            for codec, (_, rate) in CODECS.items():
                cores = [f"{4 * values * s / (rate * 1e6):,.1f}" for s in SPEEDS.values()]
                rows.append([m.name, name, codec, *cores])
    return table(["model", "what", "codec", *(f"cores at {one}" for one in SPEEDS)], rows)


def of_reductions() -> str:
    """What keeps a prefill within a medium."""
    rows = []
    for m in MODELS:
        for name, values in choices(m).items():
            wanted = 2 * values / CODECS["archive"][0] * SPEEDS["prefill"]
            rows.append(
                [m.name, name, *(
                    "all" if wanted <= rate else f"1 of {-(-wanted // rate):,.0f}"
                    for rate in RATES.values()
                )]
            )  # fmt: skip
    return table(["model", "what, as archives", *RATES], rows)


TABLES = {"tokens": of_tokens, "rates": of_rates, "cores": of_cores, "reductions": of_reductions}


# ---- the queue --------------------------------------------------------------------------------


def simulate(steps: int, step_s: float, step_bytes: float, rate: float, memory: float) -> float:
    """The seconds of a run whose steps put bytes into a memory that drains at a rate.

    Args:
        steps: their number.
        step_s: seconds of a step without capture.
        step_bytes: bytes that a step puts there, at its end. It waits until there is room.
        rate: bytes a second that leave.
        memory: bytes that find room.
    """
    now, queued = 0.0, 0.0
    for _ in range(steps):
        now += step_s
        queued = max(0.0, queued - rate * step_s)
        if (over := queued + step_bytes - memory) > 0:
            now += over / rate
            queued -= over
        queued += step_bytes
    return now


SLOW_RATE, STEPS, STEP_S, STEP_VALUES, MEMORY_GB = 50e6, 120, 0.05, 1 << 21, 0.1


def run_on_slow_disk(disk: Path, group: Path) -> None:
    """Captures to the disk as a process of the group, and prints the seconds of its steps."""
    import torch
    from llm_instrumentation import InstrumentationConfig, capture_activations
    from torch import nn

    class Slow(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            time.sleep(STEP_S)
            return x.clone()

    model, x = Slow(), torch.randn(STEP_VALUES)
    group.write_text(str(os.getpid()))
    config = InstrumentationConfig.fast_capture().with_memory_limit(MEMORY_GB)
    with torch.no_grad(), capture_activations(model, disk / "a.stream", config=config):
        begin = time.perf_counter()
        for _ in range(STEPS):
            model(x)
        print(time.perf_counter() - begin)


def compare_with_a_slow_disk(folder: Path) -> None:
    """A capture to a slow disk beside the simulation."""
    from memory import slow_disk

    with slow_disk(2 << 30, int(SLOW_RATE), folder) as (disk, group):
        done = subprocess.run(
            [sys.executable, __file__, "--on", disk, group],
            stdout=subprocess.PIPE, text=True, check=True,
        )  # fmt: skip
    simulated = simulate(STEPS, STEP_S, 2 * STEP_VALUES, SLOW_RATE, MEMORY_GB * 1e9)
    rows = [
        ["model alone", f"{STEPS * STEP_S:.1f}"],
        ["simulated", f"{simulated:.1f}"],
        ["measured", f"{float(done.stdout.splitlines()[-1]):.1f}"],
    ]
    print(table(["", "seconds"], rows))


# ---- the formulas beside captures -------------------------------------------------------------


def check(folder: Path) -> None:
    """Captures small models, and compares their bytes with the formulas."""
    import torch
    from llm_instrumentation import InstrumentationConfig, capture_activations
    from transformers import (
        DeepseekV3Config,
        DeepseekV3ForCausalLM,
        LlamaConfig,
        LlamaForCausalLM,
    )

    tokens = 6
    small = Model("Llama", 3, 64, 4, 2, 16, 96, 100)
    llama = LlamaForCausalLM(
        LlamaConfig(
            hidden_size=small.width, num_hidden_layers=small.layers,
            num_attention_heads=small.heads, num_key_value_heads=small.key_heads,
            intermediate_size=small.mlp, vocab_size=small.vocabulary,
        )
    )  # fmt: skip
    experts = Model("DeepSeek V3, as Kimi K2", 3, 64, 4, 4, 16, 0, 100)
    deepseek = DeepseekV3ForCausalLM(
        DeepseekV3Config(
            hidden_size=experts.width, num_hidden_layers=experts.layers, intermediate_size=96,
            num_attention_heads=4, num_key_value_heads=4, vocab_size=experts.vocabulary,
            moe_intermediate_size=32, n_routed_experts=8, num_experts_per_tok=2, n_group=2,
            topk_group=1, first_k_dense_replace=1, q_lora_rank=16, kv_lora_rank=16,
            qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=16,
        )
    )  # fmt: skip
    layer = r"^model\.layers\.\d+"
    patterns: dict[str, Any] = {
        "blocks": re.compile(layer + "$"),
        "blocks, attention, MLP": re.compile(layer + r"(\.self_attn|\.mlp)?$"),
        "every module": (),
    }
    rows = []
    for sizes, model in ((small, llama), (experts, deepseek)):
        for name, values in choices(sizes).items():
            if name not in patterns:
                continue
            config = InstrumentationConfig.fast_capture().with_layers(include=patterns[name])
            path = folder / "small.stream"
            with torch.no_grad(), capture_activations(model.eval(), path, config=config) as found:
                model(torch.arange(tokens)[None])
            predicted, captured = 4 * values * tokens, found.stats().raw_bytes
            rows.append([sizes.name, name, f"{predicted:,}", f"{captured:,}"])
            if predicted != captured:
                raise SystemExit(f"{sizes.name}, {name}: {predicted:,} bytes, not {captured:,}")
    print(table(["model", "what", "bytes of float32 by the formula", "captured"], rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="the formulas beside captures")
    parser.add_argument("--slow-disk", action="store_true", help="the simulation beside a capture")
    parser.add_argument("--on", type=Path, nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.on:
        return run_on_slow_disk(*given.on)
    with tempfile.TemporaryDirectory() as name:
        if given.check:
            return check(Path(name))
        if given.slow_disk:
            return compare_with_a_slow_disk(Path(name))
    for made in TABLES.values():
        print(f"{made()}\n")
    return None


if __name__ == "__main__":
    sys.exit(main())
