"""`mrm-trace analyse`: the tables of runs, computed again."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ...mrm.config.choices import MetricName
from ..console import err, out, print_json
from ..exit_codes import TraceExitCode
from ..options import Json
from .failures import usage
from .options import CODES, Verbose, log

if TYPE_CHECKING:
    from ...mrm.analysis import RunAnalysis

__all__ = ["app"]

_SHOWN_ROWS = 10
_HEAD_WIDTH = 12
_WIDEST = 1000

app = typer.Typer()


@app.command(epilog=CODES)
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
    as_json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Compute the tables of runs or of a trace file again.

    For a run that broke off they are computed from its raw files.
    """
    log(verbose)
    from ...mrm.analysis import analyse_runs
    from ...mrm.processing import Settings, tables_of

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
        usage(str(error))
    if as_json:
        print_json({"runs": told})
    raise typer.Exit(TraceExitCode.RUN_FAILED if failed else TraceExitCode.OK)


def _metrics(text: str) -> list[MetricName]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    known = [one.value for one in MetricName]
    for name in names:
        if name not in known:
            usage(f"--metrics: {name!r} is none of {', '.join(known)}")
    if not names:
        usage(f"--metrics: names none of {', '.join(known)}")
    return [MetricName(name) for name in names]


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
