"""Ten kernels whose traffic is traced, and read from the device's counters by ncu.

    ncu [OPTIONS] python -m gpu.kernels [--rehearse]

runs each one inside an NVTX range with its name. The tensors are larger than the caches.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from .stage import make_up_cuda


def kernels(device: str, rehearsal: bool) -> dict[str, Callable[[], object]]:
    """The kernels by name. Each runs one operator of PyTorch, or a few for attention."""

    def made(*shape: int) -> Tensor:
        smaller = [max(1, size // 64) for size in shape] if rehearsal else shape
        return torch.randn(*smaller, device=device).to(torch.bfloat16)

    x, other, weight = made(8192, 4096), made(8192, 4096), made(16384, 4096)
    token = made(1, 4096)
    query, keys, values = made(32, 2048, 128), made(32, 2048, 128), made(32, 2048, 128)
    last, long_keys, long_values = made(256, 1, 128), made(256, 2048, 128), made(256, 2048, 128)
    table = made(65536, 4096)
    ids = torch.randperm(len(table), device=device)[: len(x)]
    scale = made(4096)
    width = x.shape[-1]
    attention = functional.scaled_dot_product_attention
    return {
        "matrix product": lambda: torch.mm(x, weight.t()),
        "matrix product, one token": lambda: torch.mm(token, weight.t()),
        "attention, prompt": lambda: attention(query[None], keys[None], values[None]),
        "attention, one token": lambda: attention(last[None], long_keys[None], long_values[None]),
        "embedding": lambda: functional.embedding(ids, table),
        "norm": lambda: functional.layer_norm(x, (width,), scale, scale),
        "softmax": lambda: torch.softmax(x, -1),
        "copy": lambda: x.clone(),
        "sum": lambda: x + other,
        "concatenation": lambda: torch.cat([keys, values], 1),
    }


def main() -> None:
    rehearsal = "--rehearse" in sys.argv
    if rehearsal:
        make_up_cuda()
    with torch.no_grad():
        chosen = kernels("cpu" if rehearsal else "cuda", rehearsal)
        for run in chosen.values():
            run()  # loads the kernel, outside of the profile
        torch.cuda.synchronize()
        torch.cuda.profiler.start()
        for name, run in chosen.items():
            torch.cuda.nvtx.range_push(name)
            run()
            torch.cuda.nvtx.range_pop()
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()


if __name__ == "__main__":
    main()
