"""The data source of Ray that reads rows of captures."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from ..._extras import extra
from ...errors import InvalidArgumentError
from ..reading.elements import dtype_name, torch_dtype
from ..rows import COLUMNS
from ..token_rows.dataset_tokens import DatasetTokens

with extra("ray", "ray_dataset"):
    from ray.data import Datasource, ReadTask
    from ray.data.block import Block, BlockAccessor, BlockMetadata

__all__ = ["CaptureSource"]

# Bytes that are decoded at a time; each is a block of Ray.
_BLOCK_BYTES = 16 << 20


class CaptureSource(Datasource):  # type: ignore[misc]
    """Rows of captures, read in tasks of consecutive rows of one capture.

    Args: see `ray_dataset`. All paths are absolute.
    """

    def __init__(
        self,
        captures: list[str],
        layers: list[str],
        columns: tuple[str, ...],
        dtype: Any,
        **how: Any,
    ) -> None:
        super().__init__()
        if not captures or not layers:
            raise InvalidArgumentError(f"captures = {captures}, layers = {layers}: one is empty")
        if unknown := [name for name in columns if name not in COLUMNS]:
            raise InvalidArgumentError(
                f"columns {', '.join(unknown)}: choose from {', '.join(COLUMNS)}"
            )
        self._layers, self._columns, self._how = layers, columns, how
        self._dtype = None if dtype is None else dtype_name(dtype)
        with contextlib.closing(DatasetTokens(captures, layers, **how)) as tokens:
            rows = [len(one) for one in tokens.sets]
            self._row_bytes = 8 * len(columns) + sum(
                tokens.vector_bytes[name] * self._given(tokens.dtypes[name]).itemsize
                // torch_dtype(tokens.dtypes[name]).itemsize
                for name in tokens.names
            )  # fmt: skip
        self._captures = list(zip(captures, rows, strict=True))
        self._rows = sum(rows)

    def _given(self, stored: str) -> torch.dtype:
        """The type of the values of a layer: float32 for the floats that numpy does not have."""
        wanted = torch_dtype(stored if self._dtype is None else self._dtype)
        foreign = wanted.is_floating_point and wanted.itemsize < 4 and wanted != torch.float16
        return torch.float32 if foreign else wanted

    def get_name(self) -> str:
        return "Captures"

    def estimate_inmemory_data_size(self) -> int:
        return self._rows * self._row_bytes

    def get_read_tasks(
        self,
        parallelism: int,
        per_task_row_limit: int | None = None,
        data_context: Any = None,
    ) -> list[ReadTask]:
        most = max(-(-self._rows // max(parallelism, 1)), 1)
        tasks = []
        for capture, rows in self._captures:
            for first in range(0, rows, most):
                end = min(first + most, rows)
                about = BlockMetadata(
                    num_rows=end - first,
                    size_bytes=(end - first) * self._row_bytes,
                    exec_stats=None,
                    input_files=(capture,),
                )
                read = functools.partial(self._read, capture, rows, first, end)
                tasks.append(ReadTask(read, about, per_task_row_limit=per_task_row_limit))
        return tasks

    def _read(self, capture: str, rows: int, first: int, end: int) -> Iterator[Block]:
        """The rows [first, end) of a capture, which had ``rows`` rows when the tasks were made."""
        size = max(_BLOCK_BYTES // self._row_bytes, 1)
        with contextlib.closing(DatasetTokens([capture], self._layers, **self._how)) as tokens:
            if tokens.rows != rows:
                raise InvalidArgumentError(
                    f"{capture} has {tokens.rows} rows, and had {rows} when the data set was made"
                )
            for at in range(first, end, size):
                plan = tokens.plan(np.arange(at, min(at + size, end)))
                batch = tokens.read(plan, self._columns, None)
                yield BlockAccessor.batch_to_block(
                    {name: self._plain(name, values, tokens) for name, values in batch.items()}
                )

    def _plain(self, name: str, values: Any, tokens: DatasetTokens) -> Any:
        """A column as a numpy array of its own, because `DatasetTokens` uses its memory again."""
        if isinstance(values, list):
            return np.array(values, object)
        if name in tokens.dtypes:
            values = values.to(self._given(tokens.dtypes[name]))
        return values.numpy().copy()
