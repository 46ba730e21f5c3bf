"""Exact effects of edges at positions, on architectures of transformers, beside plain hooks."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from llm_instrumentation.interventions.circuits import run_circuit
from llm_instrumentation.interventions.edges import edge_attribution, edge_patching
from llm_instrumentation.interventions.metrics import Metric
from llm_instrumentation.interventions.prompts import Prompts
from torch import Tensor, nn

WIDTH, VOCABULARY, HEADS, HEAD = 32, 50, 4, 8
LLAMA = {
    "hidden_size": WIDTH, "intermediate_size": 48, "vocab_size": VOCABULARY, "num_hidden_layers": 2,
    "num_attention_heads": HEADS, "num_key_value_heads": 2, "head_dim": HEAD, "bos_token_id": None,
    "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
EXPERTS = {**LLAMA, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
NEOX = {
    "hidden_size": WIDTH, "intermediate_size": 48, "vocab_size": VOCABULARY,
    "num_hidden_layers": 2, "num_attention_heads": HEADS, "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip


class Names(NamedTuple):
    """The modules of a decoder, written down once more."""

    layers: str = "model.layers"
    first: str = "input_layernorm"
    second: str = "post_attention_layernorm"
    last: str = "model.norm"
    out: str = "self_attn.o_proj"
    mlp: str = "mlp"
    fused: str = ""


GPT2 = Names(
    "transformer.h", "ln_1", "ln_2", "transformer.ln_f", "attn.c_proj", fused="attn.c_attn"
)
OPT = Names(
    "model.decoder.layers", "self_attn_layer_norm", "final_layer_norm",
    "model.decoder.final_layer_norm", "self_attn.out_proj", "fc2",
)  # fmt: skip
NEOX_NAMES = Names(
    "gpt_neox.layers", last="gpt_neox.final_layer_norm", out="attention.dense",
    fused="attention.query_key_value",
)  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Any], Names]] = {
    "gpt2": (
        "gpt2",
        {"n_layer": 2, "n_head": HEADS, "n_embd": WIDTH, "vocab_size": VOCABULARY,
         "bos_token_id": 0, "eos_token_id": 0},
        GPT2,
    ),
    "gpt_neox": ("gpt_neox", {**NEOX, "use_parallel_residual": False}, NEOX_NAMES),
    "gpt_neox, parallel": ("gpt_neox", NEOX, NEOX_NAMES),
    "opt": (
        "opt",
        {"hidden_size": WIDTH, "ffn_dim": 48, "vocab_size": VOCABULARY, "num_hidden_layers": 2,
         "num_attention_heads": HEADS, "word_embed_proj_dim": WIDTH},
        OPT,
    ),
    "gemma": ("gemma", {**LLAMA, "num_key_value_heads": 1, "pad_token_id": 0}, Names()),
    "mixtral": ("mixtral", {**LLAMA, "num_local_experts": 4}, Names()),
    "qwen2_moe": ("qwen2_moe", {**EXPERTS, "shared_expert_intermediate_size": 16}, Names()),
    "qwen3_moe": ("qwen3_moe", EXPERTS, Names()),
    **{kind: (kind, LLAMA, Names()) for kind in ("llama", "mistral", "olmo", "qwen2", "qwen3")},
}  # fmt: skip


def made(name: str) -> nn.Module:
    torch.manual_seed(0)
    kind, fields, _ = MODELS[name]
    config = transformers.AutoConfig.for_model(kind, **fields)
    config._experts_implementation = "eager"  # the others have no float64
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():  # weights of this size make effects that are well above rounding
        for weight in model.parameters():
            weight.add_(0.15 * torch.randn_like(weight))
    found: nn.Module = model.double()
    return found


def pairs(left: bool = False) -> Prompts:
    """Texts of six tokens that differ in two of them; with two columns of padding on the left."""
    torch.manual_seed(1)
    clean = torch.randint(3, VOCABULARY, (2, 6))
    corrupted = clean.clone()
    corrupted[:, 1:3] = (clean[:, 1:3] + 7) % (VOCABULARY - 3) + 3
    if not left:
        return Prompts(clean, corrupted)
    mask = torch.ones(2, 8).long()
    mask[:, :2] = 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    clean, corrupted = (nn.functional.pad(ids, (2, 0)) for ids in (clean, corrupted))
    return Prompts(
        *({"input_ids": one, "attention_mask": mask, "position_ids": positions}
          for one in (clean, corrupted))
    )  # fmt: skip


def of_four(logits: Tensor, batch: Prompts) -> Tensor:
    """The logit of 5 minus that of 6 at the last four tokens, each with another weight."""
    weights = torch.tensor([0.5, -1.0, 2.0, 1.0], dtype=logits.dtype)
    return (logits[:, -4:, 5] - logits[:, -4:, 6]) @ weights


METRIC = Metric("logit of 5 minus that of 6", of_four)


# ---- plain hooks ----------------------------------------------------------------------------


Change = Callable[[Tensor], Tensor]


@contextlib.contextmanager
def hooked(model: nn.Module, *changes: tuple[str, str, Change]) -> Iterator[None]:
    """Changes the first input or the output of modules."""
    handles = []
    for name, side, change in changes:
        module = model.get_submodule(name)
        if side == "in":
            handles.append(
                module.register_forward_pre_hook(
                    lambda _, args, change=change: (change(args[0]), *args[1:])
                )
            )
        else:

            def after(_: Any, args: Any, output: Any, change: Change = change) -> Any:
                if isinstance(output, tuple):
                    return (change(output[0]), *output[1:])
                return change(output)

            handles.append(module.register_forward_hook(after))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class Plain:
    """Effects of single edges by runs with plain hooks, which share no code with ours."""

    def __init__(self, name: str, model: nn.Module, prompts: Prompts) -> None:
        self.names = MODELS[name][2]
        self.model = model
        self.prompts = prompts
        self.heads = HEADS
        self.shared = HEADS // MODELS[name][1].get("num_key_value_heads", HEADS)

    def run(self, inputs: Any, *changes: tuple[str, str, Change]) -> Tensor:
        with torch.no_grad(), hooked(self.model, *changes):
            return METRIC(self.model(**inputs), self.prompts)

    def seen(self, inputs: Any, name: str, side: str, *changes: tuple[str, str, Change]) -> Tensor:
        """What a module receives or returns in a run."""
        found: list[Tensor] = []

        def keep(value: Tensor) -> Tensor:
            found.append(value.clone())
            return value

        self.run(inputs, *changes, (name, side, keep))
        batch, tokens = next(iter(inputs.values())).shape
        return found[0].reshape(batch, tokens, -1)

    def of_layer(self, layer: int, part: str) -> str:
        return f"{self.names.layers}.{layer}.{part}"

    def columns(self, head: int, kind: str) -> tuple[str, slice]:
        """The projection of a head's input, and the columns of it."""
        if self.names is GPT2:
            first = "qkv".index(kind) * WIDTH + head * HEAD
            return self.names.fused, slice(first, first + HEAD)
        if self.names.fused:
            first = (3 * head + "qkv".index(kind)) * HEAD
            return self.names.fused, slice(first, first + HEAD)
        own = head if kind == "q" else head // self.shared
        return f"self_attn.{kind}_proj", slice(own * HEAD, (own + 1) * HEAD)

    def write(self, inputs: Any, source: str) -> Tensor:
        """What a node adds to the residual stream."""
        if source == "input":
            return self.seen(inputs, self.of_layer(0, self.names.first), "in")
        layer = int(source[1])
        if source[0] == "m":
            return self.seen(inputs, self.of_layer(layer, self.names.mlp), "out")
        out = self.model.get_submodule(self.of_layer(layer, self.names.out))
        results = self.seen(inputs, self.of_layer(layer, self.names.out), "in")
        alone = torch.zeros_like(results)
        part = slice(int(source[4:]) * HEAD, (int(source[4:]) + 1) * HEAD)
        alone[..., part] = results[..., part]
        with torch.no_grad():
            return out(alone) - out(torch.zeros_like(alone))

    def effect(self, source: str, s: int, target: str, kind: str, t: int) -> Tensor:
        """The effect of source@s -> target@t<kind> on each example."""
        base = self.prompts.clean
        change = self.write(self.prompts.corrupted, source) - self.write(base, source)

        def add(residual: Tensor) -> Tensor:
            new = residual.clone().reshape(change.shape)
            new[:, s] += change[:, s]
            return new.reshape(residual.shape)

        clean = self.run(base)
        if target == "logits":
            return self.run(base, (self.names.last, "in", add)) - clean
        layer = int(target[1])
        if target[0] == "m":
            norm, mlp = (
                self.of_layer(layer, self.names.second),
                self.of_layer(layer, self.names.mlp),
            )
            new = self.seen(base, mlp, "out", (norm, "in", add))
            return self.run(base, (mlp, "out", self.put(new, t, slice(None)))) - clean
        head = int(target[4:])
        norm, out = self.of_layer(layer, self.names.first), self.of_layer(layer, self.names.out)
        part, columns = self.columns(head, kind)
        projection = self.of_layer(layer, part)
        # One run for the projection, one for what the head makes of it, one for the rest.
        projected = self.seen(base, projection, "out", (norm, "in", add))
        place = (projection, "out", self.put(projected, s, columns))
        results = self.seen(base, out, "in", place)
        own = slice(head * HEAD, (head + 1) * HEAD)
        return self.run(base, (out, "in", self.put(results, t, own))) - clean

    @staticmethod
    def put(new: Tensor, position: int, columns: slice) -> Change:
        def change(value: Tensor) -> Tensor:
            changed = value.clone().reshape(*new.shape[:2], -1)
            changed[:, position, columns] = new[:, position, columns]
            return changed.reshape(value.shape)

        return change


