"""The texts of a call, and where the vectors of their tokens may lie in a tensor."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = ["LAYOUTS", "Text", "vectors_of"]


@dataclasses.dataclass(frozen=True)
class Text:
    """The tokens that a batch has in one call.

    Attributes:
        ids: of the tokens, [rows, tokens].
        real: where they are no padding, [rows, tokens].
        positions: of each token in its text, [rows, tokens]; of padding any number.
        sequence: the number of the first row's text in the capture.
        end: how many tokens the text has up to the last one of the call, with padding.
    """

    ids: Tensor
    real: Tensor
    positions: Tensor
    sequence: int = 0
    end: int = 0

    @classmethod
    def whole(cls, ids: Tensor, mask: Tensor | None = None) -> Text:
        """Texts from their first token on. A mask of None leaves out no token."""
        real = torch.ones_like(ids).bool() if mask is None else mask.bool()
        return cls(ids, real, real.long().cumsum(1) - 1)

    def without_ids(self) -> Text:
        """The same of a call that was given vectors in place of ids."""
        return dataclasses.replace(self, ids=torch.full_like(self.ids, -1))

    def columns(self) -> dict[str, list[int]]:
        """What the rows of these tokens have, in their order."""
        rows = (torch.arange(len(self.ids)) + self.sequence)[:, None].expand_as(self.ids)
        found = {"token_id": self.ids, "position": self.positions, "sequence": rows}
        return {name: values[self.real].tolist() for name, values in found.items()}


def _batch_first(x: Tensor, rows: int, tokens: int) -> Tensor | None:
    return x if x.dim() == 3 and x.shape[:2] == (rows, tokens) else None


def _tokens_first(x: Tensor, rows: int, tokens: int) -> Tensor | None:
    return x.transpose(0, 1) if x.dim() == 3 and x.shape[:2] == (tokens, rows) else None


def _flat(x: Tensor, rows: int, tokens: int) -> Tensor | None:
    x = x[0] if x.dim() == 3 and len(x) == 1 else x
    return x.unflatten(0, (rows, tokens)) if x.dim() == 2 and len(x) == rows * tokens else None


def _heads_first(x: Tensor, rows: int, tokens: int) -> Tensor | None:
    fits = x.dim() == 4 and x.shape[0] == rows and x.shape[2] == tokens
    return x.transpose(1, 2) if fits else None


def _heads_last(x: Tensor, rows: int, tokens: int) -> Tensor | None:
    return x if x.dim() == 4 and x.shape[:2] == (rows, tokens) else None


LAYOUTS: tuple[Callable[[Tensor, int, int], Tensor | None], ...] = (
    _batch_first, _tokens_first, _flat, _heads_first, _heads_last,
)  # fmt: skip


def vectors_of(text: Text, tensor: Tensor, layout: Any) -> Tensor | None:
    """The vectors of a text's real tokens in a tensor of a layout. None: it does not fit."""
    found = layout(tensor, *text.ids.shape)
    return None if found is None else found[text.real]
