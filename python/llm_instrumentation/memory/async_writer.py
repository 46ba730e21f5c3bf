"""The names of 1.3.1 under their documented path; see `compat.async_writer`."""

from __future__ import annotations

from ..compat.async_writer import (
    AsyncWriteError,
    AsyncWriter,
)

__all__ = [
    "AsyncWriteError",
    "AsyncWriter",
]
