"""Compares interventions with those of TransformerLens and nnsight, on the same weights.

    python benchmarks/intervention_peers.py --peers /path/to/venv/bin/python [--rounds 5] [--quick]

The peers' python is one of a virtual environment of its own, with transformer-lens 4.3 or later and
nnsight 0.8 or later. Without it nothing is measured. The models are GPT-2 decoders: a random one of
the size of GPT-2 small, and a small one that is trained first to repeat a random text. The tasks
are attribution patching of the token embedding, each head and each feed-forward block, at each
position; activation patching of the residual stream behind each block, at each position, and of
each head; and what heads and feed-forward blocks add to a logit directly, at the last token.

Each contender runs in processes of its own, and they take turns. A process runs once to warm up.
Then it measures the CPU time of one thread for a run over all pairs, and how far the memory of the
process rises in it. Times and memory are of two processes: for memory, large blocks that are freed
go back to the system at once, so the peak is what was in use. TransformerLens has attribution
patching for one pair at a time alone. nnsight has no calls of its own for these tasks, but the
terms to write them: patching is written as its documentation does it.
"""

from __future__ import annotations

import argparse
import functools
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
from _common import resident

Scores = list[float]

CORRECT, WRONG = 5, 9
BATCH = 16
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


# ---- this package ---------------------------------------------------------------------------


def difference(logits: torch.Tensor, _: Any = None) -> torch.Tensor:
    return logits[:, -1, CORRECT] - logits[:, -1, WRONG]


def measured_by(method: Any, sites: Any, model: Any, clean: Any, corrupted: Any, n: int) -> Scores:
    from llm_instrumentation.interventions import Metric, Prompts

    metric, prompts = Metric("difference", difference), Prompts(clean, corrupted)
    found = method(model, prompts, metric, sites, batch_size=n, progress=False)
    scores: Scores = found.mean.tolist()
    return scores


def our_nodes(model: Any, clean: torch.Tensor, corrupted: torch.Tensor, batch: int) -> Scores:
    from llm_instrumentation.interventions import Site, attribution_patching, sites_of

    places = range(clean.shape[1])
    sites = [Site("transformer.wte", positions=place) for place in places]
    sites += sites_of(model, "heads", positions=places)
    sites += sites_of(model, "mlp", positions=places)
    return measured_by(attribution_patching, sites, model, clean, corrupted, batch)


def our_residual(model: Any, clean: torch.Tensor, corrupted: torch.Tensor, batch: int) -> Scores:
    from llm_instrumentation.interventions import activation_patching, sites_of

    sites = sites_of(model, "layers", positions=range(clean.shape[1]))
    return measured_by(activation_patching, sites, model, clean, corrupted, batch)


def our_heads(model: Any, clean: torch.Tensor, corrupted: torch.Tensor, batch: int) -> Scores:
    from llm_instrumentation.interventions import activation_patching, sites_of

    return measured_by(
        activation_patching, sites_of(model, "heads"), model, clean, corrupted, batch
    )


@torch.no_grad()
def our_logits(model: Any, clean: torch.Tensor, _: torch.Tensor, batch: int) -> Scores:
    """Mean over the pairs of what each head and each feed-forward block adds at the last token."""
    from llm_instrumentation import InstrumentationConfig, capture_activations
    from llm_instrumentation.interventions.logit_attribution import (
        attribution_layers,
        direct_logit_attributions,
    )

    layers = attribution_layers(model)
    config = InstrumentationConfig.balanced().with_layers(layers).with_inputs()
    config = config.with_float32().with_last_position()
    with tempfile.TemporaryDirectory() as folder:
        stream = Path(folder, "run.stream")
        with capture_activations(model, stream, config=config):
            for some in clean.split(batch):
                model(some)
        found = direct_logit_attributions(stream, model, CORRECT, WRONG)
    total = sum(one.values[:, -1] for one in found)
    wanted = [f"a{n}.h{h}" for n in range(model.config.n_layer) for h in range(model.config.n_head)]
    wanted += [f"m{n}" for n in range(model.config.n_layer)]
    return [float(total[found[0].parts.index(name)]) / len(clean) for name in wanted]


# ---- TransformerLens ------------------------------------------------------------------------


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


