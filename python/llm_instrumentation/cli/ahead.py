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

__all__ = ["Opening", "begin", "begun"]

_begun: Opening | None = None


class Opening:
    """A stream that is being opened.

    Attributes:
        path: the stream.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._reader: Reader | None = None
        self._error: BaseException | None = None
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

    It takes the first argument that is a file, or the URL of a stream. If the command means another
    one, some work was in vain.
    """
    global _begun
    # Otherwise the import of numpy starts threads that multiply matrices, in 50 ms if the other
    # cores are busy. These subcommands have no matrices.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    stream = next(filter(_is_stream, map(Path, arguments)), None)
    _begun = None if stream is None else Opening(stream)


def _is_stream(path: Path) -> bool:
    return path.is_file() if url_of(path) is None else names_stream(path)


def begun(path: Path) -> Opening | None:
    """The stream, if `begin` has begun to open it. It is given once."""
    global _begun
    if _begun is None or _begun.path != path:
        return None
    opening, _begun = _begun, None
    return opening
