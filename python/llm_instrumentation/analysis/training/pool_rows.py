"""The rows of a shuffle buffer."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ..._native import exchange_rows
from ..token_rows.dataset_tokens import Batch
from .recycled import Recycled
from .shuffled import void

__all__ = ["PoolRows"]

Ints = npt.NDArray[np.int64]


class PoolRows:
    """The rows of a shuffle buffer: a tensor of each layer, and the columns.

    torch would share the copying of rows among threads, which then wait for those that decode.

    Args:
        size: how many rows.
        vectors: type and shape of the vector of each layer.
        columns: names of columns, each with whether it has texts. The others have integers.
    """

    def __init__(
        self,
        size: int,
        vectors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]],
        columns: Mapping[str, bool],
    ) -> None:
        self._memory = Recycled()
        self._vectors = {
            name: _room(Recycled(), dtype, (size, *shape))
            for name, (dtype, shape) in vectors.items()
        }
        self._columns: dict[str, npt.NDArray[Any]] = {
            name: np.empty(size, object if texts else np.int64) for name, texts in columns.items()
        }

    def put(self, slots: Ints, rows: Batch) -> None:
        """Copies rows to slots."""
        for name, vectors in self._vectors.items():
            # numpy copies a row at once if it is one value.
            void(_raw(vectors))[slots] = void(_raw(rows[name]))
        for name, cells in self._columns.items():
            cells[slots] = rows[name]

    def take(self, slots: Ints, refill: Batch | None = None) -> Batch:
        """Copies the rows of slots, and puts the rows of `refill` in their places."""
        batch: Batch = {}
        for name, vectors in self._vectors.items():
            out = _room(self._memory, vectors.dtype, (len(slots), *vectors.shape[1:]))
            rows = None if refill is None else _raw(refill[name])
            exchange_rows(_raw(vectors), slots, _raw(out), rows)
            batch[name] = out
        for name, cells in self._columns.items():
            some = cells[slots]
            batch[name] = some.tolist() if cells.dtype == object else torch.from_numpy(some)
            if refill is not None:
                cells[slots] = refill[name]
        return batch


def _room(memory: Recycled, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    return memory.take(dtype.itemsize * math.prod(shape)).view(dtype).view(shape)


def _raw(rows: torch.Tensor) -> npt.NDArray[np.uint8]:
    """The bytes of rows, [rows, bytes of a row], in the same memory."""
    return rows.reshape(len(rows), -1).view(torch.uint8).numpy()
