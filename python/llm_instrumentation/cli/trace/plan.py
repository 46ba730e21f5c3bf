"""`mrm-trace plan`: the runs of an experiment."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer
from rich.markup import escape
from rich.table import Table

from ..console import out, print_json
from ..options import Json
from .failures import check, load
from .options import CODES, Config, Verbose, log

if TYPE_CHECKING:
    from ...mrm.config import RunConfig

__all__ = ["app"]

app = typer.Typer()


@app.command(epilog=CODES)
def plan(config: Config, as_json: Json = False, verbose: Verbose = False) -> None:
    """List the runs of an experiment, and whether each has finished."""
    log(verbose)
    from ...mrm.config import expand_sweep, validate_config_semantics
    from ...mrm.runs import find_finished

    experiment = load(config)
    check(experiment, as_json, validate_config_semantics)
    runs = expand_sweep(experiment)
    finished = {
        run.run_id: folder.run_id
        for run in runs
        if not run.is_warmup and (folder := find_finished(experiment, run)) is not None
    }
    if as_json:
        print_json(
            {
                "experiment": experiment.experiment.name,
                "runs": [
                    {
                        **run.model_dump(mode="json", exclude={"model"}),
                        "model": run.model.id,
                        "engine": run.model.engine.value,
                        "finished_as": finished.get(run.run_id),
                    }
                    for run in runs
                ],
            }
        )
        return
    warmups = sum(run.is_warmup for run in runs)
    out.print(f"Experiment : {escape(experiment.experiment.name)}")
    out.print(f"Total runs : {len(runs)}  ({warmups} warmup, {len(runs) - warmups} actual)")
    table = Table("#", "Model", "Engine", "Ctx", "Batch", "Out", "Run", "State")
    for number, run in enumerate(runs, 1):
        table.add_row(
            str(number), run.model.id, run.model.engine.value, str(run.context_length),
            str(run.batch_size), str(run.output_tokens), _kind(run),
            "finished" if run.run_id in finished else "to run",
        )  # fmt: skip
    out.print(table)


def _kind(run: RunConfig) -> str:
    return f"{'warmup' if run.is_warmup else 'rep'}{run.rep_index}"
