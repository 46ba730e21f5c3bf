"""The OpenMP threads that PyTorch's operators run in."""

from __future__ import annotations

import ctypes
import functools
import os
from pathlib import Path

import torch

__all__ = ["gomp_parallel"]


@functools.cache
def gomp_parallel() -> int:
    """Address of the ``GOMP_parallel`` that PyTorch calls; 0 where it has other threads.

    GNU's, LLVM's and Intel's OpenMP runtimes have that function. A process may hold several; the
    one that PyTorch is linked to has the threads that would wait meanwhile.
    """
    if not torch.backends.openmp.is_available():  # type: ignore[no-untyped-call]
        return 0
    library = os.fspath(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so")
    # As the loader looks: what all see (LD_PRELOAD) comes before what the library needs.
    for name in (None, library):
        try:
            loaded = ctypes.CDLL(name, mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
            function = loaded.GOMP_parallel
        except (OSError, AttributeError):
            continue
        return ctypes.cast(function, ctypes.c_void_p).value or 0
    return 0
