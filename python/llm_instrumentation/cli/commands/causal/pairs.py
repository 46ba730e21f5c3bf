"""What commands on pairs of texts have in common: their options, the texts and the metric."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from ...._json import load_json
from ...._parsing import parsing
from ....errors import CorruptError, InvalidArgumentError, NotFoundError
from ...pretrained import pretrained

if TYPE_CHECKING:
    from ....interventions.metrics import Metric
    from ....interventions.prompts import Prompts

__all__ = [
    "Clean", "Correct", "Corrupted", "MetricOption", "PairMetric", "PairsAtATime", "PairsFile",
    "Task", "Wrong", "columns_of", "task_of",
]  # fmt: skip


class PairMetric(str, Enum):
    LOGIT_DIFFERENCE = "logit-difference"
    CROSS_ENTROPY = "cross-entropy"
    KL_DIVERGENCE = "kl-divergence"


Clean = Annotated[list[str] | None, typer.Option("--clean", help="A text. May be given again.")]
Corrupted = Annotated[
    list[str] | None, typer.Option("--corrupted", help="Its counterpart, of as many tokens.")
]
Correct = Annotated[
    list[str] | None, typer.Option("--correct", help="The token that should follow.")
]
Wrong = Annotated[
    list[str] | None, typer.Option("--wrong", help="The one that follows the corrupted text.")
]
PairsFile = Annotated[
    Path | None,
    typer.Option("--pairs", help="These texts instead, by name: an object in each line."),
]
MetricOption = Annotated[PairMetric, typer.Option("--metric", help="What effects are effects on.")]
PairsAtATime = Annotated[int, typer.Option("--batch-size", help="Pairs at a time.", min=1)]

_ANSWERS = {
    PairMetric.LOGIT_DIFFERENCE: ("correct", "wrong"),
    PairMetric.CROSS_ENTROPY: ("correct",),
    PairMetric.KL_DIVERGENCE: (),
}


class Task(NamedTuple):
    """What is measured on what.

    Attributes:
        model: a causal language model of transformers, in evaluation mode.
        tokenizer: its tokenizer.
        prompts: the pairs.
        metric: of what the model predicts behind them.
    """

    model: Any
    tokenizer: Any
    prompts: Prompts
    metric: Metric


def task_of(
    model: str, tokenizer: str | None, columns: Mapping[str, Sequence[str]], metric: PairMetric,
    device: str, batch_size: int,
) -> Task:  # fmt: skip
    """Loads the model and its tokenizer. Columns are those of `columns_of`."""
    network = pretrained("MODEL", "AutoModelForCausalLM", model).eval().to(device)
    texts_of = pretrained("--tokenizer", "AutoTokenizer", tokenizer or model)
    prompts = _prompts(columns, texts_of, device)
    return Task(network, texts_of, prompts, _metric(metric, network, prompts, batch_size))


def _prompts(columns: Mapping[str, Sequence[str]], tokenizer: Any, device: str) -> Prompts:
    from ....interventions.prompts import Prompts

    answers = {name: texts for name, texts in columns.items() if name in ("correct", "wrong")}
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.convert_ids_to_tokens(0)
    return Prompts.of_texts(
        tokenizer, columns["clean"], columns["corrupted"], answers=answers, device=device
    )


def _metric(name: PairMetric, model: Any, prompts: Prompts, batch_size: int) -> Metric:
    from ....interventions import metrics

    if name is PairMetric.LOGIT_DIFFERENCE:
        return metrics.logit_difference()
    if name is PairMetric.CROSS_ENTROPY:
        return metrics.cross_entropy()
    return metrics.kl_divergence(model, prompts, batch_size=batch_size)


def columns_of(
    texts: Mapping[str, Sequence[str] | None], pairs: Path | None, metric: PairMetric
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
            raise InvalidArgumentError(f"--metric {metric.value} needs --{name}")
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
