"""`mrm-trace run`: all runs of an experiment that have not finished."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from ..._signals import ended_by_sigterm
from ..console import out, print_json
from ..exit_codes import TraceExitCode
from ..options import Json
from .failures import check, load, usage
from .options import CODES, Config, Verbose, log

if TYPE_CHECKING:
    from ...mrm.runner import RunOutcome

__all__ = ["app"]

app = typer.Typer()


@app.command(epilog=CODES)
def run(
    config: Config,
    force: Annotated[bool, typer.Option("--force", help="Run finished runs again.")] = False,
    only: Annotated[
        str | None, typer.Option("--only", help="Only runs with this in their name; * and ? match.")
    ] = None,
    as_json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Run all runs that have not finished: collect, label, analyse, report.

    The folder of a run that broke off is marked. The run is repeated in a new folder.
    """
    log(verbose)
    from ...mrm.config import validate_config_semantics, validate_model_paths

    experiment = load(config)
    check(experiment, as_json, validate_config_semantics, validate_model_paths)
    from ...mrm.runner import SweepSelectionError, run_sweep
    from .display import Display

    outcomes: list[RunOutcome] = []
    with ended_by_sigterm(), Display(outcomes, quiet=as_json) as display:
        try:
            run_sweep(experiment, force=force, only=only, listener=display)
            code = _verdict(outcomes)
        except SweepSelectionError as error:
            usage(str(error))
        except KeyboardInterrupt:
            code = TraceExitCode.INTERRUPTED
            display.interrupted()
    if as_json:
        print_json(
            {
                "experiment": experiment.experiment.name,
                "exit_code": int(code),
                "runs": [asdict(outcome) for outcome in outcomes],
            }
        )
    else:
        _say_outcomes(outcomes)
    raise typer.Exit(code)


def _verdict(outcomes: Sequence[RunOutcome]) -> TraceExitCode:
    failed = [one for one in outcomes if one.status == "failed"]
    if not failed:
        return TraceExitCode.OK
    tried = [one for one in outcomes if one.status in ("failed", "finished")]
    if all(one.steps and not any(step["used"] for step in one.steps) for one in tried):
        return TraceExitCode.NOTHING_COLLECTED
    return TraceExitCode.RUN_FAILED


def _say_outcomes(outcomes: Sequence[RunOutcome]) -> None:
    for one in outcomes:
        if one.status != "warmed_up":
            place = one.run_dir if one.report is None else one.report
            out.print(f"{one.status:<12}{one.rows:>14,} rows  {escape(place)}")
            for way in one.ways_to_clean:
                out.print(f"    to be clean: {escape(way)}")
