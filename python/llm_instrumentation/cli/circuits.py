"""The subcommand `strap circuit`: the edges of a language model that make a difference."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .._json import load_json
from .._parsing import parsing
from ..analysis.causal_graph import CausalGraph, Edge, save_graph
from ..analysis.causal_graph.layout import MOST_EDGES
from ..errors import CorruptError, InvalidArgumentError, NotFoundError
from .console import print_json, shown, table
from .pretrained import pretrained

if TYPE_CHECKING:
    from ..interventions.metrics import Metric
    from ..interventions.prompts import Prompts

__all__ = ["circuit"]

_SHOWN = 20  # edges that are printed
_FILES = (".json", ".graphml", ".dot", ".gv")
_ANSWERS = {
    "logit-difference": ("correct", "wrong"), "cross-entropy": ("correct",), "kl-divergence": (),
}  # fmt: skip


def circuit(
    model: str,
    texts: dict[str, Sequence[str]],
    pairs: Path | None,
    metric: str,
    steps: int,
    top_k: int,
    exact: bool,
    out: Path | None,
    every: Path | None,
    tokenizer: str | None,
    batch_size: int,
    device: str,
    as_json: bool,
) -> None:
    from ..interventions.circuits import run_circuit
    from ..interventions.edges import edge_attribution, edge_patching

    _check_files(out, every, top_k)
    columns = _columns(texts, pairs, metric)
    network = pretrained("MODEL", "AutoModelForCausalLM", model).eval().to(device)
    prompts = _prompts(
        columns, pretrained("--tokenizer", "AutoTokenizer", tokenizer or model), device
    )
    measured = _metric(metric, network, prompts, batch_size)
    graph = edge_attribution(network, prompts, measured, steps=steps or None, batch_size=batch_size)
    if every is not None:
        save_graph(graph, every)
    found = graph.pruned(top_k=top_k)
    if exact and found.edges:
        found = edge_patching(network, prompts, measured, found, batch_size=batch_size)
    alone = float(
        run_circuit(network, prompts, measured, found, batch_size=batch_size).double().mean()
    )
    notes = {**found.notes, "edges of the model": len(graph.edges), "circuit alone": alone}
    found = dataclasses.replace(found, model=model, notes=notes)
    if out is not None:
        save_graph(found, out)
    if as_json:
        print_json(found.to_dict())
    else:
        _print(found)
        if out is not None:
            print(f"{shown(str(out))}: the circuit")


# ---- what is asked ----------------------------------------------------------------------------


def _check_files(out: Path | None, every: Path | None, top_k: int) -> None:
    """Refuses files that could not be written, before the work begins."""
    if out is not None and out.suffix not in (".html", *_FILES):
        raise InvalidArgumentError(f"--out {out}: the name ends in .html, {', '.join(_FILES)}")
    if every is not None and every.suffix not in _FILES:
        raise InvalidArgumentError(f"--all {every}: the name ends in {', '.join(_FILES)}")
    if out is not None and out.suffix == ".html" and top_k > MOST_EDGES:
        raise InvalidArgumentError(
            f"--top-k {top_k}: a page as --out {out} shows at most {MOST_EDGES} edges"
        )


def _columns(
    texts: dict[str, Sequence[str]], pairs: Path | None, metric: str
) -> dict[str, Sequence[str]]:
    """The texts and answers that the metric needs, by name, an entry for each example.

    Raises:
        InvalidArgumentError: some are missing, or given twice.
    """
    given = {name: list(values) for name, values in texts.items() if values}
    if pairs is not None and given:
        raise InvalidArgumentError(f"--pairs has all texts: leave out --{next(iter(given))}")
    needed = ("clean", "corrupted", *_ANSWERS[metric])
    if pairs is not None:
        return _read(pairs, needed)
    for name in needed:
        if name not in given:
            raise InvalidArgumentError(f"--metric {metric} needs --{name}")
        if len(given[name]) != len(given["clean"]):
            raise InvalidArgumentError(
                f"--{name}: {len(given[name])} for {len(given['clean'])} clean texts: give one for "
                "each"
            )
    return {name: given[name] for name in needed}


def _read(path: Path, needed: Sequence[str]) -> dict[str, Sequence[str]]:
    """The columns of a file with a JSON object in each line.

    Raises:
        NotFoundError: there is no such file.
        CorruptError: a line is something else, or lacks a text.
    """
    try:
        lines = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        raise NotFoundError(f"--pairs {path}: there is no such file") from None
    records = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        place = f"--pairs {path}, line {number}"
        with parsing(place, "is no JSON"):
            record = load_json(line)
        if not isinstance(record, dict):
            raise CorruptError(f"{place}: it is no object")
        for name in needed:
            if not isinstance(record.get(name), str):
                raise CorruptError(f"{place}: it has no text {name!r}")
        records.append(record)
    if not records:
        raise CorruptError(f"--pairs {path} has no texts")
    return {name: [record[name] for record in records] for name in needed}


def _prompts(columns: dict[str, Sequence[str]], tokenizer: Any, device: str) -> Prompts:
    from ..interventions.prompts import Prompts

    answers = {name: texts for name, texts in columns.items() if name in ("correct", "wrong")}
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.convert_ids_to_tokens(0)
    return Prompts.of_texts(
        tokenizer, columns["clean"], columns["corrupted"], answers=answers, device=device
    )


def _metric(name: str, model: Any, prompts: Prompts, batch_size: int) -> Metric:
    from ..interventions import metrics

    if name == "logit-difference":
        return metrics.logit_difference()
    if name == "cross-entropy":
        return metrics.cross_entropy()
    return metrics.kl_divergence(model, prompts, batch_size=batch_size)


# ---- what is told -----------------------------------------------------------------------------


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
