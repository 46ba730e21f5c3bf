"""Memory for tensors that is used again when they are gone."""

from __future__ import annotations

import collections
import contextlib
import mmap
import weakref

import numpy as np
import torch

__all__ = ["Recycled"]

_KEPT = 2  # blocks without tensors
_LEAST = 1 << 20  # smaller ones are left to torch
_ADVICE = getattr(mmap, "MADV_HUGEPAGE", None)  # Linux has it


class Recycled:
    """Gives blocks of memory as tensors, and takes them back when no tensor uses them.

    New memory costs more than reading a file from the page cache, because the kernel clears each
    page. With CUDA the blocks are pinned, and torch keeps them for the next ones itself.
    Thread-safe.
    """

    def __init__(self) -> None:
        self._free: collections.deque[mmap.mmap] = collections.deque(maxlen=_KEPT)

    def take(self, size: int) -> torch.Tensor:
        """A uint8 tensor [size] whose values are any. From 1 MiB on it begins at a page."""
        pin = torch.cuda.is_available()
        if pin or size < _LEAST:
            return torch.empty(size, dtype=torch.uint8, pin_memory=pin, device="cpu")
        with contextlib.suppress(IndexError):  # another thread may have taken the last one
            for _ in range(len(self._free)):
                block = self._free.popleft()
                if size <= len(block) <= 2 * size:
                    return self._lend(block, size)
                self._free.append(block)
        step = 1 << max(
            size.bit_length() - 4, 12
        )  # blocks of about one size can replace each other
        room = -(-size // step) * step
        block = mmap.mmap(-1, room, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if _ADVICE is not None:
            with contextlib.suppress(OSError):  # a kernel without huge pages
                block.madvise(_ADVICE)
        return self._lend(block, size)

    def _lend(self, block: mmap.mmap, size: int) -> torch.Tensor:
        # The array lives as long as the last tensor that uses its memory.
        array = np.frombuffer(block, np.uint8, size)
        weakref.finalize(array, self._free.append, block).atexit = False
        return torch.from_numpy(array)
