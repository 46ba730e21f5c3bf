"""`strap salvage`: the intact packets of a damaged stream, as a new one."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..console import print_json
from ..options import CAPTURES, CODES, Json

__all__ = ["app"]

_TOLD = 20  # at most so many lost packets and lost ranges are listed

app = typer.Typer()


@app.command(epilog=CODES, rich_help_panel=CAPTURES)
def salvage(
    stream: Annotated[
        Path, typer.Argument(help="The damaged stream; it is not changed.", metavar="STREAM")
    ],
    out: Annotated[
        Path | None,
        typer.Option("--out", help="The new stream (default: NAME.salvaged.stream beside it)."),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", "--force", help="Replace an existing file.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Copy the intact packets of a damaged stream to a new one, and list what is lost."""
    from ...analysis import salvage as salvaging

    report = salvaging.salvage(stream, out, force=overwrite)
    if as_json:
        print_json(report)
        return
    print(
        f"{report.path}: {report.packets:,} packets, {report.bytes:,} bytes; {report.verified:,} "
        f"with the checksum of the index, {report.repaired:,} with a new header, "
        f"{report.unlisted:,} that no index lists"
    )
    if report.problem:
        print(f"  {report.problem}")
    for packet in report.lost_packets[:_TOLD]:
        print(f"  lost: {packet.name!r} at byte {packet.offset:,}: {packet.reason}")
    if (more := len(report.lost_packets) - _TOLD) > 0:
        print(f"  lost: {more:,} more, the new index notes them")
    for stretch in report.lost_ranges[:_TOLD]:
        print(f"  not copied: {stretch.length:,} bytes from byte {stretch.offset:,} on")
    if (more := len(report.lost_ranges) - _TOLD) > 0:
        print(f"  not copied: {more:,} more stretches, {report.lost_bytes:,} bytes in all")
