"""`strap top`: devices and processes, as they are now."""

from __future__ import annotations

import contextlib
import sys
from enum import Enum
from typing import Annotated

import typer
from rich.console import Console

from ..._signals import ended_by_sigterm
from ...errors import InvalidArgumentError
from ..options import CODES, MACHINE

__all__ = ["app"]

app = typer.Typer()


class Sort(str, Enum):
    CPU = "cpu"
    FAULTS = "faults"
    OFF_CPU = "off-cpu"
    IO = "io"


@app.command(epilog=CODES, rich_help_panel=MACHINE)
def top(
    interval: Annotated[float, typer.Option("--interval", help="Seconds.")] = 1.0,
    device: Annotated[
        list[str] | None,
        typer.Option("--device", help="Disk or partition; may be given again (default: all)."),
    ] = None,
    sort: Annotated[Sort, typer.Option("--sort", help="The order of the processes.")] = Sort.CPU,
    once: Annotated[bool, typer.Option("--once", help="Print one interval, then exit.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print a JSON object for each interval, as a line.")
    ] = False,
) -> None:
    """Show a live view of devices and processes; q or Ctrl-C ends it.

    If the output is no terminal, it prints a table for each interval.
    """
    from ...probes.top import View, Watched, print_intervals, show_live

    if not 0 < interval < 1e9:  # also refuses NaN
        raise InvalidArgumentError(f"--interval {interval:g}: give seconds above 0 and below 10^9")
    console = Console(highlight=False, markup=False, emoji=False)
    live = sys.stdout.isatty() and not console.is_dumb_terminal and not (once or as_json)
    with contextlib.ExitStack() as stack:
        watched = Watched(stack, device or [])
        view = View(interval, sort.value, watched.missing, keys=live and sys.stdin.isatty())
        stack.enter_context(ended_by_sigterm())
        with contextlib.suppress(KeyboardInterrupt):
            if live:
                show_live(console, view, watched)
            else:
                print_intervals(console, view, watched, once=once, as_json=as_json)
