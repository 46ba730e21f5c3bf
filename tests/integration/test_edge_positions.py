"""Exact effects of edges at positions, on architectures of transformers, beside plain hooks."""

from __future__ import annotations

import dataclasses
import math
import os
import subprocess
import sys
from collections import defaultdict

import pytest
import torch
from edges_by_hooks import EDGES, METRIC, MODELS, Plain, made, pairs
from llm_instrumentation.interventions.circuits import run_circuit
from llm_instrumentation.interventions.edges import edge_attribution, edge_patching

# Their attention and MLP are those of another model of the list, as far as edges see them.
ALIKE = ("cohere", "cohere2", "exaone4", "flex_olmo", "gemma3", "glm4", "olmo3", "starcoder2")


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


@pytest.mark.parametrize("name", ["gpt2", "llama", "gemma3"])
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
@pytest.mark.parametrize("name", [name for name in MODELS if name not in ALIKE])
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


@pytest.mark.parametrize(
    "name", ["gpt2", "gpt_neox, parallel", "llama", "qwen3_moe", "gemma2", "olmo2"]
)
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
