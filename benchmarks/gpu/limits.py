"""The limits of the machine: what a device copies to pinned memory, and what a folder takes."""

from __future__ import annotations

import mmap
import os
import shutil
import threading
import time
from pathlib import Path

import torch

_BLOCK = 8 << 20
_THREADS = 4


def pinned_copies(device: str, nbytes: int, times: int = 8) -> float:
    """Bytes a second of copies from the device to pinned memory, one behind the other."""
    source = torch.empty(nbytes, dtype=torch.uint8, device=device)
    target = torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)
    for _ in range(2):  # the first warms up
        torch.cuda.synchronize()
        begun = time.perf_counter()
        for _ in range(times):
            target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        seconds = time.perf_counter() - begun
    return nbytes * times / seconds


def writes(folder: Path, nbytes: int) -> float:
    """Bytes a second of a new file, written past the page cache in blocks of 8 MiB by 4 threads.

    A file system without direct writes, as tmpfs of older kernels, is written to as usual.
    """
    path = folder / "limit"
    nbytes = min(nbytes, shutil.disk_usage(folder).free // 4)
    block = mmap.mmap(-1, _BLOCK)  # aligned, as direct writes need it
    block.write(os.urandom(_BLOCK))
    blocks = max(_THREADS, nbytes // _BLOCK)
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    try:
        file = os.open(path, flags | os.O_DIRECT)
    except OSError:
        file = os.open(path, flags)

    def write(first: int) -> None:
        for number in range(first, blocks, _THREADS):
            os.pwrite(file, block, number * _BLOCK)

    try:
        threads = [threading.Thread(target=write, args=(first,)) for first in range(_THREADS)]
        begun = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        os.fsync(file)
        seconds = time.perf_counter() - begun
    finally:
        os.close(file)
        path.unlink()
    return blocks * _BLOCK / seconds
