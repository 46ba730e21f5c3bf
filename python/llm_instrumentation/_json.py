"""Reads JSON that other programs may have written, and writes Python values as JSON."""

from __future__ import annotations

import json
import math
import os
import stat
from collections.abc import Mapping
from dataclasses import asdict, is_dataclass
from enum import Enum
from typing import Any

__all__ = ["load_json", "load_json_file", "plain", "to_json"]


def load_json(text: str | bytes) -> Any:
    """Parses a JSON text.

    Raises:
        ValueError: the text is no JSON, or is nested too deep for Python.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deep") from None


def load_json_file(path: str | os.PathLike[str]) -> Any:
    """Parses a JSON file. It does not wait for a pipe at the path.

    Raises:
        ValueError: it is no regular file, or its content is no JSON, or is nested too deep for
            Python.
        OSError: the file cannot be read.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ValueError("it is no regular file")
        with open(descriptor, "rb", closefd=False) as file:
            return load_json(file.read())
    finally:
        os.close(descriptor)


def to_json(value: Any) -> str:
    """A value as JSON text with indents. :func:`plain` describes the values that it takes."""
    return json.dumps(plain(value), indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def plain(value: Any) -> Any:
    """Converts a value to types that JSON has.

    Dataclasses become objects. Enums, paths, and scalars of numpy and torch become their content.
    Sets become sorted lists. NaN and infinity become null, lone surrogates become ``?``.

    Raises:
        TypeError: a value of another type; the message names it.
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
