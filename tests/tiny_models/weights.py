"""Random weights whose effects can be told apart."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import nn

__all__ = ["seeded", "spread"]

_MATRIX, _VECTOR = 0.15, 0.1  # standard deviations
_SMALL = 0.06  # below it a matrix was drawn for training, with 0.02


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """A block in which models get the same weights each time. Memory without values is NaN."""
    before = torch.are_deterministic_algorithms_enabled()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(before)


def spread(model: nn.Module, seed: int) -> None:
    """Draws new values for small or missing weights.

    The weights that models have before their training are so small that all tokens look alike and
    all biases are 0. An error would be too small to see.
    """
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if not parameter.is_floating_point() or not parameter.numel():
                continue
            missing = not bool(parameter.isfinite().all())
            if parameter.dim() > 1:
                if missing or parameter.float().pow(2).mean().sqrt() < _SMALL:
                    parameter.copy_(torch.randn(parameter.shape, generator=random) * _MATRIX)
            elif missing or not parameter.any():
                parameter.copy_(torch.randn(parameter.shape, generator=random) * _VECTOR)
