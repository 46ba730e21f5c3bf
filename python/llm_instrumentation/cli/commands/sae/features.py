"""`strap sae features`: on which tokens features are active."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ....errors import InvalidArgumentError
from ... import console
from ...console import print_json, shown
from ...options import CODES, Device, Json, OverwriteOut, Tokenizer
from ...pretrained import pretrained, tokenizer_of
from ...values import numbers
from .options import Features, MaxRows, OneLayer, Rows, Saes, Streams, WithoutTokens, load_layer

if TYPE_CHECKING:
    from ....analysis.sparse_autoencoder import Feature

__all__ = ["app"]

_SHOWN = 10  # features that are printed unless some are named

app = typer.Typer()


class FileFormat(str, Enum):
    PARQUET = "parquet"
    JSONL = "jsonl"


@app.command(epilog=CODES)
def features(
    sources: Streams,
    saes: Saes,
    layer: OneLayer = None,
    batch_size: Rows = 4096,
    without_tokens: WithoutTokens = None,
    max_rows: MaxRows = None,
    device: Device = "cpu",
    model: Annotated[
        str | None,
        typer.Option("--model", help="A causal language model, for the logits they change."),
    ] = None,
    tokenizer: Tokenizer = None,
    features: Features = None,
    top: Annotated[int, typer.Option("--top", help="Contexts of a feature.", min=1)] = 5,
    context: Annotated[int, typer.Option("--context", help="Tokens of a context.", min=1)] = 20,
    out: Annotated[
        Path | None, typer.Option("--out", help="Write all of them to this new folder.")
    ] = None,
    form: Annotated[
        FileFormat | None, typer.Option("--format", help="Of --out (default: parquet).")
    ] = None,
    overwrite: OverwriteOut = False,
    as_json: Json = False,
) -> None:
    """Show on which tokens features are active, and which they promote."""
    from ....analysis.dataset import ActivationDataset
    from ....analysis.sae.feature_files import feature_record
    from ....analysis.sae.folder import free_folder
    from ....analysis.sparse_autoencoder import describe_features, save_features

    if out is not None:
        free_folder(out, overwrite)  # before hours of work
    elif form is not None or overwrite:
        raise InvalidArgumentError("--format, --overwrite: they need --out")
    chosen = None if features is None else numbers("--features", features)
    loaded = load_layer(saes, layer, device)
    network = None if model is None else pretrained("--model", "AutoModelForCausalLM", model)
    with ActivationDataset(
        sources, list(loaded), batch_size=batch_size, columns=(),
        without_tokens=numbers("--without-tokens", without_tokens),
    ) as data:  # fmt: skip
        found = describe_features(
            data, loaded, features=chosen, unembedding=network, top=top, context=context,
            max_rows=max_rows, tokenizer=tokenizer_of(tokenizer, model),
        )  # fmt: skip
        about = {
            "layer": found.layer,
            "rows": found.rows,
            "features": len(found),
            "alive": int((found.fired > 0).sum()),
        }
        fired = f"{about['alive']:,} of {len(found):,} features fired on {found.rows:,} rows"
        if out is not None:
            path = save_features(
                found, out, format="parquet" if form is None else form.value, overwrite=overwrite
            )
            if as_json:
                print_json({"path": path, **about})
            else:
                print(f"{shown(str(path))}: {shown(found.layer)}, {fired}")
            return
        # The features that were named, or those with the largest activations.
        some = (-found.maximum).argsort(kind="stable")[: _SHOWN if chosen is None else None]
        described = [found[number] for number in found.features[some].tolist()]
    if as_json:
        print_json({**about, "described": list(map(feature_record, described))})
        return
    print(f"{shown(found.layer)}: {fired}")
    for feature in described:
        _print_feature(feature)


def _print_feature(feature: Feature) -> None:
    """A feature on some lines, so that the tokens with its top activations are in one column."""
    console.out.print(
        f"\nfeature {feature.feature}: density {feature.density:.3%}, maximum "
        f"{feature.maximum:.3g}",
        style="bold",
    )
    for name, effects in (("promotes", feature.promoted), ("suppresses", feature.suppressed)):
        if effects:
            told = ", ".join(f"{effect} {effect.value:.2g}" for effect in effects[:5])
            print(f"  {name} {told}")
    before = [len("".join(one.words()[: one.peak])) for one in feature.contexts]
    for one, length in zip(feature.contexts, before, strict=True):
        place = f"{one.sequence}:{one.position}"
        print(f"{one.value:9.3g}  {place:>10}  {' ' * (max(before) - length)}{one}")
