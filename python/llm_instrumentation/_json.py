"""JSON: that others may have written, and of values that are more than JSON has."""

from __future__ import annotations

import json
import math
import os
import stat
from collections.abc import Mapping
from dataclasses import asdict, is_dataclass
from enum import Enum
from typing import Any

__all__ = ["IrregularFileError", "load_json", "load_json_file", "plain", "to_json"]


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


def to_json(value: Any) -> str:
    """JSON of what :func:`plain` takes."""
    return json.dumps(plain(value), indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def plain(value: Any) -> Any:
    """The value as JSON has it: dataclasses, enums, paths and numpy scalars by their content.

    Numbers that are none in JSON (NaN, infinity) become null, lone surrogates ``?``.

    Raises:
        TypeError: a value of another kind; names it.
    """
    if is_dataclass(value) and not isinstance(value, type):
        return plain(asdict(value))
    if isinstance(value, Enum):
        return plain(value.value)
    if isinstance(value, Mapping):
        return {str(plain(key)): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        items = sorted(value) if isinstance(value, (set, frozenset)) else value
        return [plain(item) for item in items]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, str):
        return value.encode("utf-8", errors="replace").decode()
    if value is None or isinstance(value, int):
        return value
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if hasattr(value, "item"):  # a scalar of numpy or torch
        return plain(value.item())
    raise TypeError(f"{type(value).__module__}.{type(value).__qualname__} has no JSON: {value!r}")
