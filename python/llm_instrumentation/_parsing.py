"""Turns what a parser raises at the content of a file into an error of this package."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator

from .errors import CorruptError, StrapError

__all__ = ["of_the_system", "parsing"]

_SHOWN = 300  # characters of a parser's message; some repeat the content of the file


@contextlib.contextmanager
def parsing(
    path: str | os.PathLike[str],
    otherwise: str = "is damaged",
    *,
    kind: type[StrapError] = CorruptError,
    way_out: str = "",
) -> Iterator[None]:
    """Turns every exception of a block that reads a file into an error that names the file.

    The parsers of others raise exceptions of many kinds at damaged bytes, and not only those that
    they document. Put only the reading of the file into the block: a mistake of other code there
    would look like a damaged file.

    Args:
        path: the file.
        otherwise: what the file is after an exception, for the message.
        kind: the class of the error.
        way_out: what to do then, for the end of the message.

    Raises:
        StrapError: raised in the block.
        OSError: the system cannot read the file.
        ImportError: a package is missing.
    """
    try:
        yield
    except (StrapError, ImportError):
        raise
    except Exception as error:
        if of_the_system(error):
            raise
        told = " ".join(str(error).split()) or type(error).__name__
        if isinstance(error, RecursionError):
            told = "it is nested too deep"
        elif not isinstance(error, (ValueError, OSError)):  # as KeyError, whose message is a key
            told = f"{type(error).__name__}: {told}"
        if len(told) > _SHOWN:
            told = told[:_SHOWN] + "..."
        raise kind(f"{os.fspath(path)} {otherwise}: {told}{way_out}") from error


def of_the_system(error: Exception) -> bool:
    """Whether the operating system raised the error, and not the content of the file.

    A parser that follows a damaged offset reads at an invalid place, which is EINVAL.
    """
    return isinstance(error, OSError) and error.errno not in (None, errno.EINVAL)
