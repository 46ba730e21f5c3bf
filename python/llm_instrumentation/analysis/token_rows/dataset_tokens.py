"""The tokens of several captures, and their vectors."""

from __future__ import annotations

import functools
import hashlib
import json
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from ..reader import ActivationReader
from ..reading.elements import torch_dtype
from ..training.recycled import Recycled
from .capture_tokens import CaptureTokens, LayersDifferError

__all__ = ["Batch", "DatasetTokens", "ReadPlan"]

_ALIGNMENT = 64  # of the vectors of a layer

Batch = dict[str, Any]
Ints = npt.NDArray[np.int64]


class ReadPlan(NamedTuple):
    """What to read for some rows.

    Attributes:
        parts: for each run of rows of one capture: the capture, its own rows, what to read.
        begins: where the vectors of each layer begin; then where they all end.
        rows: the number of rows.
    """

    parts: list[tuple[CaptureTokens, Ints, dict[str, Ints]]]
    begins: list[int]
    rows: int


class DatasetTokens:
    """The tokens of all captures, numbered in turn.

    Args: see `ActivationDataset`.

    Attributes:
        sets: the tokens of each capture.
        names: the layers.
        shapes: the shape of a vector, by layer.
        dtypes: the stored type of the values, by layer.
        vector_bytes: of a vector, by layer.
        rows: the number of tokens that are chosen; each is a row.
        left_out: activations that are not used; see `CaptureTokens`.
    """

    def __init__(self, captures: Sequence[str], layers: Sequence[str], **how: Any) -> None:
        self.sets: list[CaptureTokens] = []
        readers: list[ActivationReader] = []
        try:
            for capture in captures:
                reader = ActivationReader(capture)
                readers.append(reader)
                names = [name for pattern in layers for name in reader._fitting(pattern)]
                self.sets.append(CaptureTokens(reader, list(dict.fromkeys(names)), **how))
            self._check(captures)
        except BaseException:
            for reader in readers:
                reader.close()
            raise
        first = self.sets[0].layers
        self.names = [layer.layer for layer in first]
        self.shapes = {layer.layer: layer.shape for layer in first}
        self.dtypes = {layer.layer: layer.dtype for layer in first}
        self.vector_bytes = {layer.layer: layer.vector_bytes for layer in first}
        self.left_out = sum(tokens.left_out for tokens in self.sets)
        self._starts = np.cumsum([0, *map(len, self.sets)])
        self.rows = int(self._starts[-1])
        self._memory = Recycled()

    def _check(self, captures: Sequence[str]) -> None:
        """Checks that all captures have the same layers, models, widths and types."""

        def forms(tokens: CaptureTokens) -> list[tuple[str, str, Any, str]]:
            return [(layer.layer, layer.model, layer.shape, layer.dtype) for layer in tokens.layers]

        first = forms(self.sets[0])
        for path, tokens in zip(captures, self.sets, strict=True):
            for one, two in zip(first, forms(tokens), strict=False):
                if one != two:
                    raise LayersDifferError(
                        f"{captures[0]} has {_form(*one)}, {path} has {_form(*two)}: captures of "
                        "one data set need the same layers, models, widths and types"
                    )
            if len(tokens.layers) != len(first):
                raise LayersDifferError(
                    f"{captures[0]} has {len(first)} of the layers, {path} has {len(tokens.layers)}"
                )

    @functools.cached_property
    def identity(self) -> str:
        """A digest of what identifies the tokens: the captures, the layers, and their places."""
        digest = hashlib.blake2b(digest_size=16)
        for tokens in self.sets:
            about = [tokens.reader.capture_id, len(tokens), self.names]
            digest.update(json.dumps(about).encode())
            tokens.update(digest)
        return digest.hexdigest()

    def plan(self, rows: Ints) -> ReadPlan:
        """Finds out what to read for rows."""
        sizes = [len(rows) * size for size in self.vector_bytes.values()]
        aligned = [-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes]
        begins = np.cumsum([0, *aligned]).tolist()
        of = np.searchsorted(self._starts, rows, side="right") - 1
        parts = []
        done = 0
        while done < len(rows):  # the rows of one capture that stand next to each other
            others = np.flatnonzero(of[done:] != of[done])
            end = done + int(others[0]) if len(others) else len(rows)
            tokens = self.sets[int(of[done])]
            own = rows[done:end] - self._starts[of[done]]
            firsts = [
                begin + done * size
                for begin, size in zip(begins, self.vector_bytes.values(), strict=False)
            ]
            parts.append((tokens, own, tokens.ranges(own, firsts)))
            done = end
        return ReadPlan(parts, begins, len(rows))

    def prefetch(self, plan: ReadPlan) -> None:
        """Lets the disk bring what `read` will read."""
        for tokens, _, ranges in plan.parts:
            activations = np.concatenate([its[:, 0] for its in ranges.values()])
            tokens.reader._snapshot.prefetch(activations)

    def read(self, plan: ReadPlan, columns: Sequence[str], dtype: str | None) -> Batch:
        """The vectors and columns of rows, in their order.

        Args:
            plan: what to read.
            columns: names of columns.
            dtype: type of the values; None: as stored.
        """
        found: Batch = {}
        room = self._memory.take(plan.begins[-1])
        for begin, name in zip(plan.begins, self.names, strict=False):
            raw = room[begin : begin + plan.rows * self.vector_bytes[name]]
            typed = raw.view(torch_dtype(self.dtypes[name]))
            found[name] = typed.view(plan.rows, *self.shapes[name])
        texts: dict[str, Any] = {name: [] for name in columns}
        for tokens, own, ranges in plan.parts:
            for stored, its in ranges.items():
                tokens.reader._snapshot.read_elements(its, stored, room.data_ptr(), len(room))
            for name, values in tokens.columns(columns, own).items():
                texts[name].append(values)
        if dtype is not None:
            for name in self.names:
                found[name] = self._converted(found[name], torch_dtype(dtype))
        for name, pieces in texts.items():
            values = np.concatenate(pieces) if pieces else np.empty(0, np.int64)
            is_text = values.dtype.kind == "O"
            found[name] = values.tolist() if is_text else _tensor(values)
        return found

    def _converted(self, values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        if values.dtype == dtype:
            return values
        size = dtype.itemsize * math.prod(values.shape)
        out = self._memory.take(size).view(dtype).view(values.shape)
        return out.copy_(values)

    def forget(self) -> None:
        """Frees memory that only reading needs, until it is needed again."""
        self._memory = Recycled()
        for tokens in self.sets:
            tokens.forget()

    def close(self) -> None:
        """Closes the captures."""
        for tokens in self.sets:
            tokens.reader.close()


def _tensor(values: npt.NDArray[Any]) -> torch.Tensor:
    """A column of integers as int64; hashes keep their bits."""
    kept = values.view(np.int64) if values.dtype == np.uint64 else values.astype(np.int64)
    return torch.from_numpy(kept)


def _form(name: str, model: str, shape: tuple[int, ...], dtype: str) -> str:
    return f"{name!r} of model {model!r} with {list(shape)} of {dtype}"
