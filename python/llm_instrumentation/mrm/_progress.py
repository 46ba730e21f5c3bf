"""A progress line for long work. It appears after a while, on a terminal or in a notebook."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager

from .._native.trace import Counts, Progress
from .._notebook_progress import NotebookProgress, in_notebook

_PATIENCE_S = 1.0


@contextmanager
def progress_line(what: str, total_rows: int | None = None) -> Iterator[Progress | None]:
    """Yields a callback for :meth:`Trace.run` that draws the line, or None if nobody looks.

    Args:
        what: the text before the bar.
        total_rows: the number of rows that complete the bar; None if it is unknown.
    """
    if in_notebook():
        with closing(NotebookProgress(what)) as shown:
            yield lambda counts: shown.show(
                f"{counts.rows:,} rows", counts.rows / total_rows if total_rows else None
            )
        return
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    start = time.monotonic()
    bar = Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TextColumn("{task.completed:,.0f} rows"),
        TimeElapsedColumn(),
        console=Console(stderr=True, emoji=False),
        transient=True,
    )
    task = bar.add_task(what, total=total_rows)

    def show(counts: Counts) -> None:
        if not bar.live.is_started and time.monotonic() - start > _PATIENCE_S:
            bar.start()
        bar.update(task, completed=counts.rows)

    try:
        yield show
    finally:
        bar.stop()
