"""`strap sae train`: an autoencoder for each layer."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer

from ...._json import load_json
from ....errors import InvalidArgumentError
from ...console import print_json, shown
from ...figures import save_plot
from ...options import CODES, Device, Json
from ...values import named_layers, numbers
from .options import Streams, WithoutTokens

__all__ = ["app"]

app = typer.Typer()


class Order(str, Enum):
    NONE = "none"
    POOL = "pool"
    FULL = "full"


class Scale(str, Enum):
    NONE = "none"
    MEAN_NORM = "expected_average_only_in"


class FirstBias(str, Enum):
    MEAN = "mean"
    ZEROS = "zeros"


@app.command(epilog=CODES)
def train(
    sources: Streams,
    out: Annotated[Path, typer.Argument(help="The folder.", metavar="OUT")],
    architecture: Annotated[str, typer.Option("--architecture", help="As topk or gated.")],
    width: Annotated[int, typer.Option("--width", help="Features of each autoencoder.")],
    layers: Annotated[
        list[str] | None,
        typer.Option("--layer", help="A name; * and ? match. May be given again."),
    ] = None,
    steps: Annotated[
        int | None, typer.Option("--steps", help="Training steps (default: one epoch).")
    ] = None,
    batch_size: Annotated[int, typer.Option("--batch-size", help="Rows of a step.")] = 4096,
    shuffle: Annotated[
        Order, typer.Option("--shuffle", help="The order of the rows.")
    ] = Order.POOL,
    lr: Annotated[float, typer.Option("--lr", help="The rate of learning.")] = 3e-4,
    normalize: Annotated[
        Scale,
        typer.Option(
            "--normalize",
            help="Divides the vectors: none, expected_average_only_in.",
            metavar="KIND",
        ),
    ] = Scale.MEAN_NORM,
    bias: Annotated[
        FirstBias, typer.Option("--bias", help="The decoder's bias at the beginning.")
    ] = FirstBias.MEAN,
    options: Annotated[
        list[str] | None,
        typer.Option("--option", help="A field of the architecture, as k=32. May be given again."),
    ] = None,
    trainer: Annotated[
        list[str] | None,
        typer.Option("--trainer", help="A field of SAELens' trainer. May be given again."),
    ] = None,
    without_tokens: WithoutTokens = None,
    seed: Annotated[int, typer.Option("--seed", help="Of the order and the weights.")] = 0,
    device: Device = "cpu",
    checkpoint_every: Annotated[
        int, typer.Option("--checkpoint-every", help="Training steps between checkpoints.")
    ] = 1000,
    figure: Annotated[
        Path | None, typer.Option("--figure", help="Draw the losses to this PNG, SVG or PDF file.")
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Begin anew, and replace an earlier training.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Train an autoencoder for each layer; a training that was killed goes on."""
    from ....analysis.dataset import ActivationDataset
    from ....analysis.sparse_autoencoder import plot_losses, train_sae

    with ActivationDataset(
        sources, named_layers(layers), batch_size=batch_size, seed=seed,
        shuffle=shuffle.value,
        without_tokens=numbers("--without-tokens", without_tokens), columns=(),
    ) as data:  # fmt: skip
        report = train_sae(
            data, out, options=_assignments("--option", options or []),
            trainer=_assignments("--trainer", trainer or []), architecture=architecture,
            width=width, steps=steps, lr=lr, normalize=normalize.value, bias=bias.value, seed=seed,
            device=device, checkpoint_every=checkpoint_every, overwrite=overwrite,
        )  # fmt: skip
    if figure is not None:
        save_plot(plot_losses(out), figure)
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


def _assignments(option: str, given: Sequence[str]) -> dict[str, Any]:
    """Fields as ``k=32``. A value is JSON, or else a text."""
    found: dict[str, Any] = {}
    for one in given:
        name, equals, value = one.partition("=")
        if not equals or not name:
            raise InvalidArgumentError(f"{option} {one!r}: give a field as k=32")
        try:
            found[name] = load_json(value)
        except ValueError:
            found[name] = value
    return found
