"""`strap salvage`: the intact packets of a damaged stream, or of a ring file, as a new one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ...errors import InvalidArgumentError
from ..console import print_json
from ..options import CAPTURES, CODES, Json

if TYPE_CHECKING:
    from ...analysis.salvage import RingSalvageReport, SalvagedStep, SalvageReport

__all__ = ["app"]

_TOLD = 20  # at most so many lost packets, lost ranges and steps are listed

app = typer.Typer()


@app.command(epilog=CODES, rich_help_panel=CAPTURES)
def salvage(
    files: Annotated[
        list[Path],
        typer.Argument(
            help="The damaged stream; it is not changed. Or the word ring, the ring file of a "
            "flight recorder whose process was killed, and the new stream.",
            metavar="STREAM | ring FILE OUT",
        ),
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

    report: SalvageReport | RingSalvageReport
    if len(files) == 1:
        report = salvaging.salvage(files[0], out, force=overwrite)
    elif len(files) == 3 and str(files[0]) == "ring" and out is None:
        report = salvaging.salvage_ring(files[1], files[2], force=overwrite)
    else:
        given = " ".join(map(str, files)) + ("" if out is None else f" --out {out}")
        raise InvalidArgumentError(f"{given}: give STREAM, or ring FILE OUT")
    if as_json:
        print_json(report)
    elif isinstance(report, salvaging.SalvageReport):
        _print_stream(report)
    else:
        _print_ring(report)


def _print_stream(report: SalvageReport) -> None:
    print(
        f"{report.path}: {report.packets:,} packets, {report.bytes:,} bytes; {report.verified:,} "
        f"with the checksum of the index, {report.repaired:,} with a new header, "
        f"{report.unlisted:,} that no index lists"
    )
    if report.problem:
        print(f"  {report.problem}")
    _print_some(
        [f"lost: {p.name!r} at byte {p.offset:,}: {p.reason}" for p in report.lost_packets],
        "lost: {:,} more, the new index notes them",
    )
    _print_some(
        [
            f"not copied: {one.length:,} bytes from byte {one.offset:,} on"
            for one in report.lost_ranges
        ],
        f"not copied: {{:,}} more stretches, {report.lost_bytes:,} bytes in all",
    )


def _print_ring(report: RingSalvageReport) -> None:
    whole = [step.step for step in report.steps if step.whole]
    numbers = [number for number in whole if number is not None]
    told = f", {min(numbers)} to {max(numbers)}" if numbers else ""
    print(
        f"{report.path}: {report.packets:,} packets, {report.bytes:,} bytes, of process "
        f"{report.pid}; {len(whole):,} whole steps{told}"
    )
    if report.problem:
        print(f"  {report.problem}")
    if report.damaged:
        print(f"  left out: {report.damaged:,} packets whose values are damaged")
    _print_some(
        [
            f"step {'unknown' if one.step is None else one.step} is not whole: "
            f"{one.packets:,} packets, {_why(one)}"
            for one in report.steps
            if not one.whole
        ],
        "not whole: {:,} more steps, the new index notes them",
    )


def _why(step: SalvagedStep) -> str:
    if not step.ended:
        return "the model had not ended it"
    if step.missing:
        return f"and {step.missing:,} are missing"
    return f"and {step.not_captured:,} tensors could not be captured"


def _print_some(lines: Sequence[str], more: str) -> None:
    for line in lines[:_TOLD]:
        print(f"  {line}")
    if (left := len(lines) - _TOLD) > 0:
        print(f"  {more.format(left)}")
