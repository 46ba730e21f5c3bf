"""`strap similarity`: how similar layers are."""

from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path
from typing import Annotated

import typer

from ...errors import CorruptError
from ..console import print_json, shown, table
from ..exit_codes import ExitCode
from ..figures import check_figure
from ..options import CAPTURES, CODES, Json, Stream
from ..program import CommandError
from ..values import numbers

__all__ = ["app"]

app = typer.Typer()


@app.command(epilog=CODES, rich_help_panel=CAPTURES)
def similarity(
    stream: Stream,
    layers: Annotated[
        list[str] | None,
        typer.Argument(help="Names; * and ? match (default: the blocks).", metavar="LAYER"),
    ] = None,
    other: Annotated[
        Path | None,
        typer.Option("--other", help="A capture of the same tokens to compare with."),
    ] = None,
    other_layers: Annotated[
        list[str] | None,
        typer.Option("--other-layer", help="A name in it; again for more (default: as LAYER)."),
    ] = None,
    rows: Annotated[
        int | None, typer.Option("--rows", help="So many tokens, spread evenly (default: all).")
    ] = None,
    biased: Annotated[
        bool, typer.Option("--biased", help="The biased estimate of older papers.")
    ] = False,
    without_tokens: Annotated[
        str | None, typer.Option("--without-tokens", help="Ids to leave out, as 101,102.")
    ] = None,
    without_calls: Annotated[
        bool, typer.Option("--without-calls", help="Each vector is a row, token or not.")
    ] = False,
    figure: Annotated[
        Path | None, typer.Option("--figure", help="Draw the matrix to a PNG, PDF or SVG file.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Compare the layers of a capture with each other, or with those of another, by linear CKA."""
    from ...analysis.similarity import cka
    from ..captures import open_capture

    check_figure("--figure", figure)
    left_out = numbers("--without-tokens", without_tokens)
    with contextlib.ExitStack() as stack:
        a = stack.enter_context(open_capture(stream))
        b = None if other is None else stack.enter_context(open_capture(other))
        try:
            found = cka(
                a, layers or None, b, not biased, rows, other_layers=other_layers or None,
                without_tokens=left_out, without_calls=without_calls,
            )  # fmt: skip
        except CorruptError as error:
            raise CommandError(ExitCode.DAMAGED, str(error)) from error
    if figure is not None:
        from ...analysis.plots import plot_similarity, save_figure

        save_figure(plot_similarity(found), figure)
    if as_json:
        print_json({**dataclasses.asdict(found), "values": found.values.tolist()})
        return
    print(found.title)
    rounded = found.values.round(3) + 0.0  # not -0.000
    table(
        ["", *map(str, range(len(found.other_layers))), "layer"],
        [
            [str(number), *(f"{value:.3f}" for value in of_layer), shown(name)]
            for number, (name, of_layer) in enumerate(zip(found.layers, rounded, strict=True))
        ],
    )
    if found.other_layers != found.layers:
        print(f"columns: {', '.join(map(shown, found.other_layers))}")