EDGES = [
    ("input", 1, "a0.h1", "k", 4), ("input", 2, "a0.h3", "v", 5), ("a0.h1", 2, "a1.h2", "k", 5),
    ("a0.h1", 2, "a1.h2", "v", 3), ("m0", 2, "a1.h1", "v", 5), ("a0.h2", 5, "a1.h3", "q", 5),
    ("input", 2, "m0", "", 2), ("a0.h3", 4, "m1", "", 4), ("a1.h2", 5, "logits", "", 5),
]  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_exact_effects_are_those_of_plain_hooks(name):
    model, prompts = made(name), pairs()
    plain = Plain(name, model, prompts)
    texts = [f"{a}@{s}->{b}@{t}" + (f"<{kind}>" if kind else "") for a, s, b, kind, t in EDGES]
    found = edge_patching(model, prompts, METRIC, texts, positions="each", confidence=None)
    got = {edge.id: edge.effect for edge in found.edges}
    for text, edge in zip(texts, EDGES, strict=True):
        expected = float(plain.effect(*edge).mean())
        assert abs(expected) > 1e-6, text
        assert got[text] == pytest.approx(expected, rel=1e-5), text


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_padding_on_the_left_moves_positions_and_changes_no_effect(name):
    model = made(name)
    short, long = (
        edge_attribution(model, prompts, METRIC, positions="each", confidence=None)
        for prompts in (pairs(), pairs(left=True))
    )
    assert {node.position for node in long.nodes} == set(range(2, 8))  # columns with tokens
    moved = {
        (edge.source.replace(f"@{at}", f"@{at + 2}"), *edge.key[1:]): edge
        for edge in short.edges
        for at in [int(edge.source.rpartition("@")[2])]
    }
    keys = {
        (source, f"{target.partition('@')[0]}@{int(target.partition('@')[2]) + 2}", kind): edge
        for (source, target, kind), edge in moved.items()
    }
    assert len(keys) == len(long.edges)
    for edge in long.edges:
        assert edge.effect == pytest.approx(keys[edge.key].effect, abs=1e-9)
    whole = run_circuit(model, pairs(left=True), METRIC, long, positions="each")
    assert float(whole.mean()) == pytest.approx(long.clean)


