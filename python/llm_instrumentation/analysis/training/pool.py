"""The order of a shuffle buffer, without its data."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

__all__ = ["Draw", "PoolOrder"]

Ints = npt.NDArray[np.int64]


class Draw(NamedTuple):
    """One batch of a shuffle buffer.

    Attributes:
        slots: the slots of the batch's rows.
        refilled: how many of these slots, from the first on, then get the next rows.
    """

    slots: Ints
    refilled: int


class PoolOrder:
    """The order in which a shuffle buffer gives rows that it receives in turn.

    The buffer has `size` slots. Each batch draws random ones, and the next rows take these. When
    fewer rows than a batch are left, they are added behind the others, and what the buffer holds
    comes in a random order. The order depends on the arguments alone.

    Args:
        rows: the number of rows.
        size: slots of the buffer, at least a batch.
        batch: rows of a batch.
        seed: numbers that seed the generator.

    Attributes:
        held: the row in each slot; it changes as the draws go on.
    """

    def __init__(self, rows: int, size: int, batch: int, seed: tuple[int, ...]) -> None:
        self._rows = rows
        self._batch = batch
        self._random = np.random.default_rng(seed)
        self.held: Ints = np.arange(min(rows, size))

    def draws(self) -> Iterator[Draw]:
        """The batches in turn. Before a draw is given, `held` does not have its new rows."""
        size, following = len(self.held), len(self.held)
        while following + self._batch <= self._rows:
            slots = self._random.choice(size, self._batch, replace=False)
            yield Draw(slots, self._batch)
            self.held[slots] = np.arange(following, following + self._batch)
            following += self._batch
        self.held = np.append(self.held, np.arange(following, self._rows))
        rest = self._random.permutation(len(self.held))
        for first in range(0, len(rest), self._batch):
            yield Draw(rest[first : first + self._batch], 0)
