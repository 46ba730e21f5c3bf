"""`mrm-trace validate`: an experiment file, and this machine."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from .. import console
from ..console import out, print_json
from ..exit_codes import TraceExitCode
from ..options import Json
from .failures import load, usage
from .options import CODES, Verbose, log

if TYPE_CHECKING:
    from ...mrm.config import ValidationResult

__all__ = ["app"]

app = typer.Typer()


@app.command(epilog=CODES)
def validate(
    config: Annotated[
        Path | None, typer.Option("--config", "-c", help="The experiment file (YAML).")
    ] = None,
    machine: Annotated[
        bool, typer.Option("--machine", help="Show which collectors can run here, and why not.")
    ] = False,
    as_json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Check an experiment file, its models and this machine."""
    log(verbose)
    if config is None and not machine:
        usage("give --config FILE, --machine, or both")
    from ...mrm.config import ValidationResult

    told: dict[str, Any] = {}
    result = ValidationResult()
    if machine:
        told["machine"] = _survey(as_json)
    if config is not None:
        from ...mrm.api import Experiment

        result = Experiment(load(config)).check()
        told |= {"valid": result.is_valid, "errors": result.errors, "warnings": result.warnings}
        if not as_json:
            _say_checks(config, result)
    if as_json:
        print_json(told)
    raise typer.Exit(TraceExitCode.OK if result.is_valid else TraceExitCode.USAGE)


def _say_checks(config: Path, result: ValidationResult) -> None:
    for error in result.errors:
        console.error(error)
    for warning in result.warnings:
        console.warning(warning)
    if result.is_valid:
        out.print(f"{escape(str(config))} is valid")


def _survey(as_json: bool) -> list[dict[str, Any]]:
    from ...mrm.collector import survey_machine

    found = survey_machine()
    if not as_json:
        title = "What it gives; where it cannot run: the error, and what to use instead"
        table = Table("Collector", "Here", title, show_lines=True)
        for one in found:
            told = escape(one.gives)
            if one.reason:
                told += f"\n[yellow]{escape(one.reason)}[/yellow]"
            table.add_row(
                one.name, "[green]yes[/green]" if one.available else "[red]no[/red]", told
            )
        out.print(table)
    return [asdict(one) for one in found]