@pytest.mark.parametrize("steps", [None, 2])
@pytest.mark.parametrize("name", MODELS)
def test_positional_scores_add_up_to_those_of_edges(name, steps):
    model, prompts = made(name), pairs()
    whole = edge_attribution(model, prompts, METRIC, steps=steps, confidence=None)
    spans = {"changed": slice(1, 3), "end": -1}
    for positions in ("each", spans):
        found = edge_attribution(
            model, prompts, METRIC, steps=steps, positions=positions, confidence=None
        )
        sums = defaultdict(list)
        for edge in found.edges:
            source, target = (one.partition("@")[0] for one in (edge.source, edge.target))
            sums[source, target, edge.input].append(edge.effect)
        assert len(sums) == len(whole.edges)
        for edge in whole.edges:
            assert math.fsum(sums[edge.key]) == pytest.approx(edge.effect, abs=1e-6)
        assert max(abs(edge.effect) for edge in whole.edges) > 1e-3


@pytest.mark.parametrize("name", ["gpt2", "gpt_neox, parallel", "llama", "qwen3_moe"])
def test_circuits_at_spans_are_the_model_without_their_edges(name):
    model, prompts = made(name), pairs()
    spans = {"changed": slice(1, 3), "end": -1}
    graph = edge_attribution(model, prompts, METRIC, positions=spans, confidence=None)
    texts = [
        "input@changed->a0.h1@end<k>", "a0.h1@changed->a1.h2@rest<v>", "input@rest->m0@rest",
        "a1.h3@end->logits@end",
    ]  # fmt: skip
    exact = edge_patching(model, prompts, METRIC, texts, positions=spans, confidence=None)
    with torch.no_grad():
        clean, corrupted = (
            float(METRIC(model(**one), prompts).mean())
            for one in (prompts.clean, prompts.corrupted)
        )
    whole = float(run_circuit(model, prompts, METRIC, graph, positions=spans).mean())
    nothing = dataclasses.replace(graph, edges=())
    empty = float(run_circuit(model, prompts, METRIC, nothing, positions=spans).mean())
    assert whole == pytest.approx(clean) and empty == pytest.approx(corrupted)
    for edge in exact.edges:
        rest = dataclasses.replace(graph, edges=[e for e in graph.edges if e.key != edge.key])
        without = float(run_circuit(model, prompts, METRIC, rest, positions=spans).mean())
        assert without - whole == pytest.approx(edge.effect, abs=1e-7)
    assert max(abs(edge.effect) for edge in exact.edges) > 1e-4


