"""Opens captures, and tells the way out of a damaged one."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path

from .._native import Reader, capture_id_of
from ..analysis.reader import ActivationReader
from ..errors import CorruptError, RunFolderError
from .ahead import Opening, begun
from .exit_codes import ExitCode
from .program import CommandError

__all__ = ["damage_told", "damaged", "open_capture", "way_out"]


class _OpenedAhead(ActivationReader):
    """A reader of a stream that another thread opens."""

    def __init__(self, opening: Opening, *, warn: bool, dtypes: Mapping[str, str] | None) -> None:
        self._opening = opening
        super().__init__(opening.path, warn=warn, dtypes=dtypes)

    def _open(self, ignore_index: bool) -> Reader:
        return self._opening.reader()


def open_capture(
    stream: Path, *, warn: bool = True, dtypes: Mapping[str, str] | None = None
) -> ActivationReader:
    """Opens a reader of the stream.

    Raises:
        CommandError: it is a damaged capture, and no packet of it can be read; or a run folder
            whose files do not fit together.
        CorruptError: it is no capture.
    """
    try:
        if (opening := begun(stream)) is not None:
            return _OpenedAhead(opening, warn=warn, dtypes=dtypes)
        return ActivationReader(stream, warn=warn, dtypes=dtypes)
    except RunFolderError as error:
        raise CommandError(ExitCode.DAMAGED, str(error)) from error
    except CorruptError as error:
        if capture_id_of(stream) is None:
            raise
        raise damaged(stream, error) from error


def damaged(stream: Path, error: CorruptError) -> CommandError:
    """The error of a capture that is damaged, with the way out."""
    return CommandError(ExitCode.DAMAGED, f"{error}; {way_out(stream)}")


@contextlib.contextmanager
def damage_told(stream: Path) -> Iterator[None]:
    """Turns the error of a block that finds this capture damaged into one with the way out."""
    try:
        yield
    except CorruptError as error:
        if f'"{stream}"' in str(error) and capture_id_of(stream) is not None:
            raise damaged(stream, error) from error
        raise


def way_out(stream: Path) -> str:
    """What to do about a damaged capture."""
    if stream.is_dir():
        return "strap salvage copies what is intact of one of its streams to a new one"
    return f"strap salvage {shlex.quote(str(stream))} copies what is intact to a new stream"
