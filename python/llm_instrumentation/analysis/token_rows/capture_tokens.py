"""The tokens of one capture of which several layers have vectors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ...errors import StrapError
from ..reader import ActivationReader
from ..rows import Rows
from .layer_tokens import LayerTokens

__all__ = ["CaptureTokens", "LayersDifferError", "Where"]

Ints = npt.NDArray[np.int64]

#: Chooses tokens: receives the rows of a layer, returns a bool for each.
Where = Callable[[Rows], npt.NDArray[np.bool_]]


class LayersDifferError(StrapError, ValueError):
    """Layers or captures do not have vectors of the same tokens, widths or types."""


class CaptureTokens:
    """The tokens of one capture that all chosen layers have vectors of, in the order of capture.

    Args:
        reader: the capture.
        layers: names of layers.
        padding, without_tokens, without_calls: as for `ActivationReader.rows`.
        where: chooses tokens; None: all.

    Attributes:
        layers: the vectors of each layer.
        left_out: activations that are not used: without a call, or in a step that other layers
            have no activation of.

    Raises:
        LayersDifferError: in a step the layers have vectors of different tokens.
        NotTokenAlignedError: a layer has no vector for each token.
        NoCallsError: the capture does not have what the model was given.
    """

    def __init__(
        self,
        reader: ActivationReader,
        layers: Sequence[str],
        *,
        padding: bool = False,
        without_tokens: Iterable[int] = (),
        without_calls: bool = False,
        where: Where | None = None,
    ) -> None:
        def vectors(name: str, steps: Any = None) -> LayerTokens:
            return reader._vectors(name, steps, None, None, without_calls)

        self.reader = reader
        self.layers = [vectors(name) for name in layers]
        self.left_out = sum(layer.left_out for layer in self.layers)
        steps = [np.unique(layer.steps) for layer in self.layers]
        common = steps[0]
        for others in steps[1:]:
            common = np.intersect1d(common, others)
        for k, own in enumerate(steps):
            if len(own) != len(common):  # tensors were dropped, or the capture is torn
                used = vectors(layers[k], common.tolist())
                self.left_out += len(self.layers[k].steps) - len(used.steps)
                self.layers[k] = used
        first = self.layers[0]
        for layer in self.layers[1:]:
            if difference := first.difference(layer):
                raise LayersDifferError(f"{reader.path}: {difference}")
        self._numbers = first.kept(padding, without_tokens)  # None: all
        if where is not None:
            rows = self.rows(first.layer)
            kept = np.asarray(where(rows))
            if kept.dtype != np.bool_ or kept.shape != (len(rows),):
                raise LayersDifferError(
                    f"where returned {kept.dtype} {list(kept.shape)}: return one bool for each of "
                    f"the {len(rows)} rows"
                )
            self._numbers = rows._numbers[kept]

    def __len__(self) -> int:
        return self.layers[0].tokens if self._numbers is None else len(self._numbers)

    def rows(self, layer: str) -> Rows:
        """The rows of a layer."""
        found = next(one for one in self.layers if one.layer == layer)
        return Rows(found, np.arange(found.tokens) if self._numbers is None else self._numbers)

    def update(self, digest: Any) -> None:
        """Adds which tokens are chosen to a digest."""
        digest.update(b"all" if self._numbers is None else self._numbers.data)

    def forget(self) -> None:
        """Frees packets that were read ahead, and columns of calls, until they are needed again."""
        self.reader._snapshot.prefetch(np.empty(0, np.int64))
        if self.reader._calls is not None:
            self.reader._calls.forget()

    def _numbers_of(self, rows: Ints) -> Ints:
        return rows if self._numbers is None else self._numbers[rows]

    def ranges(self, rows: Ints, begins: Sequence[int]) -> dict[str, Ints]:
        """What to read for rows, as for `Snapshot.read_elements`, by the type of the values.

        Args:
            rows: the rows.
            begins: for each layer, the place of its first vector; the others follow it.
        """
        spans = self.layers[0].spans(self._numbers_of(rows))
        found: dict[str, list[Ints]] = {}
        for layer, begin in zip(self.layers, begins, strict=True):
            found.setdefault(layer.dtype, []).append(layer.ranges(spans, begin))
        return {dtype: np.concatenate(ranges) for dtype, ranges in found.items()}

    def columns(self, names: Iterable[str], rows: Ints) -> dict[str, npt.NDArray[Any]]:
        """Columns of rows by name, as `Rows.column`."""
        return self.layers[0].columns(names, self._numbers_of(rows))
