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
    """Address of the ``GOMP_parallel`` that PyTorch calls; 0 if PyTorch does not use OpenMP.

    GNU's, LLVM's and Intel's OpenMP runtimes have that function. A process may have several of
    these runtimes; only PyTorch's own has the threads that are idle during a hook.
    """
    if not torch.backends.openmp.is_available():  # type: ignore[no-untyped-call]
        return 0
    library = os.fspath(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so")
    # The loader's order: global symbols (LD_PRELOAD) before those of the library.
    for name in (None, library):
        try:
            loaded = ctypes.CDLL(name, mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
            function = loaded.GOMP_parallel
        except (OSError, AttributeError):
            continue
        return ctypes.cast(function, ctypes.c_void_p).value or 0
    return 0
