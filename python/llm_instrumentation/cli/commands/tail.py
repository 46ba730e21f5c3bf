"""`strap tail`: the tensors of a capture, as they come."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from ..console import UNKNOWN, or_unknown, shown
from ..options import CAPTURES, CODES, Layers, Stream

if TYPE_CHECKING:
    from ...analysis.activation import Activation
    from ...analysis.reader import ActivationReader

__all__ = ["app"]

app = typer.Typer()


@app.command(epilog=CODES, rich_help_panel=CAPTURES)
def tail(
    stream: Stream,
    layers: Layers = None,
    lines: Annotated[
        int, typer.Option("--lines", "-n", help="How many of the tensors so far to print.", min=0)
    ] = 10,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print a JSON object a line and nothing else.")
    ] = False,
) -> None:
    """Print the tensors of a running capture as they come, until it ends."""
    from ..captures import open_capture

    names = layers or None
    with open_capture(stream) as reader:
        first = _count(reader, names) - lines
        for number, activation in enumerate(reader.follow(names)):
            if number >= first:
                text = json.dumps(_fields(activation)) if as_json else _line(activation)
                sys.stdout.write(f"{text}\n")
                sys.stdout.flush()


def _count(reader: ActivationReader, names: Sequence[str] | None) -> int:
    from ...analysis.reader import UnknownActivationError

    try:
        return len(reader.select(names))
    except UnknownActivationError:  # the layer may come later
        return 0


def _fields(activation: Activation) -> dict[str, object]:
    return {
        "step": activation.step,
        "token": activation.token,
        "rank": activation.rank,
        "layer": activation.name,
        "shape": None if activation.shape is None else list(activation.shape),
        "dtype": activation.dtype,
        "time_ns": activation.time_ns,
    }


def _line(activation: Activation) -> str:
    shape = "x".join(map(str, activation.shape or ())) or UNKNOWN
    step, dtype = or_unknown(activation.step), activation.dtype or UNKNOWN
    return f"{step:>8}  {shape:>16}  {dtype:>8}  {shown(activation.name)}"
