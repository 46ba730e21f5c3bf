"""`mrm-trace report`: one page over all runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from ..console import counted, out, print_json, warning
from ..options import Json
from .failures import results_failures
from .options import CODES, Input, Verbose, log

__all__ = ["app"]

app = typer.Typer()


@app.command(epilog=CODES)
def report(
    results: Input,
    output: Annotated[Path, typer.Option("--output", "-o", help="Where the report goes.")] = Path(
        "reports/"
    ),
    as_json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Write one HTML page, tables and figures over all runs of a folder."""
    log(verbose)
    from ...mrm.reporter import load_sweep, write_sweep_report

    with results_failures():
        sweep = load_sweep(results)
        page = write_sweep_report(sweep, output)
    if as_json:
        print_json(
            {
                "report": str(page),
                "runs": [run.run_id for run in sweep.runs],
                "left_out": {one.run_id: one.reason for one in sweep.left_out},
            }
        )
        return
    for one in sweep.left_out:
        warning(f"{one.run_id} is left out: {one.reason}")
    runs = counted(len(sweep.runs), "run")
    out.print(f"{escape(str(page))}: {runs}, {len(sweep.left_out)} left out")
