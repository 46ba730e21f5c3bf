"""JSON that others may have written."""

from __future__ import annotations

import json
import os
import stat
from typing import Any

__all__ = ["IrregularFileError", "load_json", "load_json_file"]


class IrregularFileError(ValueError):
    """A folder, a pipe or the like stands where a file is looked for."""


def load_json(text: str | bytes) -> Any:
    """What a JSON text says.

    Raises:
        ValueError: the text is no JSON, or is nested so deep that Python cannot read it.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deep") from None


def load_json_file(path: str | os.PathLike[str]) -> Any:
    """What the file at a path says. A pipe there is not waited for.

    Raises:
        IrregularFileError: it is no regular file.
        ValueError: as of :func:`load_json`.
        OSError: it cannot be read.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise IrregularFileError("it is no regular file")
        with open(descriptor, "rb", closefd=False) as file:
            return load_json(file.read())
    finally:
        os.close(descriptor)
