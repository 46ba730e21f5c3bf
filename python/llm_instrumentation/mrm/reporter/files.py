"""Files that appear when they are whole, and their checksums."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Mapping
from dataclasses import asdict, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from ..._files import replacing


def write_text(path: Path, text: str) -> Path:
    """Writes a whole UTF-8 file, or leaves what was there."""
    with replacing(path) as partial:
        partial.write_bytes(text.encode())
    return path


def sha256_file(path: Path) -> str:
    """The SHA-256 of a file's bytes, in hexadecimal."""
    with open(path, "rb") as file:
        digest = hashlib.sha256()
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


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
