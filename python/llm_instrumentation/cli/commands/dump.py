"""`strap dump`: has the flight recorders of a running process write their steps."""

from __future__ import annotations

from typing import Annotated

import typer

from ..console import print_json, shown
from ..options import CAPTURES, CODES, Json

__all__ = ["app"]

app = typer.Typer()


@app.command(epilog=CODES, rich_help_panel=CAPTURES)
def dump(
    pid: Annotated[int, typer.Argument(help="The number of the process.", metavar="PID", min=1)],
    reason: Annotated[
        str, typer.Option("--reason", help="What the dump says of its trigger.")
    ] = "asked for by strap dump",
    timeout: Annotated[
        float, typer.Option("--timeout", help="How many seconds to wait for the dumps.", min=0.1)
    ] = 60.0,
    as_json: Json = False,
) -> None:
    """Have the flight recorders of a running process write their last steps now."""
    from ..._dump_requests import request_dump

    dumps = request_dump(pid, reason, timeout_s=timeout)
    if as_json:
        print_json({"dumps": dumps})
        return
    for one in dumps:
        steps = "no steps"
        if one.first_step is not None:
            steps = f"steps {one.first_step} to {one.last_step}"
        print(f"{shown(str(one.path))}: {steps}")
        if one.problem:
            print(f"  it is not whole: {one.problem}")
