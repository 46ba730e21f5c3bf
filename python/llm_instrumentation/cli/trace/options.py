"""The options that several commands of `mrm-trace` have."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Annotated

import typer

from ..exit_codes import TraceExitCode, epilog

__all__ = ["CODES", "Config", "Input", "Verbose", "log"]

CODES = epilog(TraceExitCode)

Config = Annotated[Path, typer.Option("--config", "-c", help="The experiment file (YAML).")]
Input = Annotated[Path, typer.Option("--input", "-i", help="Results: a run, or a folder of them.")]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Log what happens to stderr.")]


def log(verbose: bool) -> None:
    """Logs to the standard error; warnings alone without --verbose."""
    logging.basicConfig(
        level=logging.DEBUG if verbose else logging.WARNING,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        stream=sys.stderr,
    )
