"""The names of 1.3.1 under their documented path; see `compat.streaming`."""

from __future__ import annotations

from ..compat.streaming import (
    StreamingSerializer,
)

__all__ = [
    "StreamingSerializer",
]
