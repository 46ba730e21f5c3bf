"""The names of 1.3.1 under their documented path; see `compat.compression`."""

from __future__ import annotations

from ..compat.compression import (
    CompressionStrategy,
    TensorCompressionManager,
)

__all__ = [
    "CompressionStrategy",
    "TensorCompressionManager",
]
