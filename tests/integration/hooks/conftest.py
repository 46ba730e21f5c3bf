"""A small model, and its input."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn


@pytest.fixture
def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(inplace=True), nn.Linear(16, 3))


@pytest.fixture
def x() -> Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(2))
