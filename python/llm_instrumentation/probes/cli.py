"""The command ``strap``."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Sequence
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from ..errors import (
    CorruptError,
    InvalidArgumentError,
    NotFoundError,
    StrapError,
    StrapPermissionError,
    UnsupportedError,
)

__all__ = ["app", "main"]

_CODES = (
    "Exit codes: 0 all went well; 2 a bad argument, or a file of something else; 3 the kernel "
    "takes no programs from this user; 4 it cannot run them; 5 there is no such device or file; "
    "130 interrupted; 1 all else."
)
#: What is wrong, by the exit code; 1 is all else.
_EXIT_CODES = {
    StrapPermissionError: 3,
    UnsupportedError: 4,
    NotFoundError: 5,
    FileNotFoundError: 5,
    InvalidArgumentError: 2,
    CorruptError: 2,
}

app = typer.Typer(
    name="strap",
    help="The machine beside the program, and what is left of a damaged capture.",
    epilog=_CODES,
    add_completion=False,
    pretty_exceptions_enable=False,
)


class Sort(str, Enum):
    CPU = "cpu"
    FAULTS = "faults"
    OFF_CPU = "off-cpu"
    IO = "io"


@app.command(
    add_help_option=False,
    context_settings={
        "allow_extra_args": True,
        "allow_interspersed_args": False,
        "ignore_unknown_options": True,
    },
)
def probe(context: typer.Context) -> None:
    """Run strap-probe: a line of JSON for each interval. Try: strap probe --help."""
    from .program import run

    raise typer.Exit(run(context.args))


@app.command(epilog=_CODES)
def top(
    interval: Annotated[float, typer.Option("--interval", help="Seconds.")] = 1.0,
    device: Annotated[
        list[str] | None,
        typer.Option("--device", help="Disk or partition; may be given again (default: all)."),
    ] = None,
    sort: Annotated[Sort, typer.Option("--sort", help="What orders the processes.")] = Sort.CPU,
    once: Annotated[bool, typer.Option("--once", help="One interval, and no more.")] = False,
) -> None:
    """Show what devices and processes do, live; q or Ctrl-C ends it.

    Where the output is no terminal it is a table for each interval.
    """
    from .top import run

    run(interval, device or [], sort.value, once)


@app.command(epilog=_CODES)
def export(
    source: Annotated[Path, typer.Argument(help="A file of snapshots.", metavar="FILE.jsonl")],
    target: Annotated[Path, typer.Argument(help="What to write.", metavar="FILE.parquet")],
) -> None:
    """Write a file of snapshots as Parquet, a row for each thing counted."""
    from .export import export_snapshots

    rows = export_snapshots(source, target)
    typer.echo(f"{target}: {rows:,} rows")


@app.command(epilog=_CODES)
def timeline(
    stream: Annotated[Path, typer.Argument(help="Of a capture with probes.", metavar="STREAM")],
    figure: Annotated[
        Path | None, typer.Option("--figure", help="A PNG, SVG or PDF to draw it to.")
    ] = None,
    table: Annotated[
        Path | None, typer.Option("--table", help="A CSV file for its intervals.")
    ] = None,
) -> None:
    """Tell whether a capture waited for the disk or for the CPU, and when."""
    from .correlation import plot_timeline
    from .correlation import timeline as read

    found = read(stream)
    seconds = found["interval_s"].sum()
    waited = (found["stall_share"] * found["interval_s"]).sum()
    typer.echo(f"{seconds:.1f} s in {len(found):,} intervals; the model waited {waited:.1f} s")
    for what in ("disk", "cpu"):
        held_up = found[found["bottleneck"] == what]
        typer.echo(f"  held up by the {what}: {held_up['interval_s'].sum():.1f} s")
    if table is not None:
        found.to_csv(table)
    if figure is not None:
        try:
            plot_timeline(found).savefig(figure)
        except ValueError as error:  # no such kind of file
            raise InvalidArgumentError(f"--figure {figure}: {error}") from error


@app.command(epilog=_CODES)
def salvage(
    stream: Annotated[Path, typer.Argument(help="However damaged; only read.", metavar="STREAM")],
    out: Annotated[
        Path | None,
        typer.Option("--out", help="The new stream (default: NAME.salvaged.stream beside it)."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace what stands there.")] = False,
) -> None:
    """Copy what is intact of a damaged stream to a new one, and tell what was lost."""
    from ..analysis.salvage import salvage as run

    report = run(stream, out, force=force, progress=_progress())
    typer.echo(
        f"{report.path}: {report.packets:,} packets, {report.bytes:,} bytes; {report.verified:,} "
        f"with the checksum of the index, {report.repaired:,} with a new header, "
        f"{report.unlisted:,} that no index lists"
    )
    if report.problem:
        typer.echo(f"  {report.problem}")
    shown = 20
    for packet in report.lost_packets[:shown]:
        typer.echo(f"  lost: {packet.name!r} at byte {packet.offset:,}: {packet.reason}")
    if (more := len(report.lost_packets) - shown) > 0:
        typer.echo(f"  lost: {more:,} more, the new index notes them")
    for stretch in report.lost_ranges[:shown]:
        typer.echo(f"  not copied: {stretch.length:,} bytes from byte {stretch.offset:,} on")
    if (more := len(report.lost_ranges) - shown) > 0:
        typer.echo(f"  not copied: {more:,} more stretches, {report.lost_bytes:,} bytes in all")


def _progress() -> Callable[[int, int], None] | None:
    """A line on a terminal; none elsewhere."""
    if not sys.stderr.isatty():
        return None

    def show(done: int, total: int) -> None:
        print(f"\r{100 * done // total:3d} %", end="\r", file=sys.stderr, flush=True)

    return show


# The root of typer's errors of the command line; older releases take it from click, newer ones
# carry it themselves.
_ClickError: Any = typer.BadParameter.__mro__[2]


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Runs the command and exits; what is wrong is a line on the standard error."""
    given = list(sys.argv[1:] if arguments is None else arguments) or ["--help"]
    warnings.showwarning = lambda message, *_: print(f"strap: {message}", file=sys.stderr)
    try:
        code = int(app(args=given, standalone_mode=False) or 0)
    except _ClickError as error:
        code = _say(error.format_message(), 2)
    except (StrapError, OSError) as error:
        code = next((code for kind, code in _EXIT_CODES.items() if isinstance(error, kind)), 1)
        _say(str(error), code)
    except (KeyboardInterrupt, typer.Abort):
        code = 130
    sys.exit(code)


def _say(message: str, code: int) -> int:
    print(f"strap: {' '.join(message.split())}", file=sys.stderr)
    return code


if __name__ == "__main__":
    main()
