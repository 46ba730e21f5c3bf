"""Shows how far long work is, as a bar on a terminal or below the cell of a notebook."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeAlias

from .._notebook import in_notebook
from .._pages import units
from .notebook import NotebookProgress

if TYPE_CHECKING:
    from rich.progress import ProgressColumn

    from .._native.trace import Counts
    from .._native.trace import Progress as CountsProgress

__all__ = ["Progress", "bytes_bar", "reported", "rows_bar", "steps_bar"]

#: True shows a bar; False does not; None shows it on a terminal and in a notebook. A function is
#: called instead, from time to time, with what is done and how much there will be.
Progress: TypeAlias = bool | Callable[[int, int], Any] | None

_PATIENCE_S = 1.0  # quicker analyses of traces show no bar


@contextlib.contextmanager
def reported(
    progress: Progress, what: str, *, in_bytes: bool = False
) -> Iterator[Callable[[int, int], Any]]:
    """Reports the progress of the block as the caller has chosen.

    Args:
        progress: the choice.
        what: the text before a bar.
        in_bytes: a bar shows bytes.

    Yields:
        a function to call with what is done, and how much there will be.
    """
    if callable(progress):
        yield progress
    elif in_bytes:
        with bytes_bar(what, progress) as told:
            yield told
    else:
        with steps_bar(what, progress) as counted:
            yield lambda done, total: counted(done, total, "")


@contextlib.contextmanager
def bytes_bar(what: str, show: bool | None = None) -> Iterator[Callable[[int, int], None]]:
    """Shows a progress bar in the block: on stderr, or below the cell of a notebook.

    Args:
        what: the text before the bar.
        show: show it; None: if stderr is a terminal, or in a notebook.

    Yields:
        a function to call with the bytes that are done, and how many there will be.
    """
    if show is not False and in_notebook():
        with contextlib.closing(NotebookProgress(what)) as shown:
            yield lambda done, total: shown.show(
                f"{units.size(done)} of {units.size(total)}", done / total if total else None
            )
        return
    if not (sys.stderr.isatty() if show is None else show):
        yield lambda done, total: None
        return
    from rich.progress import DownloadColumn, TransferSpeedColumn

    with _on_terminal(what, DownloadColumn(), TransferSpeedColumn()) as update:
        yield lambda done, total: update(completed=done, total=total)


@contextlib.contextmanager
def steps_bar(what: str, show: bool | None = None) -> Iterator[Callable[[int, int, str], None]]:
    """Shows a progress bar as `bytes_bar` does, with a text behind it.

    Args:
        what: the text before the bar.
        show: show it; None: if stderr is a terminal, or in a notebook.

    Yields:
        a function to call with what is done, how much there will be, and the text.
    """
    if show is not False and in_notebook():
        with contextlib.closing(NotebookProgress(what)) as shown:
            yield lambda done, total, text: shown.show(
                f"{done:,} of {total:,}", done / total if total else None, text
            )
        return
    if not (sys.stderr.isatty() if show is None else show):
        yield lambda done, total, text: None
        return
    from rich.progress import MofNCompleteColumn, TextColumn, TimeRemainingColumn

    text_behind = TextColumn("{task.fields[text]}", markup=False)
    with _on_terminal(what, MofNCompleteColumn(), TimeRemainingColumn(), text_behind) as update:
        yield lambda done, total, text: update(completed=done, total=total, text=text)


@contextlib.contextmanager
def rows_bar(what: str, total_rows: int | None = None) -> Iterator[CountsProgress | None]:
    """Shows a progress bar of the rows of a trace, once the work takes longer than a second.

    Args:
        what: the text before the bar.
        total_rows: the number of rows that complete the bar; None if it is unknown.

    Yields:
        a function to call with the counts of `Trace.run`; None if nobody looks.
    """
    if in_notebook():
        with contextlib.closing(NotebookProgress(what)) as shown:
            yield lambda counts: shown.show(
                f"{counts.rows:,} rows", counts.rows / total_rows if total_rows else None
            )
        return
    if not sys.stderr.isatty():
        yield None
        return
    from rich.progress import TextColumn, TimeElapsedColumn

    began = time.monotonic()
    counted = TextColumn("{task.completed:,.0f} rows")
    with contextlib.ExitStack() as stack:
        update: Callable[..., None] | None = None

        def show(counts: Counts) -> None:
            nonlocal update
            if update is None and time.monotonic() - began > _PATIENCE_S:
                update = stack.enter_context(_on_terminal(what, counted, TimeElapsedColumn()))
            if update is not None:
                update(completed=counts.rows, total=total_rows)

        yield show


@contextlib.contextmanager
def _on_terminal(what: str, *columns: ProgressColumn) -> Iterator[Callable[..., None]]:
    """A bar of rich on stderr, with these columns behind it.

    Yields:
        a function to call with the fields of rich's task that change.
    """
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    described = TextColumn("{task.description}", markup=False)
    console = Console(stderr=True, emoji=False)
    with Progress(described, BarColumn(), *columns, console=console, transient=True) as bar:
        task = bar.add_task(what, total=None, text="")
        yield lambda **fields: bar.update(task, **fields)
