"""`strap timeline`: a capture as a Perfetto trace, or what it waited for."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..._pages import units
from ...errors import InvalidArgumentError
from ..console import print_json, shown
from ..figures import save_plot
from ..options import CODES, MACHINE, Json, OverwriteOut, Stream

if TYPE_CHECKING:
    from ...timeline import Timeline

__all__ = ["app"]

app = typer.Typer()


@app.command(epilog=CODES, rich_help_panel=MACHINE)
def timeline(
    stream: Stream,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="Write a Perfetto trace, for ui.perfetto.dev."),
    ] = None,
    profiler: Annotated[
        Path | None,
        typer.Option("--profiler", help="With --out: add the JSON of PyTorch's profiler."),
    ] = None,
    overwrite: OverwriteOut = False,
    figure: Annotated[
        Path | None, typer.Option("--figure", help="Draw the waits to this PNG, SVG or PDF file.")
    ] = None,
    table: Annotated[
        Path | None, typer.Option("--table", help="Write the intervals to this CSV file.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Show when a capture did what: as a Perfetto trace, or as a summary of its waits.

    With --out it writes a trace. Without it, it tells whether a capture with probes waited for the
    disk or for the CPU; --figure and --table go with that.
    """
    if out is not None and (figure is not None or table is not None):
        raise InvalidArgumentError("--figure and --table are of the summary: leave --out away")
    if out is None and (profiler is not None or overwrite):
        raise InvalidArgumentError("--profiler and --overwrite are of a trace: give --out too")
    if out is not None:
        from ...timeline import write_timeline
        from ..captures import damage_told

        with damage_told(stream):
            found = write_timeline(stream, out, profiler=profiler, overwrite=overwrite)
        if as_json:
            print_json(found)
        else:
            _print_trace(found)
        return
    from ...probes import correlation

    intervals = correlation.timeline(stream)
    waits = _waits(intervals)
    if table is not None:
        intervals.to_csv(table)
    if figure is not None:
        save_plot(correlation.plot_timeline(intervals), figure)
    if as_json:
        print_json(waits)
    else:
        _print_waits(waits)


def _print_trace(found: Timeline) -> None:
    print(
        f"{shown(found.path)}: {found.packets:,} packets, {found.steps:,} steps, "
        f"{found.tokens:,} tokens, {units.size(found.bytes)}; open it in https://ui.perfetto.dev"
    )
    if found.profiler_events:
        print(f"  {found.profiler_events:,} events of the profiler")
    if found.missing:
        print(f"  {found.missing:,} tensors that were not captured")
    if found.untimed:
        print(f"  {found.untimed:,} packets without a time are left out")


def _waits(intervals: Any) -> dict[str, Any]:
    """Whether a capture waited for the disk or for the CPU, by the intervals of its probes."""
    return {
        "seconds": float(intervals["interval_s"].sum()),
        "intervals": len(intervals),
        "waited_s": float((intervals["stall_share"] * intervals["interval_s"]).sum()),
        "held_up_s": {
            what: float(intervals.loc[intervals["bottleneck"] == what, "interval_s"].sum())
            for what in ("disk", "cpu")
        },
    }


def _print_waits(waits: dict[str, Any]) -> None:
    print(
        f"{waits['seconds']:.1f} s in {waits['intervals']:,} intervals; "
        f"the model waited {waits['waited_s']:.1f} s"
    )
    for what, held in waits["held_up_s"].items():
        print(f"  held up by the {what}: {held:.1f} s")
