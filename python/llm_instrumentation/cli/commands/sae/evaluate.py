"""`strap sae evaluate`: how well autoencoders reconstruct rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from ....errors import InvalidArgumentError
from ...console import print_json, shown, table
from ...options import CODES, Device, Json
from ...pretrained import pretrained
from ...values import numbers
from .options import MaxRows, Rows, Saes, Streams, WithoutTokens, load_layers

__all__ = ["app"]

app = typer.Typer()


@app.command(epilog=CODES)
def evaluate(
    sources: Streams,
    saes: Saes,
    layers: Annotated[
        list[str] | None,
        typer.Option("--layer", help="A name (default: all). May be given again."),
    ] = None,
    batch_size: Rows = 4096,
    without_tokens: WithoutTokens = None,
    max_rows: MaxRows = None,
    device: Device = "cpu",
    model: Annotated[
        str | None,
        typer.Option("--model", help="A causal language model, for the cross-entropy score."),
    ] = None,
    text: Annotated[
        Path | None, typer.Option("--text", help="A text file for the model, in UTF-8.")
    ] = None,
    context: Annotated[
        int, typer.Option("--context", help="Tokens that the model sees at once.", min=2)
    ] = 128,
    as_json: Json = False,
) -> None:
    """Tell how well autoencoders reconstruct the rows of captures, and what that costs a model."""
    from ....analysis.dataset import ActivationDataset
    from ....analysis.sparse_autoencoder import cross_entropy_score, evaluate_sae

    if (model is None) != (text is None):
        raise InvalidArgumentError("--model and --text: give both, or none of them")
    loaded = load_layers(saes, layers or [], device)
    with ActivationDataset(
        sources, list(loaded), batch_size=batch_size,
        without_tokens=numbers("--without-tokens", without_tokens), columns=(),
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


def _language_model(
    model: str, text: Path, context: int, device: str
) -> tuple[Any, list[dict[str, Any]]]:
    """A causal language model from a folder, and the ids of a text in batches of contexts.

    Raises:
        InvalidArgumentError: the folder has no model, or the text no context of two tokens.
    """
    try:
        written = text.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise InvalidArgumentError(f"--text {text}: it is not UTF-8: {error}") from error
    tokenizer = pretrained("--model", "AutoTokenizer", model)
    network = pretrained("--model", "AutoModelForCausalLM", model).to(device)
    ids = tokenizer(written, return_tensors="pt", verbose=False)["input_ids"][0]
    parts = [part for part in ids.split(context) if len(part) > 1]
    if not parts:
        raise InvalidArgumentError(f"--text {text}: it has fewer than two tokens")
    return network, [{"input_ids": part[None].to(device)} for part in parts]