# ---- memory -------------------------------------------------------------------------------------

PEAKS = """
import sys
import torch, transformers
from llm_instrumentation.interventions.edges import edge_attribution
from llm_instrumentation.interventions.metrics import Metric
from llm_instrumentation.interventions.prompts import Prompts

def bytes_of(name):
    lines = dict(line.split(":") for line in open("/proc/self/status") if line.startswith("Vm"))
    return int(lines[name].split()[0]) * 1024

config = transformers.GPT2Config(
    n_layer=2, n_head=4, n_embd=256, vocab_size=50, bos_token_id=0, eos_token_id=0
)
model = transformers.GPT2LMHeadModel(config).eval()
clean = torch.randint(50, (64, 8))
prompts = Prompts(clean, (clean + 1) % 50)
metric = Metric("a logit", lambda logits, batch: logits[:, -1, 0])
for positions in (None, None, "each"):
    open("/proc/self/clear_refs", "w").write("5")  # the peak begins anew
    before = bytes_of("VmRSS")
    edge_attribution(
        model, prompts, metric, positions=positions, batch_size=64, top_k=100, confidence=None
    )
    print(bytes_of("VmHWM") - before)
"""


def test_memory_does_not_grow_with_the_number_of_positions():
    # Large blocks that are freed go back at once, so the peak is what was in use.
    env = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
    run = subprocess.run([sys.executable, "-c", PEAKS], check=True, stdout=subprocess.PIPE, env=env)
    _, summed, each = map(int, run.stdout.split())
    # The gradients of one span at all inputs of the heads of a layer: 6 MB. There are 8 spans.
    assert each < summed + 25e6
