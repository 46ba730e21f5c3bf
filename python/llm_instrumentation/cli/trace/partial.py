"""`mrm-trace partial`: a part of a trace."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from ..console import out, print_json
from ..options import Json
from .failures import results_failures, usage
from .options import CODES, Verbose, log

__all__ = ["app"]

app = typer.Typer()


@app.command(epilog=CODES)
def partial(
    trace: Annotated[Path, typer.Argument(help="A trace: a Parquet file or a folder of them.")],
    part: Annotated[
        str, typer.Option("--part", "-p", help="Which part of how many, such as 3/16.")
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="The file to write.")],
    as_json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Analyse a part of a trace, for `merge`.

    The parts are whole row groups of the trace. They can be analysed at the same time, on any
    machine.
    """
    log(verbose)
    from ...mrm.analyser import analyse_part, split_trace

    number, of = _part(part)
    with results_failures():
        row_groups = split_trace(trace, of)[number - 1]
        rows = analyse_part(trace, row_groups, output)
    if as_json:
        groups = [row_groups.start, row_groups.stop]
        print_json({"partial": str(output), "row_groups": groups, "rows": rows})
        return
    out.print(f"{escape(str(output))}: {rows:,} rows, {len(row_groups)} row groups")


def _part(text: str) -> tuple[int, int]:
    number, _, of = text.partition("/")
    if not (number.isdecimal() and of.isdecimal() and 1 <= int(number) <= int(of)):
        usage(f"--part: {text!r} is no part K/N, with K from 1 to N, such as 3/16")
    return int(number), int(of)
