"""The options of `strap sae`, and the autoencoders that they name."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from ....errors import InvalidArgumentError, NotFoundError

__all__ = [
    "Features", "MaxRows", "OneLayer", "Rows", "Saes", "Streams", "WithoutTokens", "load_layer",
    "load_layers",
]  # fmt: skip

Streams = Annotated[list[Path], typer.Argument(help="Streams.", metavar="STREAM...")]
WithoutTokens = Annotated[
    str | None, typer.Option("--without-tokens", help="Ids of tokens to leave out, as 0,1.")
]
Saes = Annotated[Path, typer.Argument(help="The folder of a training.", metavar="SAES")]
Rows = Annotated[int, typer.Option("--batch-size", help="Rows at a time.")]
MaxRows = Annotated[int | None, typer.Option("--max-rows", help="Read no more rows.")]
OneLayer = Annotated[str | None, typer.Option("--layer", help="Needed if SAES has several.")]
Features = Annotated[str | None, typer.Option("--features", help="Their numbers, as 1,5,9.")]


def load_layers(saes: Path, layers: Sequence[str], device: str) -> dict[str, Any]:
    """The autoencoders of some layers; of all, if none is named.

    Raises:
        NotFoundError: a layer has none.
    """
    from ....analysis.sparse_autoencoder import load_saes

    loaded = load_saes(saes, device=device)
    for layer in layers:
        if layer not in loaded:
            raise NotFoundError(f"--layer {layer}: {saes} has {', '.join(loaded)}")
    return {layer: loaded[layer] for layer in layers or loaded}


def load_layer(saes: Path, layer: str | None, device: str) -> dict[str, Any]:
    """The autoencoder of a layer, with its layer.

    Raises:
        InvalidArgumentError: there are several, and no layer is named.
    """
    loaded = load_layers(saes, [] if layer is None else [layer], device)
    if len(loaded) != 1:
        raise InvalidArgumentError(f"--layer: choose one of {', '.join(loaded)}")
    return loaded