def lens_nodes(bridge: Any, clean: torch.Tensor, corrupted: torch.Tensor, _: int) -> Scores:
    from transformer_lens.tools.analysis.attribution_patching import attribution_patch

    found = attribution_patch(bridge, clean, corrupted, lambda x: difference(x)[0]).node_scores

    def order(node: Any) -> tuple[int, int, int, int]:
        kind = ("embed", "attn_head_out", "mlp_out").index(node.kind)
        return kind, node.layer or 0, node.head or 0, node.position

    return [found[node] for node in sorted(found, key=order)]


@torch.no_grad()
def lens_patching(bridge: Any, clean: Any, corrupted: Any, batch: int, kind: str) -> Scores:
    from transformer_lens import patching

    total: Any = 0
    for some, others in zip(clean.split(batch), corrupted.split(batch), strict=True):
        _, cache = bridge.run_with_cache(some)
        base = difference(bridge(others)).sum()
        if kind == "residual":
            found = patching.generic_activation_patch(
                bridge, others, cache, lambda x: difference(x).sum(),
                patching.layer_pos_patch_setter, "resid_post", index_axis_names=("layer", "pos"),
            )  # fmt: skip
        else:
            found = patching.get_act_patch_attn_head_out_all_pos(
                bridge, others, cache, lambda x: difference(x).sum()
            )
        total = total + (found - base)
    scores: Scores = (total / len(clean)).flatten().tolist()
    return scores


@torch.no_grad()
def lens_logits(bridge: Any, clean: torch.Tensor, _: torch.Tensor, batch: int) -> Scores:
    total: Any = 0
    for some in clean.split(batch):
        _, cache = bridge.run_with_cache(some)
        heads = cache.stack_head_results(layer=-1, pos_slice=-1)
        blocks = torch.stack(
            [cache[f"blocks.{n}.hook_mlp_out"][:, -1] for n in range(bridge.cfg.n_layers)]
        )
        found = cache.logit_attrs(
            torch.cat([heads, blocks]), CORRECT, incorrect_tokens=WRONG, pos_slice=-1
        )
        total = total + found.sum(1)
    scores: Scores = (total / len(clean)).tolist()
    return scores


# ---- nnsight --------------------------------------------------------------------------------


@torch.no_grad()
def sight_patching(wrapped: Any, clean: Any, corrupted: Any, batch: int, kind: str) -> Scores:
    import nnsight

    blocks = wrapped.transformer.h
    heads = wrapped.config.n_head
    size = wrapped.config.n_embd // heads
    places = range(clean.shape[1]) if kind == "residual" else range(heads)
    total = torch.zeros(len(blocks), len(places))
    for some, others in zip(clean.split(batch), corrupted.split(batch), strict=True):
        with wrapped.trace(some):
            if kind == "residual":
                kept = nnsight.save([block.output for block in blocks])
            else:
                kept = nnsight.save([block.attn.c_proj.input for block in blocks])
        with wrapped.trace(others):
            logits = wrapped.lm_head.output.save()
        base = difference(logits).sum()
        for layer, block in enumerate(blocks):
            for place in places:
                with wrapped.trace(others):
                    if kind == "residual":
                        block.output[:, place] = kept[layer][:, place]
                    else:
                        part = slice(place * size, (place + 1) * size)
                        block.attn.c_proj.input[:, :, part] = kept[layer][:, :, part]
                    logits = wrapped.lm_head.output.save()
                total[layer, place] += difference(logits).sum() - base
    scores: Scores = (total / len(clean)).flatten().tolist()
    return scores


def wrapped_in_nnsight(model: Any) -> Any:
    from nnsight import NNsight

    return NNsight(model)


# ---- in the process of a contender ----------------------------------------------------------

OURS = "this package"
# Each task: a function for each contender that has it, and the pairs that run together.
TASKS: dict[str, dict[str, tuple[Any, int]]] = {
    "attribution patching of nodes": {
        "TransformerLens": (lens_nodes, 1),
        f"{OURS}, one pair at a time": (our_nodes, 1),
        OURS: (our_nodes, BATCH),
    },
    "activation patching of the residual stream": {
        "TransformerLens": (functools.partial(lens_patching, kind="residual"), BATCH),
        "nnsight": (functools.partial(sight_patching, kind="residual"), BATCH),
        OURS: (our_residual, BATCH),
    },
    "activation patching of heads": {
        "TransformerLens": (functools.partial(lens_patching, kind="heads"), BATCH),
        "nnsight": (functools.partial(sight_patching, kind="heads"), BATCH),
        OURS: (our_heads, BATCH),
    },
    "direct logit attribution": {
        "TransformerLens": (lens_logits, BATCH),
        OURS: (our_logits, BATCH),
    },
}


