"""Trains a small attention-only model to continue repeated text, and finds its induction heads.

    python examples/induction_heads.py [--output-dir captures]

Install it with `pip install '.[examples,circuits,report]'`. It needs no network, and takes a minute
or two. Attribution gives an effect to each of the model's edges. The largest ones are the circuit:
a head that copies the token before it, and a head that looks for that copy and continues from there
(Olsson et al. 2022). Then the attention of the two heads is looked at, which attribution did not
see. In the end the edges are told apart by where in the text they act.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from llm_instrumentation.analysis.causal_graph import CausalGraph, save_graph
from llm_instrumentation.analysis.plots import save_figure
from llm_instrumentation.interventions.circuits import run_circuit
from llm_instrumentation.interventions.edges import edge_attribution
from llm_instrumentation.interventions.metrics import logit_difference
from llm_instrumentation.interventions.prompts import Prompts
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

TOKENS, LENGTH = 32, 32
HALF = 12  # tokens of the texts that repeat once
EDGES = 20
# The earlier copy of the last token, the token behind the copy, and the last token.
SPANS = {"copy": HALF - 1, "next": HALF, "end": -1}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--output-dir", type=Path, default=Path("captures"))
    parser.add_argument("--steps", type=int, default=600)
    arguments = parser.parse_args()
    out = arguments.output_dir
    out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)

    model = trained(arguments.steps)
    prompts = pairs(64)
    metric = logit_difference()
    graph = edge_attribution(model, prompts, metric, steps=5, batch_size=32)
    circuit = graph.pruned(top_k=EDGES)
    alone = float(run_circuit(model, prompts, metric, circuit, batch_size=32).mean())
    print(f"{len(circuit.edges)} of {len(graph.edges)} edges; {metric.name}:")
    print(f"  model {graph.clean:.2f}, corrupted text {graph.corrupted:.2f}, circuit {alone:.2f}")
    for edge in sorted(circuit.edges, key=lambda edge: -abs(edge.effect)):
        print(f"  {edge.effect:+7.2f}  {edge.id}")
    previous, induction = heads(graph)
    before, after = attention(model, previous, induction, prompts)
    print(f"{previous} gives {before:.0%} of its attention to the token before")
    print(f"{induction} gives {after:.0%} of its attention to the token after the earlier copy")
    save_graph(circuit, out / "induction.html")
    save_figure(circuit.plot(), out / "induction.svg")
    where = edge_attribution(
        model, prompts, metric, steps=5, batch_size=32, positions=SPANS, top_k=EDGES
    )
    print(
        f"{where.notes['edges of the model']} edges at the spans {', '.join(SPANS)} and the rest:"
    )
    for edge in sorted(where.edges, key=lambda edge: -abs(edge.effect))[:6]:
        print(f"  {edge.effect:+7.2f}  {edge.id}")
    at_spans = where.pruned(threshold=0)
    alone = run_circuit(model, prompts, metric, at_spans, batch_size=32, positions=SPANS)
    print(f"  {len(at_spans.edges)} of them are connected, {metric.name} {float(alone.mean()):.2f}")
    save_graph(at_spans, out / "induction_at_spans.html")
    save_figure(at_spans.plot(), out / "induction_at_spans.svg")
    print(f"look at {out / 'induction.html'} and {out / 'induction_at_spans.html'}")


def repeated(examples: int) -> tuple[Tensor, Tensor]:
    """Texts that repeat some random tokens, [examples, LENGTH], and their periods."""
    period = torch.randint(5, 21, (examples, 1))
    tokens = torch.randint(TOKENS, (examples, LENGTH))
    return tokens.gather(1, torch.arange(LENGTH) % period), period


def trained(steps: int) -> LlamaForCausalLM:
    """A model of two layers with four heads each. Its MLPs return 0."""
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=TOKENS, max_position_embeddings=LENGTH, hidden_size=64, intermediate_size=8,
            num_hidden_layers=2, num_attention_heads=4, rope_theta=100.0, bos_token_id=0,
            eos_token_id=0, attn_implementation="eager",
        )
    )  # fmt: skip
    for layer in model.model.layers:
        for parameter in layer.mlp.parameters():
            parameter.requires_grad_(False).zero_()
    learning = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(learning, lr=3e-3, weight_decay=0.01)
    for step in range(steps):
        ids, period = repeated(64)
        logits = model(ids).logits[:, :-1]
        losses = torch.nn.functional.cross_entropy(
            logits.transpose(1, 2), ids[:, 1:], reduction="none"
        )
        loss = losses[torch.arange(1, LENGTH) >= period + 1].mean()  # what the text has told
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 100 == 0 or step == steps - 1:
            print(f"step {step}: loss {loss.item():.3f}")
    return model.eval()


def pairs(examples: int) -> Prompts:
    """Texts of two equal halves. What comes next is the first token of the half.

    In the corrupted text the earlier copy of the last token has changed its place with another
    token of the first half. So another token stands behind it, and should come next.
    """
    rows = torch.arange(examples)
    first = torch.rand(examples, TOKENS).argsort(1)[:, :HALF]
    place = torch.randint(1, HALF - 2, (examples,))
    changed = first.clone()
    changed[rows, place], changed[:, -1] = first[:, -1], first[rows, place]
    return Prompts(
        torch.cat([first, first], 1),
        torch.cat([changed, first], 1),
        {"correct": first[:, 0], "wrong": first[rows, place + 1]},
    )


def heads(graph: CausalGraph) -> tuple[str, str]:
    """The head with the largest effect on the logits, and the one with the largest on its keys."""

    def strongest(edges: list[tuple[str, float]]) -> str:
        return max(edges, key=lambda edge: abs(edge[1]))[0]

    last = [(e.source, e.effect) for e in graph.edges if e.target == "logits" and "a1" in e.source]
    induction = strongest(last)
    keys = [
        (e.source, e.effect)
        for e in graph.edges
        if e.target == induction and e.input == "k" and e.source.startswith("a0")
    ]
    return strongest(keys), induction


@torch.no_grad()
def attention(
    model: LlamaForCausalLM, previous: str, induction: str, prompts: Prompts
) -> tuple[float, float]:
    """How much attention two heads give to the tokens that their names promise: means."""
    weights = model(**prompts.clean, output_attentions=True).attentions
    first, second = (
        weights[layer][:, int(name.partition("h")[2])]
        for layer, name in enumerate((previous, induction))
    )
    before = first.diagonal(-1, 1, 2).mean()
    after = second[:, -1, HALF].mean()
    return float(before), float(after)


if __name__ == "__main__":
    main()
