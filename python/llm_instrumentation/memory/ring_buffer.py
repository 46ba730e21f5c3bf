"""The names of 1.3.1 under their documented path; see `compat.ring_buffer`."""

from __future__ import annotations

from ..compat.ring_buffer import (
    RingBuffer,
)

__all__ = [
    "RingBuffer",
]
