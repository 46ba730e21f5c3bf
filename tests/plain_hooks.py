"""Hooks that share no code with ours, and comparisons by bits."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn


def tensors(name: str, output: Any, top: bool = True) -> Iterator[tuple[str, Tensor]]:
    """The tensors of an output under the documented packet names, without those of caches."""
    from transformers.utils import ModelOutput

    if isinstance(output, Tensor):
        yield name, output
    elif isinstance(output, (dict, ModelOutput)):
        for key, value in output.items():
            if key == "past_key_values":  # tuples of tensors, in older transformers
                continue
            yield from tensors(f"{name}[{key!r}]", value, top=False)
    elif isinstance(output, (tuple, list)):
        for i, value in enumerate(output):
            bare = top and i == 0 and isinstance(value, Tensor)
            yield from tensors(name if bare else f"{name}[{i}]", value, top=False)


@contextlib.contextmanager
def watching(model: nn.Module) -> Iterator[list[tuple[str, Tensor]]]:
    """Collects copies of the outputs of all modules, in host memory."""
    seen: list[tuple[str, Tensor]] = []
    handles = []
    for name, module in model.named_modules():

        def keep(module: nn.Module, args: Any, output: Any, name: str = name) -> None:
            for at, tensor in tensors(name, output):
                seen.append((at, tensor.detach().to("cpu", copy=True)))

        handles.append(module.register_forward_hook(keep))
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def same(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors have the same type, shape and bits. All NaNs count as the same."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    if a.is_floating_point() and a.itemsize > 1:
        if not torch.equal(a.isnan(), b.isnan()):
            return False
        a, b = a.masked_fill(a.isnan(), 0), b.masked_fill(b.isnan(), 0)
    return torch.equal(
        a.contiguous().reshape(-1).view(torch.uint8), b.contiguous().reshape(-1).view(torch.uint8)
    )
