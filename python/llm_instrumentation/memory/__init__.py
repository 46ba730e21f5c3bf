"""Buffers between a model and a file: a byte ring, a background writer, CUDA transfers."""

from .async_writer import AsyncWriteError, AsyncWriter
from .cuda_manager import CUDAMemoryManager, TransferError
from .ring_buffer import RingBuffer

__all__ = ["AsyncWriteError", "AsyncWriter", "CUDAMemoryManager", "RingBuffer", "TransferError"]
