"""The tokens of one capture of which several layers have vectors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from ...errors import StrapError
from ..reader import ActivationReader
from ..rows import Rows
from .layer_tokens import LayerTokens

__all__ = ["CaptureTokens", "LayersDifferError", "Plan", "Where"]

Ints = npt.NDArray[np.int64]

#: Ranges to read, as for `Snapshot.read_elements`, by the type of their values.
Plan: TypeAlias = "dict[str, list[Ints]]"

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
        self._places = first.kept(padding, without_tokens)  # None: all
        if where is not None:
            places = np.arange(first.tokens) if self._places is None else self._places
            kept = np.asarray(where(Rows(first, places)))
            if kept.dtype != np.bool_ or kept.shape != places.shape:
                raise LayersDifferError(
                    f"where returned {kept.dtype} {list(kept.shape)}: return one bool for each of "
                    f"the {len(places)} rows"
                )
            self._places = places[kept]

    def __len__(self) -> int:
        return self.layers[0].tokens if self._places is None else len(self._places)

    def rows(self, layer: str) -> Rows:
        """The rows of a layer."""
        found = next(one for one in self.layers if one.layer == layer)
        return Rows(found, np.arange(found.tokens) if self._places is None else self._places)

    def update(self, digest: Any) -> None:
        """Adds which tokens are chosen to a digest."""
        digest.update(b"all" if self._places is None else self._places.data)

    def forget(self) -> None:
        """Frees the columns of the calls that were read, until they are needed again."""
        if self.reader._calls is not None:
            self.reader._calls.forget()

    def _places_of(self, rows: Ints) -> Ints:
        return rows if self._places is None else self._places[rows]

    def plan(self, rows: Ints, begins: Sequence[int]) -> Plan:
        """What to read for rows: the ranges of each type of values.

        Args:
            rows: the rows.
            begins: for each layer, the place of its first vector; the others follow it.
        """
        spans = self.layers[0].spans(self._places_of(rows))
        plan: Plan = {}
        for layer, begin in zip(self.layers, begins, strict=True):
            plan.setdefault(layer.dtype, []).append(layer.ranges(spans, begin))
        return plan

    def prefetch(self, plan: Plan) -> None:
        """Lets the disk bring what a plan reads. An empty plan gives the memory back."""
        rows = [part[:, 0] for ranges in plan.values() for part in ranges]
        self.reader._snapshot.prefetch(np.concatenate([np.empty(0, np.int64), *rows]))

    def read(self, plan: Plan, address: int, room: int) -> None:
        """Decodes what is planned to its places in `room` bytes at `address`."""
        for dtype, ranges in plan.items():
            all_ranges = np.concatenate(ranges) if len(ranges) > 1 else ranges[0]
            self.reader._snapshot.read_elements(all_ranges, dtype, address, room)

    def columns(self, names: Iterable[str], rows: Ints) -> dict[str, npt.NDArray[Any]]:
        """Columns of rows by name, as `Rows.column`."""
        return self.layers[0].columns(names, self._places_of(rows))
