"""What several commands declare: options, the panels of the help, and the exit codes below it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .exit_codes import ExitCode, epilog

__all__ = [
    "CAPTURES", "CODES", "MACHINE", "MEMORY", "MODELS", "PASSED_ON", "Device", "FeatureFolder",
    "Json", "Layers", "Overwrite", "OverwriteOut", "Steps", "Stream", "Tokenizer",
]  # fmt: skip

CODES = epilog(ExitCode)
CAPTURES, MODELS = "Captures", "Models"
MACHINE, MEMORY = "The machine beside a program", "Memory traces"

# For subcommands that pass all their arguments on to another program.
PASSED_ON = {
    "allow_extra_args": True,
    "allow_interspersed_args": False,
    "ignore_unknown_options": True,
}

Stream = Annotated[Path, typer.Argument(help="The stream of a capture.", metavar="STREAM")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]
Layers = Annotated[
    list[str] | None,
    typer.Argument(help="Names; * and ? match (default: all).", metavar="LAYER"),
]
Steps = Annotated[
    str | None, typer.Option("--steps", help="A number, a range as 0:10, or numbers as 1,5.")
]
Tokenizer = Annotated[
    str | None, typer.Option("--tokenizer", help="For texts (default: that of the model).")
]
FeatureFolder = Annotated[
    Path | None, typer.Option("--features", help="A folder of strap sae features --out.")
]
Device = Annotated[str, typer.Option("--device", help="As cpu or cuda.")]
Overwrite = Annotated[
    bool, typer.Option("--overwrite", help="Replace what is at OUT, whatever it is.")
]
OverwriteOut = Annotated[
    bool, typer.Option("--overwrite", help="Replace what is at --out, whatever it is.")
]
