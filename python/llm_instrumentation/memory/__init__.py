"""Buffers between a model and a file: CUDA transfers, a byte ring, a background writer.

Captures use `CUDAMemoryManager` only. `RingBuffer` and `AsyncWriter` are for programs of your own.
"""

from .async_writer import AsyncWriteError, AsyncWriter
from .cuda_manager import CUDAMemoryManager, TransferError
from .ring_buffer import RingBuffer

__all__ = ["AsyncWriteError", "AsyncWriter", "CUDAMemoryManager", "RingBuffer", "TransferError"]
