"""`strap verify`: whether the packets of a capture are intact."""

from __future__ import annotations

import typer

from ..._pages import units
from ..console import print_json, shown, warning
from ..exit_codes import ExitCode
from ..options import CAPTURES, CODES, Json, Stream

__all__ = ["app"]

_TOLD = 20  # at most so many damaged packets are listed

app = typer.Typer()


@app.command(epilog=CODES, rich_help_panel=CAPTURES)
def verify(stream: Stream, as_json: Json = False) -> None:
    """Read every packet, compare its checksum, and list the damaged ones."""
    from ...analysis.reading import verify as reading
    from ...progress.bars import bytes_bar
    from ..captures import open_capture, way_out

    with open_capture(stream, warn=False) as reader, bytes_bar("reading") as bar:
        found = reading.verify(reader, bar)
    if as_json:
        print_json(found)
    else:
        print(
            f"{shown(found.path)}: {found.packets:,} packets read, {units.size(found.bytes)}; "
            f"{found.checksums:,} with a checksum in the index, {len(found.damaged):,} damaged"
        )
        if found.running:
            print("  a capture is writing it: what its index does not list yet was not read")
        if found.problem:
            print(f"  {found.problem}")
        for packet in found.damaged[:_TOLD]:
            print(f"  {packet.reason}")
        if (more := len(found.damaged) - _TOLD) > 0:
            print(f"  {more:,} more; all are in --json")
        if not found.intact:
            warning(way_out(stream))
    raise typer.Exit(ExitCode.OK if found.intact else ExitCode.DAMAGED)
