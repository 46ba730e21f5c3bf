"""The rows of one layer of a data set in the order of capture, and the features on them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ...errors import InvalidArgumentError
from ..dataset import ActivationDataset
from ..files.export_source import text_order, whole_contexts
from ..reading.elements import torch_dtype
from ..rows import COLUMNS, Rows
from .training import check_layer, rows_of

__all__ = ["LayerRows", "RowEncoder"]

Ints = npt.NDArray[np.int64]


class LayerRows:
    """The rows of one layer of a data set, one capture after the other.

    The order of the data set's batches does not matter here.

    Args:
        data: the data set.
        layer: the layer.
        max_rows: the first so many rows; None: all.

    Attributes:
        layer: the layer.
        width: values of a vector. Those of heads are joined.

    Raises:
        InvalidArgumentError: the data set has no such layer, or no rows.
    """

    def __init__(self, data: ActivationDataset, layer: str, max_rows: int | None) -> None:
        check_layer(data, layer)
        self.layer = layer
        tokens = data._tokens
        self.width = int(np.prod(tokens.shapes[layer]))
        self._dtype = torch_dtype(data.dtype or tokens.dtypes[layer])
        first = data._first
        stop = first + (data.rows if max_rows is None else min(max_rows, data.rows))
        self._parts: list[Rows] = []
        for of_capture in tokens.sets:
            part = of_capture.rows(layer)[max(0, first) : max(0, stop)]
            self._parts.append(part)
            first, stop = first - len(of_capture), stop - len(of_capture)
        self._starts = np.cumsum([0, *map(len, self._parts)])
        if not len(self):
            raise InvalidArgumentError("the data set has no rows")

    def __len__(self) -> int:
        return int(self._starts[-1])

    def column(self, name: str, rows: Ints) -> npt.NDArray[Any]:
        """A column of rows, as `Rows.column`: int64, or objects for texts."""
        found = np.empty(len(rows), object if COLUMNS[name] is None else np.int64)
        for places, part in self._pieces(rows):
            found[places] = part.column(name)
        return found

    def vectors(self, rows: Ints) -> Tensor:
        """The vectors of rows, [rows, width].

        Raises:
            CorruptError: bytes of a capture differ from the written ones.
        """
        found = torch.empty((len(rows), self.width), dtype=self._dtype, device="cpu")
        for places, part in self._pieces(rows):
            found[torch.from_numpy(places)] = part.to_torch(self._dtype).flatten(1)
        return found

    def text_order(self) -> tuple[Ints, Ints, Ints]:
        """See `_export_source.text_order`. The texts of a capture follow those before."""
        found = [
            (order + base, starts + base, lengths)
            for base, (order, starts, lengths) in self._of_parts(text_order)
        ]
        order, starts, lengths = (np.concatenate(pieces) for pieces in zip(*found, strict=True))
        return order, starts, lengths

    def whole_contexts(self, context: int) -> tuple[Ints, int]:
        """See `_export_source.whole_contexts`. The contexts of a capture follow those before."""
        found = list(self._of_parts(lambda part: whole_contexts(part, context)))
        places = np.concatenate([places + base for base, (places, _) in found])
        return places, max(longest for _, (_, longest) in found)

    def _of_parts(self, function: Callable[[Rows], _T]) -> Iterator[tuple[int, _T]]:
        return zip(self._starts.tolist(), map(function, self._parts), strict=False)

    def _pieces(self, rows: Ints) -> Iterator[tuple[Ints, Rows]]:
        """The rows by capture, with their places among `rows`."""
        of = np.searchsorted(self._starts, rows, side="right") - 1
        for number in np.unique(of).tolist():
            places = np.flatnonzero(of == number)
            yield places, self._parts[number][rows[places] - self._starts[number]]


_T = TypeVar("_T")


class RowEncoder:
    """The activations of an autoencoder's features on rows.

    Args:
        sae: an autoencoder of SAELens, or a module with its ``encode`` and ``W_dec``.
        rows: the rows.
        features: the numbers of the features to keep; None: all.

    Attributes:
        sae: the autoencoder.
        rows: the rows.
        features: int64: the numbers of the features, in their order, each once.

    Raises:
        InvalidArgumentError: the autoencoder has another width, or no such feature.
    """

    def __init__(self, sae: Any, rows: LayerRows, features: Iterable[int] | None) -> None:
        self.sae = sae
        self.rows = rows
        count, width = sae.W_dec.shape
        if width != rows.width:
            raise InvalidArgumentError(
                f"{rows.layer!r} has vectors of {rows.width} values, its autoencoder takes {width}"
            )
        self.features: Ints = np.arange(count)
        self._chosen: Tensor | None = None
        if features is not None:
            self.features = np.unique(np.array(list(features), np.int64))
            if odd := [n for n in self.features.tolist() if not 0 <= n < count]:
                raise InvalidArgumentError(
                    f"feature {odd[0]}: the autoencoder of {rows.layer!r} has {count:,}, from 0 on"
                )
            if not len(self.features):
                raise InvalidArgumentError("features: name at least one")
            self._chosen = torch.from_numpy(self.features).to(sae.W_dec.device)

    def encode(self, rows: Ints) -> Tensor:
        """The activations on some rows, [rows, features], float32 on the autoencoder's device.

        Raises:
            CorruptError: bytes of a capture differ from the written ones.
        """
        weights = self.sae.W_dec
        vectors = rows_of(self.rows.vectors(rows), weights.dtype, str(weights.device))
        with torch.no_grad():
            found: Tensor = self.sae.encode(vectors)
        found = found.to_dense() if found.is_sparse else found
        found = found if self._chosen is None else found.index_select(1, self._chosen)
        return found.float()
