"""`strap sae`: sparse autoencoders on the rows of captures."""

from __future__ import annotations

import typer

from ...options import CODES
from . import evaluate, features, latents, train

__all__ = ["app"]

app = typer.Typer(
    help="Train sparse autoencoders of SAELens on captures, evaluate and explain them.",
    epilog=CODES,
)
for _command in (train, evaluate, features, latents):
    app.add_typer(_command.app)
