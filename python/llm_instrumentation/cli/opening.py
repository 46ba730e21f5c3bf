"""Opens a stream in a thread, while the main thread imports the modules that read it.

The library reads the index of a million packets in about 0.2 s. typer, numpy, pyarrow and the
package take about as long to import.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from pathlib import Path

from .._native import Reader
from ..storage import names_stream, open_reader, url_of

__all__ = ["Opening", "begin", "opening"]

_SUBCOMMANDS = ("info", "ls", "serve")
_begun: Opening | None = None


class Opening:
    """A stream that is being opened.

    Attributes:
        path: the stream.
        may_be_a_run: it is a URL that may name a run folder, and is not opened here.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._reader: Reader | None = None
        self._error: BaseException | None = None
        self.may_be_a_run = url_of(path) is not None and not names_stream(path)
        if self.may_be_a_run:
            return
        # A daemon, so that Ctrl-C does not wait for a slow disk.
        self._thread = threading.Thread(target=self._open, name="strap-open", daemon=True)
        self._thread.start()

    def _open(self) -> None:
        try:
            self._reader = open_reader(self.path)
        except BaseException as error:
            self._error = error

    def reader(self) -> Reader:
        """The open stream, which the caller closes.

        Raises:
            StrapError: it cannot be opened; see `open_reader`.
        """
        self._thread.join()
        if self._reader is None:
            assert self._error is not None
            raise self._error
        return self._reader


def begin(arguments: Sequence[str]) -> None:
    """Begins to open the stream of a command line, before typer has parsed it.

    It recognises a subcommand with its stream just behind it, which is how they are mostly typed.
    """
    global _begun
    if len(arguments) > 1 and arguments[0] in _SUBCOMMANDS and not arguments[1].startswith("-"):
        # Otherwise the import of numpy starts threads that multiply matrices, in 50 ms if the other
        # cores are busy. These subcommands have no matrices.
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
        _begun = Opening(Path(arguments[1]))


def opening(path: Path) -> Opening:
    """The stream that `begin` has begun to open, if it is this one; otherwise a new one."""
    global _begun
    begun, _begun = _begun, None
    return begun if begun is not None and begun.path == path else Opening(path)
