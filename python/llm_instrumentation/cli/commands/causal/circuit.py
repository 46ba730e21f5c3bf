"""`strap circuit`: the edges of a language model that make a difference."""

from __future__ import annotations

import dataclasses
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ....errors import InvalidArgumentError
from ...console import print_json, shown, table
from ...options import CODES, MODELS, Device, Json, Tokenizer
from .pairs import (
    Clean,
    Correct,
    Corrupted,
    MetricOption,
    PairMetric,
    PairsAtATime,
    PairsFile,
    Task,
    Wrong,
    columns_of,
    task_of,
)

if TYPE_CHECKING:
    from ....analysis.causal_graph import CausalGraph, Edge
    from ....interventions.decoders import PostNorms
    from ....interventions.prompts import Positions

__all__ = ["app"]

_SHOWN = 20  # edges that are printed
_KEPT = 100_000  # edges at positions that --all writes
_FILES = (".json", ".graphml", ".dot", ".gv")

app = typer.Typer()


class NormChoice(str, Enum):
    RECOMPUTED = "recomputed"
    LINEAR = "linear"
    FROZEN = "frozen"


@app.command(epilog=CODES, rich_help_panel=MODELS)
def circuit(
    model: Annotated[
        str, typer.Argument(help="A causal language model: a folder or a name.", metavar="MODEL")
    ],
    clean: Clean = None,
    corrupted: Corrupted = None,
    correct: Correct = None,
    wrong: Wrong = None,
    pairs: PairsFile = None,
    metric: MetricOption = PairMetric.LOGIT_DIFFERENCE,
    steps: Annotated[
        int, typer.Option("--steps", help="Of integrated gradients; 0: one gradient.", min=0)
    ] = 5,
    top_k: Annotated[int, typer.Option("--top-k", help="Edges to choose.", min=1)] = 60,
    each_position: Annotated[
        bool, typer.Option("--each-position", help="Tell edges apart by the tokens they join.")
    ] = False,
    experts: Annotated[
        bool, typer.Option("--experts", help="Each expert of a mixture is a node.")
    ] = False,
    post_norms: Annotated[
        NormChoice, typer.Option("--post-norms", help="How a change passes a norm behind heads.")
    ] = NormChoice.RECOMPUTED,
    exact: Annotated[
        bool, typer.Option("--exact", help="Measure these edges by patching, too.")
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option("--out", help="Write the circuit: a page.html, or .json, .graphml, .dot."),
    ] = None,
    every: Annotated[
        Path | None, typer.Option("--all", help="Write the graph of all edges, as .json.")
    ] = None,
    tokenizer: Tokenizer = None,
    batch_size: PairsAtATime = 8,
    device: Device = "cpu",
    as_json: Json = False,
) -> None:
    """Find the edges of a language model that make the difference between two texts."""
    from ....analysis.causal_graph import save_graph

    _check_files(out, every, top_k)
    texts = {"clean": clean, "corrupted": corrupted, "correct": correct, "wrong": wrong}
    task = task_of(model, tokenizer, columns_of(texts, pairs, metric), metric, device, batch_size)
    graph, found = _measured(
        task, steps or None, top_k, exact,
        post_norms.value, batch_size=batch_size, experts=experts,
        positions="each" if each_position else None,
    )  # fmt: skip
    if every is not None:
        save_graph(graph, every)
    notes = dict(found.notes)
    if each_position:
        notes["tokens"] = _tokens(task)
    found = dataclasses.replace(found, model=model, notes=notes)
    if out is not None:
        save_graph(found, out)
    _tell(found, out, as_json)


def _tell(found: CausalGraph, out: Path | None, as_json: bool) -> None:
    if as_json:
        print_json(found.to_dict())
        return
    _print(found)
    if out is not None:
        print(f"{shown(str(out))}: the circuit")


def _measured(
    task: Task, steps: int | None, top_k: int, exact: bool,
    post_norms: PostNorms, *, batch_size: int, positions: Positions, experts: bool,
) -> tuple[CausalGraph, CausalGraph]:  # fmt: skip
    """The graph of all edges, or at positions of the largest, and the circuit."""
    from ....interventions.circuits import run_circuit
    from ....interventions.edges import edge_attribution, edge_patching

    network, prompts, metric = task.model, task.prompts, task.metric
    common: Any = {"batch_size": batch_size, "positions": positions, "experts": experts}
    kept = None if positions is None else max(top_k, _KEPT)
    graph = edge_attribution(
        network, prompts, metric, steps=steps, top_k=kept, post_norms=post_norms, **common
    )
    found = graph.pruned(top_k=top_k)
    if exact and found.edges:
        found = edge_patching(network, prompts, metric, found, **common)
    alone = float(run_circuit(network, prompts, metric, found, **common).double().mean())
    notes = {"edges of the model": len(graph.edges), **graph.notes, "circuit alone": alone}
    return graph, dataclasses.replace(found, notes=notes)


def _check_files(out: Path | None, every: Path | None, top_k: int) -> None:
    """Refuses files that could not be written, before the work begins."""
    from ....analysis.causal_graph.layout import MOST_EDGES

    if out is not None and out.suffix not in (".html", *_FILES):
        raise InvalidArgumentError(f"--out {out}: the name ends in .html, {', '.join(_FILES)}")
    if every is not None and every.suffix not in _FILES:
        raise InvalidArgumentError(f"--all {every}: the name ends in {', '.join(_FILES)}")
    if out is not None and out.suffix == ".html" and top_k > MOST_EDGES:
        raise InvalidArgumentError(
            f"--top-k {top_k}: a page as --out {out} shows at most {MOST_EDGES} edges"
        )


def _tokens(task: Task) -> dict[str, str]:
    """The token of the first clean text at each position, with "…" where others have others."""
    ids = task.prompts.clean["input_ids"]
    same = (ids == ids[0]).all(0).tolist()
    texts = [task.tokenizer.decode([token]) for token in ids[0].tolist()]
    pairs = enumerate(zip(texts, same, strict=True))
    return {str(at): text if alike else f"{text}…" for at, (text, alike) in pairs}


def _print(graph: CausalGraph) -> None:
    ranked = sorted(graph.edges, key=lambda edge: -abs(edge.effect or 0.0))
    table(("effect", "interval", "edge"), [_row(edge) for edge in ranked[:_SHOWN]])
    if len(ranked) > _SHOWN:
        print(f"and {len(ranked) - _SHOWN:,} edges with smaller effects")
    print(
        f"{len(ranked):,} of {graph.notes['edges of the model']:,} edges. {graph.metric}: "
        f"{graph.clean:.4g} of the model, {graph.corrupted:.4g} of the corrupted texts, "
        f"{graph.notes['circuit alone']:.4g} of the circuit alone"
    )


def _row(edge: Edge) -> tuple[str, str, str]:
    interval = "-" if edge.low is None else f"{edge.low:+.3g} to {edge.high:+.3g}"
    return f"{edge.effect:+.4g}", interval, edge.id
