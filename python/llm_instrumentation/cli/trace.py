"""The commands of `mrm-trace`, which are those of `strap trace`."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, is_dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from .._signals import ended_by_sigterm
from ..errors import MissingExtraError, StrapError
from ..mrm.config.choices import MetricName
from . import console
from .console import err, out, print_json
from .exit_codes import TraceExitCode, epilog
from .program import CommandError, Program, new_app

if TYPE_CHECKING:
    from ..mrm.analysis import RunAnalysis
    from ..mrm.config import ExperimentConfig, RunConfig, ValidationResult
    from ..mrm.runner import RunOutcome

__all__ = ["TRACE", "app"]

_CODES = epilog(TraceExitCode)

app = new_app(
    "mrm-trace", "Memory traces of LLM inference: collect, label, analyse, report.", _CODES
)

TRACE = Program(
    load=lambda: app,
    usage=TraceExitCode.USAGE,
    interrupted=TraceExitCode.INTERRUPTED,
    failed=TraceExitCode.RUN_FAILED,
    codes={MissingExtraError: TraceExitCode.USAGE},
)

_Config = Annotated[Path, typer.Option("--config", "-c", help="The experiment file (YAML).")]
_Input = Annotated[Path, typer.Option("--input", "-i", help="Results: a run, or a folder of them.")]
_Json = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]
_Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Log what happens to stderr.")]


class Format(str, Enum):
    HF = "hf"
    ZENODO = "zenodo"


@app.command(epilog=_CODES)
def validate(
    config: Annotated[
        Path | None, typer.Option("--config", "-c", help="The experiment file (YAML).")
    ] = None,
    machine: Annotated[
        bool, typer.Option("--machine", help="Show which collectors can run here, and why not.")
    ] = False,
    as_json: _Json = False,
    verbose: _Verbose = False,
) -> None:
    """Check an experiment file, its models and this machine."""
    _log(verbose)
    if config is None and not machine:
        _usage("give --config FILE, --machine, or both")
    from ..mrm.config import ValidationResult

    told: dict[str, Any] = {}
    result = ValidationResult()
    if machine:
        told["machine"] = _survey(as_json)
    if config is not None:
        from ..mrm.api import Experiment

        result = Experiment(_load(config)).check()
        told |= {"valid": result.is_valid, "errors": result.errors, "warnings": result.warnings}
        if not as_json:
            _say_checks(config, result)
    if as_json:
        print_json(told)
    raise typer.Exit(TraceExitCode.OK if result.is_valid else TraceExitCode.USAGE)


@app.command(epilog=_CODES)
def plan(config: _Config, as_json: _Json = False, verbose: _Verbose = False) -> None:
    """List the runs of an experiment, and whether each has finished."""
    _log(verbose)
    from ..mrm.config import expand_sweep, validate_config_semantics
    from ..mrm.runs import find_finished

    experiment = _load(config)
    _check(experiment, as_json, validate_config_semantics)
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


@app.command(epilog=_CODES)
def run(
    config: _Config,
    force: Annotated[bool, typer.Option("--force", help="Run finished runs again.")] = False,
    only: Annotated[
        str | None, typer.Option("--only", help="Only runs with this in their name; * and ? match.")
    ] = None,
    as_json: _Json = False,
    verbose: _Verbose = False,
) -> None:
    """Run all runs that have not finished: collect, label, analyse, report.

    The folder of a run that broke off is marked. The run is repeated in a new folder.
    """
    _log(verbose)
    from ..mrm.config import validate_config_semantics, validate_model_paths

    experiment = _load(config)
    _check(experiment, as_json, validate_config_semantics, validate_model_paths)
    from ..mrm.runner import SweepSelectionError, run_sweep

    outcomes: list[RunOutcome] = []
    with ended_by_sigterm(), _Display(as_json, outcomes) as display:
        try:
            run_sweep(experiment, force=force, only=only, listener=display.listener)
            code = _verdict(outcomes)
        except SweepSelectionError as error:
            _usage(str(error))
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


@app.command(epilog=_CODES)
def analyse(
    results: Annotated[
        Path,
        typer.Option(
            "--input", "-i", help="Results: a run, or a folder of them; or a trace as Parquet."
        ),
    ],
    metrics: Annotated[
        str | None,
        typer.Option(
            "--metrics", "-m", help="Some of: " + ", ".join(one.value for one in MetricName)
        ),
    ] = None,
    as_json: _Json = False,
    verbose: _Verbose = False,
) -> None:
    """Compute the tables of runs or of a trace file again.

    For a run that broke off they are computed from its raw files.
    """
    _log(verbose)
    from ..mrm.analysis import analyse_runs
    from ..mrm.processing import Settings, tables_of

    chosen = list(MetricName) if metrics is None else _metrics(metrics)
    settings = Settings()
    settings.analyser.metrics = chosen
    shown = tables_of(chosen)
    told, failed = [], False
    try:
        for one in analyse_runs(results, settings):
            failed |= one.error is not None
            tables = {name: one.tables[name] for name in shown if name in one.tables}
            if as_json:
                told.append({**asdict(one), "tables": _records(tables)})
            else:
                _say_analysis(one, tables)
    except FileNotFoundError as error:
        _usage(str(error))
    if as_json:
        print_json({"runs": told})
    raise typer.Exit(TraceExitCode.RUN_FAILED if failed else TraceExitCode.OK)


def _metrics(text: str) -> list[MetricName]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    known = [one.value for one in MetricName]
    for name in names:
        if name not in known:
            _usage(f"--metrics: {name!r} is none of {', '.join(known)}")
    if not names:
        _usage(f"--metrics: names none of {', '.join(known)}")
    return [MetricName(name) for name in names]


@app.command(epilog=_CODES)
def partial(
    trace: Annotated[Path, typer.Argument(help="A trace: a Parquet file or a folder of them.")],
    part: Annotated[
        str, typer.Option("--part", "-p", help="Which part of how many, such as 3/16.")
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="The file to write.")],
    as_json: _Json = False,
    verbose: _Verbose = False,
) -> None:
    """Analyse a part of a trace, for `merge`.

    The parts are whole row groups of the trace. They can be analysed at the same time, on any
    machine.
    """
    _log(verbose)
    from ..mrm.analyser import analyse_part, split_trace

    number, of = _part(part)
    row_groups = _guarded(lambda: split_trace(trace, of)[number - 1])
    rows = _guarded(lambda: analyse_part(trace, row_groups, output))
    if as_json:
        groups = [row_groups.start, row_groups.stop]
        print_json({"partial": str(output), "row_groups": groups, "rows": rows})
        return
    out.print(f"{escape(str(output))}: {rows:,} rows, {len(row_groups)} row groups")


def _part(text: str) -> tuple[int, int]:
    number, _, of = text.partition("/")
    if not (number.isdecimal() and of.isdecimal() and 1 <= int(number) <= int(of)):
        _usage(f"--part: {text!r} is no part K/N, with K from 1 to N, such as 3/16")
    return int(number), int(of)


@app.command(epilog=_CODES)
def merge(
    parts: Annotated[list[Path], typer.Argument(help="What `partial` wrote for all parts.")],
    output: Annotated[
        Path, typer.Option("--output", "-o", help="The folder for the tables, as Parquet.")
    ],
    as_json: _Json = False,
    verbose: _Verbose = False,
) -> None:
    """Compute the tables of a trace from the partial analyses of all its parts.

    The tables equal those of an analysis of the whole trace.
    """
    _log(verbose)
    from ..mrm.analyser import merge_parts
    from ..mrm.reporter.parquet_export import export_table

    tables = _guarded(lambda: merge_parts(parts))
    written = [output / f"{name}.parquet" for name in tables]
    for path in written:
        _guarded(lambda path=path: export_table(tables[path.stem], path))  # type: ignore[misc]
    if as_json:
        print_json({"tables": [str(path) for path in written]})
        return
    out.print(f"{escape(str(output))}: {len(written)} tables of {len(parts)} parts")


@app.command(epilog=_CODES)
def report(
    results: _Input,
    output: Annotated[Path, typer.Option("--output", "-o", help="Where the report goes.")] = Path(
        "reports/"
    ),
    as_json: _Json = False,
    verbose: _Verbose = False,
) -> None:
    """Write one HTML page, tables and figures over all runs of a folder."""
    _log(verbose)
    from ..mrm.reporter import load_sweep, write_sweep_report

    sweep = _guarded(lambda: load_sweep(results))
    page = _guarded(lambda: write_sweep_report(sweep, output))
    if as_json:
        print_json(
            {
                "report": str(page),
                "runs": [run.run_id for run in sweep.runs],
                "left_out": {one.run_id: one.reason for one in sweep.left_out},
            }
        )
        return
    for one in sweep.left_out:
        _note(f"{one.run_id} is left out: {one.reason}", as_json)
    out.print(f"{escape(str(page))}: {_runs(len(sweep.runs))}, {len(sweep.left_out)} left out")


@app.command(epilog=_CODES)
def export(
    results: _Input,
    to: Annotated[Format, typer.Option("--format", "-f", help="What to make.")] = Format.HF,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Where it goes; dist/FORMAT by default.")
    ] = None,
    as_json: _Json = False,
    verbose: _Verbose = False,
) -> None:
    """Pack finished runs as a Hugging Face data set or for Zenodo. Nothing is uploaded."""
    _log(verbose)
    from .._pages import units
    from ..mrm.reporter import export_hf, export_zenodo

    pack = export_hf if to is Format.HF else export_zenodo
    target = output or Path("dist") / to.value
    result = _guarded(lambda: pack(results, target))
    if as_json:
        print_json(asdict(result))
        return
    for name, reason in result.left_out.items():
        _note(f"{name} is left out: {reason}", as_json)
    size = units.size(result.size_bytes)
    out.print(
        f"{escape(str(result.path))}: {_runs(len(result.runs))}, {result.files} files, {size}"
    )


# Output.


def _runs(number: int) -> str:
    return f"{number} run{'' if number == 1 else 's'}"


class _Display:
    """Prints the progress of a sweep, and on a terminal a bar below it."""

    def __init__(self, quiet: bool, outcomes: list[RunOutcome]) -> None:
        from ..mrm.runner import SweepListener

        display = self

        class Listener(SweepListener):
            def sweep_begins(self, runs: Sequence[RunConfig]) -> None:
                display.total = len(runs)
                display.bar.reset(display.task, total=len(runs), visible=True)

            def run_begins(self, run: RunConfig) -> None:
                display.current = run.run_id
                display.number += 1
                place = f"{display.number}/{display.total}"
                display.say(f"[bold]{escape(run.run_id)}[/bold] ({place})")

            def stage(self, run: RunConfig, name: str) -> None:
                display.bar.update(display.task, description=name)
                display.say(f"  {escape(name)}")

            def note(self, message: str, level: int = logging.INFO) -> None:
                colour = "yellow" if level >= logging.WARNING else "default"
                display.say(f"  [{colour}]{escape(message)}[/{colour}]")

            def run_ends(self, outcome: RunOutcome) -> None:
                outcomes.append(outcome)
                display.current = None
                display.bar.advance(display.task)
                display.say(f"  {_in_words(outcome)}")

        self.listener = Listener()
        self.quiet = quiet
        self.outcomes = outcomes
        self.current: str | None = None
        self.number = self.total = 0
        self.bar = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=err,
            transient=True,
            disable=quiet or not err.is_terminal,
        )
        self.task = self.bar.add_task("starting", total=None)

    def say(self, line: str) -> None:
        if not self.quiet:
            self.bar.console.print(line)

    def interrupted(self) -> None:
        if self.current is not None:
            self.say(
                f"  [red]interrupted[/red]: {escape(self.current)} is marked incomplete; the same "
                "command goes on, and mrm-trace analyse reads what the run left"
            )

    def __enter__(self) -> _Display:
        self.bar.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.bar.stop()


def _in_words(outcome: RunOutcome) -> str:
    if outcome.status == "failed":
        return f"[red]failed[/red]: {escape(outcome.reason or '')}"
    if outcome.status == "skipped":
        return f"skipped: {escape(outcome.reason or '')}"
    if outcome.status == "warmed_up":
        return f"warmed up in {outcome.duration_s:.1f} s"
    rows = f"{outcome.rows:,} rows of {outcome.kind}" if outcome.kind else "no trace"
    if outcome.label_coverage is not None:
        from ..mrm.telemetry.validity import covered

        parts = outcome.label_coverage.items()
        rows += f", labels on {' and '.join(f'{covered(part)} of the {of}' for of, part in parts)},"
    validity = f", {outcome.validity}" if outcome.validity else ""
    if outcome.validity_reasons:
        validity += f": {escape('; '.join(outcome.validity_reasons))}"
    return (
        f"[green]finished[/green] in {outcome.duration_s:.1f} s: {rows} by {outcome.collector}"
        f"{validity}"
    )


def _say_outcomes(outcomes: Sequence[RunOutcome]) -> None:
    for one in outcomes:
        if one.status != "warmed_up":
            place = one.run_dir if one.report is None else one.report
            out.print(f"{one.status:<12}{one.rows:>14,} rows  {escape(place)}")
            for way in one.ways_to_clean:
                out.print(f"    to be clean: {escape(way)}")


def _say_checks(config: Path, result: ValidationResult) -> None:
    for error in result.errors:
        console.error(error)
    for warning in result.warnings:
        console.warning(warning)
    if result.is_valid:
        out.print(f"{escape(str(config))} is valid")


def _say_analysis(one: RunAnalysis, tables: dict[str, Any]) -> None:
    out.print(f"[bold]{escape(one.run_id)}[/bold]")
    for note in one.notes:
        err.print(f"  [yellow]{escape(note)}[/yellow]")
    if one.error is not None:
        err.print(f"  [red]failed[/red]: {escape(one.error)}")
    reasons = "; ".join(one.validity_reasons)
    if one.validity is not None or reasons:
        out.print(f"  {one.validity or 'no class'}{': ' if reasons else ''}{escape(reasons)}")
    for way in one.ways_to_clean:
        out.print(f"    to be clean: {escape(way)}")
    # Tables with a row per region type come before the long tables with a row per region.
    for name in sorted(tables, key=lambda name: "region_id" in tables[name].columns):
        _say_table(name, tables[name])


def _say_table(name: str, frame: Any) -> None:
    numeric = {column: frame[column].dtype.kind in "iuf" for column in frame.columns}
    table = Table(
        title=name, title_justify="left", box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0)
    )
    for column, right in numeric.items():
        table.add_column(
            _broken(str(column)), justify="right" if right else "left", vertical="bottom",
            no_wrap=True,
        )  # fmt: skip
    shown = _SHOWN_ROWS if "region_id" in frame.columns else len(frame)
    for row in frame.head(shown).itertuples(index=False):
        table.add_row(*(_cell(value) for value in row))
    # The table is as wide as its numbers. A narrower terminal wraps the lines, so no digit is lost.
    width = out.measure(table, options=out.options.update(max_width=_WIDEST)).maximum
    Console(width=max(out.width, width), highlight=False, emoji=False).print(table)
    if len(frame) > shown:
        out.print(f"... and {len(frame) - shown:,} regions more; all are in --json")
    out.print()


_SHOWN_ROWS = 10
_HEAD_WIDTH = 12
_WIDEST = 1000


def _broken(name: str) -> str:
    """Breaks a column's name into lines at its words."""
    lines = [""]
    for word in name.replace("_", "_ ").split():
        if lines[-1] and len(lines[-1] + word) > _HEAD_WIDTH:
            lines.append("")
        lines[-1] += word
    return "\n".join(lines)


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 1e6 else f"{value:.6g}"
    return escape(str(value))


