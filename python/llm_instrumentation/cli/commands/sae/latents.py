"""`strap sae latents`: the activations of features, for Delphi."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ...console import print_json, shown
from ...options import CODES, Device, Json
from ...values import numbers
from .options import Features, MaxRows, OneLayer, Rows, Saes, Streams, WithoutTokens, load_layer

__all__ = ["app"]

app = typer.Typer()


@app.command(epilog=CODES)
def latents(
    sources: Streams,
    saes: Saes,
    out: Annotated[
        Path, typer.Argument(help="A folder; it gets a new one for the layer.", metavar="OUT")
    ],
    layer: OneLayer = None,
    batch_size: Rows = 4096,
    without_tokens: WithoutTokens = None,
    max_rows: MaxRows = None,
    device: Device = "cpu",
    model: Annotated[
        str, typer.Option("--model", help="The model's name, for Delphi's config.json.")
    ] = "",
    features: Features = None,
    context: Annotated[int, typer.Option("--context", help="Tokens of a context.", min=1)] = 256,
    splits: Annotated[int, typer.Option("--splits", help="Number of files.", min=1)] = 5,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace what is in the folder of the layer.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Write the activations of features for Delphi, which lets language models explain them."""
    from ....analysis.dataset import ActivationDataset
    from ....analysis.sparse_autoencoder import export_latents

    chosen = None if features is None else numbers("--features", features)
    loaded = load_layer(saes, layer, device)
    with ActivationDataset(
        sources, list(loaded), batch_size=batch_size, columns=(),
        without_tokens=numbers("--without-tokens", without_tokens),
    ) as data:  # fmt: skip
        report = export_latents(
            data, loaded, out, features=chosen, config={"model_name": model}, max_rows=max_rows,
            context=context, splits=splits, overwrite=overwrite,
        )  # fmt: skip
    if as_json:
        print_json(report)
        return
    print(
        f"{shown(report.path)}: {report.activations:,} activations in {report.contexts:,} contexts"
    )
    if report.left_out_rows:
        print(f"  {report.left_out_rows:,} rows that fill no whole context are left out")
