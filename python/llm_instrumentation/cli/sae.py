"""The subcommands of `strap sae`: sparse autoencoders on the rows of captures."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from .._extras import extra
from ..errors import InvalidArgumentError, NotFoundError
from .console import print_json, shown, table
from .exports import numbers

__all__ = ["evaluate", "train"]


def train(
    sources: Sequence[Path],
    out: Path,
    layers: Sequence[str],
    batch_size: int,
    shuffle: str,
    without_tokens: str | None,
    options: Sequence[str],
    trainer: Sequence[str],
    figure: Path | None,
    as_json: bool,
    **how: Any,
) -> None:
    from ..analysis.dataset import ActivationDataset
    from ..analysis.sparse_autoencoder import plot_losses, train_sae

    with ActivationDataset(
        sources, _some(layers), batch_size=batch_size, shuffle=shuffle,  # type: ignore[arg-type]
        seed=how["seed"], without_tokens=numbers(without_tokens), columns=(),
    ) as data:  # fmt: skip
        report = train_sae(
            data, out, options=assignments("--option", options),
            trainer=assignments("--trainer", trainer), **how,
        )  # fmt: skip
    if figure is not None:
        try:
            plot_losses(out).savefig(figure)
        except ValueError as error:  # matplotlib does not know the kind of file
            raise InvalidArgumentError(f"--figure {figure}: {error}") from error
    if as_json:
        print_json(report)
        return
    resumed = f", from step {report.resumed_at:,} on" if report.resumed_at else ""
    print(
        f"{shown(report.path)}: {report.architecture}, {report.features:,} features, "
        f"{report.steps:,} training steps{resumed}"
    )
    for layer, folder in report.saes.items():
        print(f"  {shown(layer)}: loss {report.losses[layer]:.4g}, {shown(folder)}")


def evaluate(
    sources: Sequence[Path],
    saes: Path,
    layers: Sequence[str],
    batch_size: int,
    without_tokens: str | None,
    max_rows: int | None,
    device: str,
    model: str | None,
    text: Path | None,
    context: int,
    as_json: bool,
) -> None:
    from ..analysis.dataset import ActivationDataset
    from ..analysis.sparse_autoencoder import cross_entropy_score, evaluate_sae, load_saes

    if (model is None) != (text is None):
        raise InvalidArgumentError("--model and --text: give both, or none of them")
    loaded = load_saes(saes, device=device)
    if layers:
        unknown = [layer for layer in layers if layer not in loaded]
        if unknown:
            raise NotFoundError(f"--layer {unknown[0]}: {saes} has {', '.join(loaded)}")
        loaded = {layer: loaded[layer] for layer in layers}
    with ActivationDataset(
        sources, list(loaded), batch_size=batch_size,
        without_tokens=numbers(without_tokens), columns=(),
    ) as data:  # fmt: skip
        found = evaluate_sae(data, loaded, max_rows=max_rows)
    scores = {}
    if model is not None and text is not None:
        network, batches = _language_model(model, text, context, device)
        scores = {
            layer: cross_entropy_score(network, batches, sae, layer)
            for layer, sae in loaded.items()
        }
    if as_json:
        print_json(
            {
                layer: {
                    **dataclasses.asdict(one),
                    "cross_entropy": dataclasses.asdict(scores[layer]) if scores else None,
                }
                for layer, one in found.items()
            }
        )
        return
    heads = ["rows", "explained variance", "fvu", "l0", "dead", "layer"]
    if scores:
        heads[-1:-1] = ["cross-entropy score"]

    def rows() -> Iterator[list[str]]:
        for layer, one in found.items():
            score = [f"{scores[layer].score:.4f}"] if scores else []
            yield [
                f"{one.rows:,}", f"{one.explained_variance:.4f}", f"{one.fvu:.4f}",
                f"{one.l0:.1f}", f"{one.dead_features:,} of {one.features:,}", *score, shown(layer),
            ]  # fmt: skip

    table(heads, list(rows()))


def assignments(option: str, given: Sequence[str]) -> dict[str, Any]:
    """Fields as ``k=32``. A value is JSON, or else a text."""
    found: dict[str, Any] = {}
    for one in given:
        name, equals, value = one.partition("=")
        if not equals or not name:
            raise InvalidArgumentError(f"{option} {one!r}: give a field as k=32")
        try:
            found[name] = json.loads(value)
        except ValueError:
            found[name] = value
    return found


def _some(layers: Sequence[str]) -> list[str]:
    if not layers:
        raise InvalidArgumentError("--layer: name at least one; strap ls lists them")
    return list(layers)


def _language_model(
    model: str, text: Path, context: int, device: str
) -> tuple[Any, list[dict[str, Any]]]:
    """A causal language model from a folder, and the ids of a text in batches of contexts.

    Raises:
        InvalidArgumentError: the text has no context of two tokens.
    """
    with extra("sae", "--model"):
        from transformers import AutoModelForCausalLM, AutoTokenizer
    try:
        written = text.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise InvalidArgumentError(f"--text {text}: it is not UTF-8: {error}") from error
    tokenizer = AutoTokenizer.from_pretrained(model)
    network = AutoModelForCausalLM.from_pretrained(model).to(device)
    ids = tokenizer(written, return_tensors="pt", verbose=False)["input_ids"][0]
    parts = [part for part in ids.split(context) if len(part) > 1]
    if not parts:
        raise InvalidArgumentError(f"--text {text}: it has fewer than two tokens")
    return network, [{"input_ids": part[None].to(device)} for part in parts]
