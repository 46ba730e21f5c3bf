"""How often a router chooses other experts in the corrupted run than in the clean one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...errors import UnsupportedError
from ..prompts import Prompts
from .residuals import Written
from .spans import Spans

__all__ = ["RoutingChanges"]


class RoutingChanges:
    """The tokens at which other experts write in the corrupted run, by block."""

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}
        self._tokens = 0

    def add(self, clean: Written, corrupted: Written, batch: Prompts, spans: Spans) -> None:
        """Adds the tokens of a batch. Padding does not count, if the mask says what is padding.

        Args:
            clean: the clean run.
            corrupted: the corrupted one, at the tokens of the clean run.
            batch: the examples.
            spans: theirs. With `others` only the tokens count that have a counterpart.
        """
        try:
            real = batch.real_tokens()
        except UnsupportedError:
            real = clean.values[0].new_ones(clean.values[0].shape[:2]).bool()
        if spans.others is not None and spans.index is not None:
            real = torch.isin(spans.index, torch.tensor(spans.sources, device=spans.index.device))
        self._tokens += int(real.sum())
        for number, writers in enumerate(clean.decoder.writers):
            if writers.kind == "experts":
                one, other = (_writing(run.values[number], len(writers.nodes))
                              for run in (clean, corrupted))  # fmt: skip
                differ = (one != other).any(-1) & real.to(one.device)
                name = f"m{writers.layer}"
                self._counts[name] = self._counts.get(name, 0) + int(differ.sum())

    def notes(self) -> dict[str, Any]:
        """The notes of a graph: for each block the share of the tokens; empty without experts."""
        if not self._counts:
            return {}
        return {"routing changes": {k: n / self._tokens for k, n in self._counts.items()}}


def _writing(parts: Tensor, experts: int) -> Tensor:
    """Which experts write something, booleans [batch, tokens, experts]."""
    return (parts.reshape(*parts.shape[:2], experts, -1) != 0).any(-1)