def _records(tables: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    return {name: frame.to_dict("records") for name, frame in tables.items()}


def _survey(as_json: bool) -> list[dict[str, Any]]:
    from ..mrm.collector import survey_machine

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
    return [_plain(one) for one in found]


def _plain(value: Any) -> Any:
    return asdict(value) if is_dataclass(value) and not isinstance(value, type) else value


def _load(path: Path) -> ExperimentConfig:
    from ..mrm.config import ConfigError, load_experiment

    try:
        return load_experiment(path)
    except ConfigError as error:
        _usage(*(f"{path}: {problem}" for problem in error.problems))
    except OSError as error:
        _usage(str(error))


def _check(
    experiment: ExperimentConfig,
    as_json: bool,
    *checks: Callable[[ExperimentConfig], ValidationResult],
) -> None:
    for check in checks:
        result = check(experiment)
        if result.errors:
            _usage(*result.errors)
        for warning in result.warnings:
            _note(warning, as_json)


def _guarded(work: Callable[[], Any]) -> Any:
    """Calls `work`, which reads a folder of results, and turns its errors into a CommandError."""
    try:
        return work()
    except FileNotFoundError as error:
        _usage(str(error))
    except (OSError, ValueError, StrapError) as error:
        raise CommandError(TraceExitCode.RUN_FAILED, str(error)) from error


def _usage(*messages: str) -> NoReturn:
    raise CommandError(TraceExitCode.USAGE, *messages)


def _note(message: str, as_json: bool) -> None:
    if not as_json:
        console.warning(message)


def _log(verbose: bool) -> None:
    logging.basicConfig(
        level=logging.DEBUG if verbose else logging.WARNING,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        stream=sys.stderr,
    )