def contender(task: str, name: str, folder: Path) -> dict[str, Any]:
    from transformers import GPT2LMHeadModel

    torch.set_num_threads(1)
    model: Any = GPT2LMHeadModel.from_pretrained(folder, attn_implementation="eager").eval()
    clean, corrupted = torch.load(folder / "pairs.pt")
    function, batch = TASKS[task][name]
    if name == "TransformerLens":
        model = bridge_of(model, folder)
        if task == "direct logit attribution":
            # The scale of the last norm goes into the weights. What a value's bias adds stays with
            # its head.
            model.enable_compatibility_mode(fold_value_biases=False)
    elif name == "nnsight":
        model = wrapped_in_nnsight(model)
    function(model, clean[:batch], corrupted[:batch], batch)
    Path("/proc/self/clear_refs").write_text("5")  # the highest memory so far counts from here
    before, begin = resident("VmRSS"), time.process_time()
    scores = function(model, clean, corrupted, batch)
    seconds = time.process_time() - begin
    return {"scores": scores, "seconds": seconds, "bytes": resident("VmHWM") - before}


# ---- all together ---------------------------------------------------------------------------


def measured(python: str, task: str, name: str, folder: str, more: dict[str, str]) -> Any:
    """What a process of a contender tells."""
    command = [python, __file__, "--task", task, "--contender", name, "--folder", folder]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, **more}
    )
    if done.returncode:
        raise SystemExit(f"{name}, {task} failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def compare(task: str, folder: str, peers: str, rounds: int) -> None:
    contenders = TASKS[task]
    found: dict[str, list[dict[str, Any]]] = {one: [] for one in contenders}
    for _ in range(rounds):
        for one in contenders:
            python = sys.executable if one.startswith(OURS) else peers
            timed = measured(python, task, one, folder, {})
            used = measured(python, task, one, folder, FREED_AT_ONCE)["bytes"]
            found[one].append({**timed, "bytes": used})
    first = found["TransformerLens"]
    expected = torch.tensor(first[0]["scores"], dtype=torch.float64)
    print(f"\n{task}, {len(expected):,} numbers\n")
    print("| | differs by | CPU s | time | MB |\n| --- | --- | --- | --- | --- |")
    for one, runs in found.items():
        scores = torch.tensor(runs[0]["scores"], dtype=torch.float64)
        error = float((scores - expected).abs().max() / expected.abs().max())
        seconds, size = (statistics.median(r[what] for r in runs) for what in ("seconds", "bytes"))
        times = [a["seconds"] / b["seconds"] for a, b in zip(runs, first, strict=True)]
        print(
            f"| {one} | {error:.0e} | {seconds:.2f} | {statistics.median(times):.2f} x "
            f"({min(times):.2f} to {max(times):.2f}) | {size / 1e6:.0f} |",
            flush=True,
        )


def compare_all(title: str, model: Any, half: int, peers: str, rounds: int) -> None:
    print(f"\n## {title}: {BATCH} pairs, medians of {rounds} rounds", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        torch.save(pairs(model.config.vocab_size, BATCH, half), Path(folder, "pairs.pt"))
        for task in TASKS:
            compare(task, folder, peers, rounds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--peers", help="the python with transformer-lens and nnsight")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="the small model, one round")
    parser.add_argument("--task", help=argparse.SUPPRESS)
    parser.add_argument("--contender", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.contender:
        print(json.dumps(contender(chosen.task, chosen.contender, chosen.folder)))
        return
    if not chosen.peers:
        print("skipped: give --peers, a python with transformer-lens and nnsight")
        return
    rounds = 1 if chosen.quick else chosen.rounds
    small = trained_model(5 if chosen.quick else 60)
    compare_all("A decoder that repeats a text", small, 12, chosen.peers, rounds)
    if not chosen.quick:
        large = random_model()
        compare_all("Random weights, the size of GPT-2 small", large, 12, chosen.peers, rounds)


if __name__ == "__main__":
    main()
