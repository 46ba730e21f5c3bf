"""Shows how far long work is, on a terminal or in a notebook."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

from .._notebook_progress import NotebookProgress, in_notebook
from .._pages import units

__all__ = ["Progress", "bytes_bar", "reported", "steps_bar"]

#: True shows a bar; False does not; None shows it on a terminal and in a notebook. A function is
#: called instead, from time to time, with what is done and how much there will be.
Progress: TypeAlias = bool | Callable[[int, int], Any] | None


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
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        console=Console(stderr=True),
        transient=True,
    )
    with bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


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
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[text]}"),
        console=Console(stderr=True),
        transient=True,
    )
    with bar:
        task = bar.add_task(what, total=None, text="")
        yield lambda done, total, text: bar.update(
            task, completed=done, total=total, text=escape(text)
        )
