"""`strap trace`: the commands of `mrm-trace`."""

from __future__ import annotations

import typer

from ..options import MEMORY, PASSED_ON

__all__ = ["app"]

app = typer.Typer()


@app.command(add_help_option=False, context_settings=PASSED_ON, rich_help_panel=MEMORY)
def trace(context: typer.Context) -> None:
    """Trace, label and analyse a model's memory, as mrm-trace does. Try: strap trace --help."""
    from ..trace import TRACE

    raise typer.Exit(TRACE.run("strap trace", context.args))
