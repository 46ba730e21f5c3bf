"""`strap upload`: captures to object storage."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..._pages import units
from ...errors import InvalidArgumentError
from ..console import print_json, shown
from ..options import CAPTURES, CODES, Json

__all__ = ["app"]

app = typer.Typer()


@app.command(epilog=CODES, rich_help_panel=CAPTURES)
def upload(
    path: Annotated[Path, typer.Argument(help="A stream, or a run folder.", metavar="PATH")],
    url: Annotated[
        str, typer.Argument(help="The folder to upload to: s3://BUCKET/PREFIX/.", metavar="URL")
    ],
    rate: Annotated[
        float | None, typer.Option("--rate", help="Send at most so many megabytes a second.")
    ] = None,
    delete_local: Annotated[
        bool, typer.Option("--delete-local", help="Delete local files that are proven there.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Upload a finished capture to object storage. Run it again, and it goes on where it ended."""
    from ... import storage
    from ...progress.bars import bytes_bar

    if rate is not None and not rate > 0:
        raise InvalidArgumentError(f"--rate {rate!r} must be above 0")
    bytes_per_second = None if rate is None else rate * 1e6
    with bytes_bar("uploading") as bar:
        report = storage.upload(
            path, url, bytes_per_second=bytes_per_second, delete_local=delete_local, progress=bar
        )
    if as_json:
        print_json(report)
        return
    print(
        f"{shown(report.url)}: {len(report.sent):,} files sent, {units.size(report.sent_bytes)}; "
        f"{len(report.skipped):,} were there"
    )
    if report.deleted:
        print(f"  {len(report.deleted):,} local files deleted")
