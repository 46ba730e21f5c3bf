"""The progress of a sweep."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from ...mrm.runner import SweepListener
from ..console import err

if TYPE_CHECKING:
    from ...mrm.config import RunConfig
    from ...mrm.runner import RunOutcome

__all__ = ["Display"]


class Display(SweepListener):
    """Prints the progress of a sweep, and on a terminal a bar below it.

    Args:
        outcomes: gets the outcome of each run.
        quiet: prints nothing.
    """

    def __init__(self, outcomes: list[RunOutcome], *, quiet: bool) -> None:
        self._outcomes = outcomes
        self._quiet = quiet
        self._current: str | None = None
        self._number = self._total = 0
        self._bar = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=err,
            transient=True,
            disable=quiet or not err.is_terminal,
        )
        self._task = self._bar.add_task("starting", total=None)

    def sweep_begins(self, runs: Sequence[RunConfig]) -> None:
        self._total = len(runs)
        self._bar.reset(self._task, total=len(runs), visible=True)

    def run_begins(self, run: RunConfig) -> None:
        self._current = run.run_id
        self._number += 1
        self._say(f"[bold]{escape(run.run_id)}[/bold] ({self._number}/{self._total})")

    def stage(self, run: RunConfig, name: str) -> None:
        self._bar.update(self._task, description=name)
        self._say(f"  {escape(name)}")

    def note(self, message: str, level: int = logging.INFO) -> None:
        colour = "yellow" if level >= logging.WARNING else "default"
        self._say(f"  [{colour}]{escape(message)}[/{colour}]")

    def run_ends(self, outcome: RunOutcome) -> None:
        self._outcomes.append(outcome)
        self._current = None
        self._bar.advance(self._task)
        self._say(f"  {_in_words(outcome)}")

    def interrupted(self) -> None:
        if self._current is not None:
            self._say(
                f"  [red]interrupted[/red]: {escape(self._current)} is marked incomplete; the same "
                "command goes on, and mrm-trace analyse reads what the run left"
            )

    def __enter__(self) -> Display:
        self._bar.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._bar.stop()

    def _say(self, line: str) -> None:
        if not self._quiet:
            self._bar.console.print(line)


def _in_words(outcome: RunOutcome) -> str:
    if outcome.status == "failed":
        return f"[red]failed[/red]: {escape(outcome.reason or '')}"
    if outcome.status == "skipped":
        return f"skipped: {escape(outcome.reason or '')}"
    if outcome.status == "warmed_up":
        return f"warmed up in {outcome.duration_s:.1f} s"
    rows = f"{outcome.rows:,} rows of {outcome.kind}" if outcome.kind else "no trace"
    if outcome.label_coverage is not None:
        from ...mrm.telemetry.validity import covered

        parts = outcome.label_coverage.items()
        rows += f", labels on {' and '.join(f'{covered(part)} of the {of}' for of, part in parts)},"
    validity = f", {outcome.validity}" if outcome.validity else ""
    if outcome.validity_reasons:
        validity += f": {escape('; '.join(outcome.validity_reasons))}"
    return (
        f"[green]finished[/green] in {outcome.duration_s:.1f} s: {rows} by {outcome.collector}"
        f"{validity}"
    )
