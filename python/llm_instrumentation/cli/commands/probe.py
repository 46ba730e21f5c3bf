"""`strap probe`: the program strap-probe."""

from __future__ import annotations

import typer

from ..options import MACHINE, PASSED_ON

__all__ = ["app"]

app = typer.Typer()


@app.command(add_help_option=False, context_settings=PASSED_ON, rich_help_panel=MACHINE)
def probe(context: typer.Context) -> None:
    """Run strap-probe, which prints a line of JSON for each interval. Try: strap probe --help."""
    from ...probes.program import run

    raise typer.Exit(run(context.args))
