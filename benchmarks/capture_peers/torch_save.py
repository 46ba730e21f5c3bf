"""torch.save, one file per tensor."""

from __future__ import annotations

import torch

from .contender import Contender, each_tensor

OWN_PROCESS = False


def contenders(model: torch.nn.Module) -> list[Contender]:
    return [Contender("torch.save", each_tensor(model, ".pt", torch.save))]
