"""`strap export`: rows of captures, and snapshots of probes."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from ..._pages import units
from ...errors import CorruptError, InvalidArgumentError
from ..console import print_json, shown
from ..options import CAPTURES, CODES, Json, Overwrite, Steps
from ..values import named_layers, numbers, selector

__all__ = ["app"]

app = typer.Typer()


class RowFormat(str, Enum):
    SAFETENSORS = "safetensors"
    PARQUET = "parquet"
    NPY = "npy"
    DATASETS = "datasets"


@app.command(epilog=CODES, rich_help_panel=CAPTURES)
def export(
    sources: Annotated[
        list[Path], typer.Argument(help="Streams, or a file of snapshots.", metavar="STREAM...")
    ],
    out: Annotated[
        Path, typer.Argument(help="The folder, or FILE.parquet for snapshots.", metavar="OUT")
    ],
    form: Annotated[
        RowFormat | None, typer.Option("--format", help="The format of rows; needed for streams.")
    ] = None,
    layers: Annotated[
        list[str] | None,
        typer.Option("--layer", help="A name; * and ? match. May be given again."),
    ] = None,
    columns: Annotated[
        str | None,
        typer.Option("--columns", help="As token_id,step (see docs/howto/exporting.md)."),
    ] = None,
    steps: Steps = None,
    padding: Annotated[bool, typer.Option("--padding", help="Export rows of padding too.")] = False,
    without_tokens: Annotated[
        str | None, typer.Option("--without-tokens", help="Ids of tokens without a row, as 0,1.")
    ] = None,
    dtype: Annotated[
        str | None, typer.Option("--dtype", help="Convert the values (default: as stored).")
    ] = None,
    context: Annotated[
        int | None,
        typer.Option("--context", help="Tokens of a row, for datasets: SAELens' layout.", min=1),
    ] = None,
    overwrite: Overwrite = False,
    as_json: Json = False,
) -> None:
    """Export the rows of layers, a vector for each token, as files of other libraries.

    A file of snapshots of a probe becomes a Parquet file: strap export FILE.jsonl FILE.parquet.
    """
    if form is None:
        rows = (layers, columns, steps, padding, without_tokens, dtype, context, overwrite, as_json)
        _export_snapshots(sources, out, of_rows=any(rows))
        return
    from ..._native import capture_id_of
    from ...analysis.exports import DEFAULT_COLUMNS, export_rows
    from ..captures import damaged

    named = named_layers(layers)
    try:
        report = export_rows(
            sources, out, named, format=form.value, padding=padding, dtype=dtype,
            context=context, columns=DEFAULT_COLUMNS if columns is None else columns.split(","),
            without_tokens=numbers("--without-tokens", without_tokens),
            steps=selector("--steps", steps), overwrite=overwrite,
        )  # fmt: skip
    except CorruptError as error:
        for stream in sources:
            if str(stream) in str(error) and capture_id_of(stream) is not None:
                raise damaged(stream, error) from error
        raise
    if as_json:
        print_json(report)
        return
    contexts = "" if report.contexts is None else f"{report.contexts:,} contexts, "
    print(
        f"{shown(report.path)}: {contexts}{report.rows:,} rows of {len(report.layers):,} layers, "
        f"{units.size(report.bytes)}"
    )
    if report.left_out_rows:
        print(f"  {report.left_out_rows:,} rows that fill no whole context are left out")
    if report.left_out_activations:
        print(f"  {report.left_out_activations:,} activations without a call are left out")


def _export_snapshots(sources: Sequence[Path], out: Path, of_rows: bool) -> None:
    """Makes a Parquet file of a file of snapshots.

    Raises:
        InvalidArgumentError: the command line is that of an export of rows.
    """
    from ..._native import capture_id_of

    if of_rows or len(sources) != 1 or capture_id_of(sources[0]) is not None:
        raise InvalidArgumentError(
            "--format: choose one of safetensors, parquet, npy, datasets for the rows of captures"
        )
    from ...probes.export import export_snapshots

    rows = export_snapshots(sources[0], out)
    print(f"{out}: {rows:,} rows")
