"""Trains a small attention-only model to say who gets the letter, and finds where it looks.

    python examples/indirect_object.py [--output-dir captures]

Install it with `pip install '.[examples,circuits,report]'`. It needs no network, and takes a minute
or two. "after Mary and John left , John sent a letter to" goes on with "Mary", the name that is
there once (the task of Wang et al. 2022). The three templates have other lengths, and the names
stand in either order. So positions say little, and edges are told apart by roles: the two names,
the name that is said again, and the end.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from llm_instrumentation.analysis.causal_graph import save_graph
from llm_instrumentation.analysis.plots import save_figure
from llm_instrumentation.interventions.circuits import run_circuit
from llm_instrumentation.interventions.edges import edge_attribution
from llm_instrumentation.interventions.metrics import logit_difference
from llm_instrumentation.interventions.prompts import Prompts
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

NAMES = (
    "Mary", "John", "Anna", "Peter", "James", "Robert", "Laura", "Emma", "Kate", "Alice", "Mark",
    "Paul", "Simon", "Jack",
)  # fmt: skip
TEMPLATES = (
    "{one} and {two} went to the park and then {again} gave a flower to",
    "after {one} and {two} left , {again} sent a letter to",
    "while {one} was with {two} at the old station {again} showed the map to",
)
EDGES = 30


class Text(NamedTuple):
    """A text, of its template and the names in it."""

    template: str
    one: str
    two: str
    again: str

    @property
    def once(self) -> str:
        """The name that comes next."""
        return self.two if self.again == self.one else self.one

    def corrupted(self) -> Text:
        """The text in which the other name is there again, so this one comes next."""
        return self._replace(again=self.once)

    def roles(self) -> dict[str, str]:
        return {"one": self.one, "two": self.two, "again": self.again}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--output-dir", type=Path, default=Path("captures"))
    parser.add_argument("--steps", type=int, default=600)
    arguments = parser.parse_args()
    out = arguments.output_dir
    out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)

    tokenizer = words()
    model = trained(tokenizer, arguments.steps)
    prompts = pairs(tokenizer, 128)
    metric = logit_difference()
    graph = edge_attribution(
        model, prompts, metric, steps=5, batch_size=32, positions=prompts.spans, top_k=EDGES
    )
    circuit = graph.pruned(threshold=0)
    alone = run_circuit(
        model, prompts, metric, circuit, batch_size=32, positions=prompts.spans
    ).mean()
    print(f"{len(circuit.edges)} of {graph.notes['edges of the model']} edges; {metric.name}:")
    print(f"  model {graph.clean:.2f}, corrupted {graph.corrupted:.2f}, circuit {float(alone):.2f}")
    strongest = sorted(circuit.edges, key=lambda edge: -abs(edge.effect))
    for edge in strongest[:8]:
        print(f"  {edge.effect:+7.2f}  {edge.id}")
    mover = next(edge.source for edge in strongest if edge.target.startswith("logits"))
    for role, share in looks(model, mover, prompts).items():
        print(f"{mover} gives {share:.0%} of its attention to {role}")
    save_graph(circuit, out / "indirect_object.html")
    save_figure(circuit.plot(), out / "indirect_object.svg")
    print(f"look at {out / 'indirect_object.html'}")


def texts(chance: random.Random) -> Iterator[Text]:
    while True:
        one, two = chance.sample(NAMES, 2)
        yield Text(chance.choice(TEMPLATES), one, two, chance.choice((one, two)))


def words() -> PreTrainedTokenizerFast:
    """A tokenizer that has a token for each word of the texts."""
    known = sorted({word for text in TEMPLATES for word in text.split() if "{" not in word})
    vocabulary = {word: number for number, word in enumerate(["<pad>", *known, *NAMES])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>")


def trained(tokenizer: PreTrainedTokenizerFast, steps: int) -> LlamaForCausalLM:
    """A model of two layers with four heads each. Its MLPs return 0."""
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer), max_position_embeddings=32, hidden_size=64,
            intermediate_size=8, num_hidden_layers=2, num_attention_heads=4, rope_theta=100.0,
            bos_token_id=0, eos_token_id=0, attn_implementation="eager",
        )
    )  # fmt: skip
    for layer in model.model.layers:
        for parameter in layer.mlp.parameters():
            parameter.requires_grad_(False).zero_()
    learning = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(learning, lr=2e-3, weight_decay=0.01)
    some = texts(random.Random(0))
    for step in range(steps):
        batch = [next(some) for _ in range(64)]
        whole = [text.template.format(**text.roles()) + f" {text.once}" for text in batch]
        encoded = tokenizer(whole, padding=True, return_tensors="pt")
        rows, last = torch.arange(len(batch)), encoded["attention_mask"].sum(1) - 1
        logits = model(encoded["input_ids"]).logits[rows, last - 1]
        loss = torch.nn.functional.cross_entropy(logits, encoded["input_ids"][rows, last])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 100 == 0 or step == steps - 1:
            print(f"step {step}: loss {loss.item():.3f}")
    return model.eval()


def pairs(tokenizer: PreTrainedTokenizerFast, examples: int) -> Prompts:
    """Texts beside those in which the other name is said again."""
    some = texts(random.Random(1))
    clean = [next(some) for _ in range(examples)]
    corrupted = [text.corrupted() for text in clean]
    return Prompts.of_template(
        tokenizer,
        [text.template for text in clean],
        [text.roles() for text in clean],
        [text.roles() for text in corrupted],
        answers={
            "correct": [text.once for text in clean],
            "wrong": [text.once for text in corrupted],
        },
    )


@torch.no_grad()
def looks(model: LlamaForCausalLM, head: str, prompts: Prompts) -> dict[str, float]:
    """How much attention a head at the end gives to each role: means."""
    layer, _, number = head.partition("@")[0].removeprefix("a").partition("h")
    attentions = model(**prompts.clean, output_attentions=True).attentions
    weights = attentions[int(layer.rstrip("."))][:, int(number)]
    end = prompts.spans["end"].int().argmax(1)
    at_end = weights[torch.arange(len(end)), end]
    return {
        role: float((at_end * span).sum(1).mean())
        for role, span in prompts.spans.items()
        if role != "end"
    }


if __name__ == "__main__":
    main()
