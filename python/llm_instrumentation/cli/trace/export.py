"""`mrm-trace export`: finished runs as an archive."""

from __future__ import annotations

from dataclasses import asdict
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from ..._pages import units
from ..console import counted, out, print_json, warning
from ..options import Json
from .failures import results_failures
from .options import CODES, Input, Verbose, log

__all__ = ["app"]

app = typer.Typer()


class Format(str, Enum):
    HF = "hf"
    ZENODO = "zenodo"


@app.command(epilog=CODES)
def export(
    results: Input,
    to: Annotated[Format, typer.Option("--format", "-f", help="What to make.")] = Format.HF,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Where it goes; dist/FORMAT by default.")
    ] = None,
    as_json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Pack finished runs as a Hugging Face data set or for Zenodo. Nothing is uploaded."""
    log(verbose)
    from ...mrm.reporter import export_hf, export_zenodo

    pack = export_hf if to is Format.HF else export_zenodo
    with results_failures():
        result = pack(results, output or Path("dist") / to.value)
    if as_json:
        print_json(asdict(result))
        return
    for name, reason in result.left_out.items():
        warning(f"{name} is left out: {reason}")
    runs, size = counted(len(result.runs), "run"), units.size(result.size_bytes)
    out.print(f"{escape(str(result.path))}: {runs}, {result.files} files, {size}")
