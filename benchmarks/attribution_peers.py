"""Compares attribution patching of nodes with that of TransformerLens, on the same weights.

    python benchmarks/attribution_peers.py --peer /path/to/venv/bin/python [--rounds 5] [--quick]

The peer's python is one of a virtual environment of its own, with transformer-lens 4.3 or later.
Without it nothing is measured. The models are GPT-2 decoders: a random one of the size of GPT-2
small, and a small one that is trained first to repeat a random text. Nodes are the token embedding,
each head and each feed-forward block, each at each position.

Each contender runs in processes of its own, and they take turns. A process runs once to warm up.
Then it measures the CPU time of one thread for a run over all pairs, and how far the memory of the
process rises in it. Times and memory are of two processes: for memory, large blocks that are freed
go back to the system at once, so the peak is what was in use. TransformerLens runs one pair at a
time. Ours runs so too, and again in batches of 16.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

CORRECT, WRONG = 5, 9
CONTENDERS = ("TransformerLens", "one pair at a time", "batches of 16")
# glibc gives blocks from this size on back to the system when they are freed.
FREED_AT_ONCE = {"MALLOC_MMAP_THRESHOLD_": "65536"}


def random_model() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(attn_implementation="eager")).eval()


def trained_model(seconds: float) -> Any:
    """A decoder that has learned to repeat the first half of a text."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=64, n_positions=64, n_embd=128, n_layer=4, n_head=8, resid_pdrop=0.0,
        embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
        attn_implementation="eager",
    )  # fmt: skip
    model = GPT2LMHeadModel(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    begin, loss = time.perf_counter(), torch.tensor(0.0)
    while time.perf_counter() - begin < seconds:
        half = torch.randint(1, 64, (64, 12))
        ids = torch.cat([half, half], 1)
        logits = model(ids).logits[:, 11:-1]
        loss = torch.nn.functional.cross_entropy(logits.reshape(-1, 64), ids[:, 12:].reshape(-1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"trained for {seconds:.0f} s: loss {loss.item():.3f}", flush=True)
    return model.eval()


def pairs(vocabulary: int, count: int, half: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Repeated texts that go on with one token, and the same with another one."""
    generator = torch.Generator().manual_seed(1)
    first = torch.randint(10, vocabulary, (count, half), generator=generator)
    first[:, -2] = CORRECT
    other = first.clone()
    other[:, -2] = WRONG
    last = half - 2
    return torch.cat([first, first[:, :last]], 1), torch.cat([other, first[:, :last]], 1)


# ---- in the process of a contender ----------------------------------------------------------


def ours(model: Any, clean: torch.Tensor, corrupted: torch.Tensor, batch: int) -> list[float]:
    from llm_instrumentation.interventions import (
        Metric,
        Prompts,
        Site,
        attribution_patching,
        sites_of,
    )  # fmt: skip

    places = range(clean.shape[1])
    sites = [Site("transformer.wte", positions=place) for place in places]
    sites += sites_of(model, "heads", positions=places)
    sites += sites_of(model, "mlp", positions=places)
    difference = Metric("difference", lambda x, _: x[:, -1, CORRECT] - x[:, -1, WRONG])
    found = attribution_patching(
        model, Prompts(clean, corrupted), difference, sites, batch_size=batch, progress=False
    )
    return found.mean.tolist()


def theirs(bridge: Any, clean: torch.Tensor, corrupted: torch.Tensor) -> list[float]:
    from transformer_lens.tools.analysis.attribution_patching import attribution_patch

    found = attribution_patch(
        bridge, clean, corrupted, lambda x: x[0, -1, CORRECT] - x[0, -1, WRONG]
    ).node_scores

    def order(node: Any) -> tuple[int, int, int, int]:
        kind = ("embed", "attn_head_out", "mlp_out").index(node.kind)
        return kind, node.layer or 0, node.head or 0, node.position

    return [found[node] for node in sorted(found, key=order)]


def bridge_of(model: Any, folder: Path) -> Any:
    import tokenizers
    from transformer_lens.model_bridge import TransformerBridge
    from transformers import PreTrainedTokenizerFast

    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"?": 0}, unk_token="?"))
    made = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="?", bos_token="?")
    made.save_pretrained(folder)  # the bridge reads its tokenizer again from there
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    bridge = TransformerBridge.boot_transformers(
        "gpt2", hf_model=model, tokenizer=tokenizer, device="cpu"
    )
    return bridge.eval()


def resident(field: str) -> int:
    """A number of /proc/self/status, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) << 10
    raise LookupError(field)


def contender(name: str, folder: Path) -> dict[str, Any]:
    from transformers import GPT2LMHeadModel

    torch.set_num_threads(1)
    model = GPT2LMHeadModel.from_pretrained(folder, attn_implementation="eager").eval()
    clean, corrupted = torch.load(folder / "pairs.pt")
    if name == CONTENDERS[0]:
        bridge = bridge_of(model, folder)

        def run(count: int) -> list[float]:
            return theirs(bridge, clean[:count], corrupted[:count])
    else:
        batch = 1 if name == CONTENDERS[1] else 16

        def run(count: int) -> list[float]:
            return ours(model, clean[:count], corrupted[:count], batch)

    run(1 if name != CONTENDERS[2] else len(clean))
    Path("/proc/self/clear_refs").write_text("5")  # the highest memory so far counts from here
    before, begin = resident("VmRSS"), time.process_time()
    scores = run(len(clean))
    seconds = time.process_time() - begin
    return {"scores": scores, "seconds": seconds, "bytes": resident("VmHWM") - before}


# ---- all together ---------------------------------------------------------------------------


def measured(python: str, name: str, folder: str, environment: dict[str, str]) -> dict[str, Any]:
    """What a process of a contender tells."""
    done = subprocess.run(
        [python, __file__, "--contender", name, "--folder", folder],
        capture_output=True, text=True, check=False, env={**os.environ, **environment},
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"{name} failed:\n{done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def compare(title: str, model: Any, half: int, count: int, peer: str, rounds: int) -> None:
    from scipy.stats import spearmanr

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model.save_pretrained(folder)
        torch.save(pairs(model.config.vocab_size, count, half), folder / "pairs.pt")
        found: dict[str, list[dict[str, Any]]] = {one: [] for one in CONTENDERS}
        for _ in range(rounds):
            for one in CONTENDERS:
                python = peer if one == CONTENDERS[0] else sys.executable
                timed = measured(python, one, name, {})
                found[one].append(
                    {**timed, "bytes": measured(python, one, name, FREED_AT_ONCE)["bytes"]}
                )
    first = found[CONTENDERS[0]]
    nodes = len(first[0]["scores"])
    print(f"\n{title}: {nodes:,} nodes, {count} pairs, medians of {rounds} rounds\n")
    print("| | Spearman | s | time | MB | memory |\n| --- | --- | --- | --- | --- | --- |")
    for one, runs in found.items():
        seconds, size = (statistics.median(r[what] for r in runs) for what in ("seconds", "bytes"))
        rank = spearmanr(first[0]["scores"], runs[0]["scores"]).statistic
        times = statistics.median(
            a["seconds"] / b["seconds"] for a, b in zip(runs, first, strict=True)
        )
        sizes = statistics.median(a["bytes"] / b["bytes"] for a, b in zip(runs, first, strict=True))
        print(
            f"| {one} | {rank:.6f} | {seconds:.2f} | {times:.2f} x | {size / 1e6:.0f} | "
            f"{sizes:.2f} x |",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--peer", help="the python with transformer-lens")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="a small model, one round")
    parser.add_argument("--contender", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.contender:
        print(json.dumps(contender(chosen.contender, chosen.folder)))
        return
    if not chosen.peer:
        print("skipped: give --peer, the python of an environment with transformer-lens")
        return
    rounds = 1 if chosen.quick else chosen.rounds
    compare(
        "A decoder that repeats a text", trained_model(5 if chosen.quick else 60), 12, 16,
        chosen.peer, rounds,
    )  # fmt: skip
    if not chosen.quick:
        compare(
            "Random weights, the size of GPT-2 small", random_model(), 12, 16, chosen.peer, rounds
        )


if __name__ == "__main__":
    main()
