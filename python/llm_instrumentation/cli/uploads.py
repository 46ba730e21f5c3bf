"""The subcommand `strap upload`: captures to object storage."""

from __future__ import annotations

from pathlib import Path

from .._pages import units
from ..errors import InvalidArgumentError
from ..storage import upload as upload_all
from .console import print_json, progress, shown

__all__ = ["upload"]


def upload(
    path: Path, url: str, megabytes_per_second: float | None, delete_local: bool, as_json: bool
) -> None:
    if megabytes_per_second is not None and not megabytes_per_second > 0:
        raise InvalidArgumentError(f"--rate {megabytes_per_second!r} must be above 0")
    rate = None if megabytes_per_second is None else megabytes_per_second * 1e6
    with progress("uploading") as bar:
        report = upload_all(
            path, url, bytes_per_second=rate, delete_local=delete_local, progress=bar
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
