"""`mrm-trace merge`: the tables of a trace from its parts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from ..console import out, print_json
from ..options import Json
from .failures import results_failures
from .options import CODES, Verbose, log

__all__ = ["app"]

app = typer.Typer()


@app.command(epilog=CODES)
def merge(
    parts: Annotated[list[Path], typer.Argument(help="What `partial` wrote for all parts.")],
    output: Annotated[
        Path, typer.Option("--output", "-o", help="The folder for the tables, as Parquet.")
    ],
    as_json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Compute the tables of a trace from the partial analyses of all its parts.

    The tables equal those of an analysis of the whole trace.
    """
    log(verbose)
    from ...mrm.analyser import merge_parts
    from ...mrm.reporter.parquet_export import export_table

    with results_failures():
        tables = merge_parts(parts)
        written = [output / f"{name}.parquet" for name in tables]
        for path in written:
            export_table(tables[path.stem], path)
    if as_json:
        print_json({"tables": [str(path) for path in written]})
        return
    out.print(f"{escape(str(output))}: {len(written)} tables of {len(parts)} parts")
