"""Pairs the tensors of two captures and measures their differences."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from ...errors import CorruptError
from ..activation import Activation
from ..reader import ActivationReader, ActivationView
from ..reading.selection import Selector
from .difference import cosine, difference, relative_error
from .pairs import pair

__all__ = ["PAIR", "RTOL", "Comparing"]

#: The relative tolerance of a type. That of float8 is its machine epsilon; the others are the
#: tolerances of torch.testing.assert_close. Types that are not here are compared exactly.
RTOL = {
    "float64": 1e-7, "complex128": 1e-7,
    "float32": 1.3e-6, "complex64": 1.3e-6,
    "float16": 1e-3, "complex32": 1e-3,
    "bfloat16": 1.6e-2,
    "float8_e4m3fn": 0.125, "float8_e4m3fnuz": 0.125,
    "float8_e5m2": 0.25, "float8_e5m2fnuz": 0.25,
}  # fmt: skip

#: What is known of a pair of tensors; `CaptureComparison.pairs` describes the fields.
PAIR = np.dtype(
    [
        ("layer", np.int32), ("row_a", np.int64), ("row_b", np.int64), ("step", np.int64),
        ("token", np.int64), ("call", np.int64), ("compared", np.bool_), ("over", np.bool_),
        ("values", np.int64), ("nonfinite", np.int64), ("max_abs_error", np.float64),
        ("relative_error", np.float64), ("cosine", np.float64), ("tolerance", np.float64),
        ("error_squares", np.float64), ("a_squares", np.float64), ("b_squares", np.float64),
        ("products", np.float64),
    ]
)  # fmt: skip

_TOLD_EVERY = 16  # pairs between two calls of `progress`


class Comparing:
    """The pairs of tensors of two captures.

    Args:
        a, b: the captures.
        names: the layers of `a` to compare, each with its name in `b`.
        steps: the steps, as for `ActivationReader.select`.
        rtol: the relative tolerance; None: that of each pair.
        atol: the absolute tolerance.

    Attributes:
        a, b: views of the tensors, a pair at each place.
        pairs: an array of `PAIR`, in the order of execution; `run` fills it.
        reasons: why pairs could not be compared, by their places.
        only: for each layer the numbers of tensors of `a` and of `b` without a partner.
    """

    def __init__(
        self,
        a: ActivationReader,
        b: ActivationReader,
        names: Mapping[str, str],
        steps: Selector,
        rtol: float | None,
        atol: float,
    ) -> None:
        self._paths, self._atol = (a.path, b.path), atol
        self.only: list[tuple[int, int]] = []
        self.reasons: dict[int, str] = {}
        rows = []
        for number, (name, name_b) in enumerate(names.items()):
            view_a, view_b = a[name].select(steps=steps), b[name_b].select(steps=steps)
            found = pair(view_a, view_b)
            self.only.append((found.only_a, found.only_b))
            layer = np.full(len(found.a), number)
            rows.append(np.stack([view_a._rows[found.a], view_b._rows[found.b], layer]))
        table = np.concatenate(rows, axis=1)
        table = table[:, np.argsort(table[0], kind="stable")]
        self.a = ActivationView(a._snapshot, table[0])
        self.b = ActivationView(b._snapshot, table[1])
        self.pairs = np.zeros(table.shape[1], PAIR)
        self.pairs["layer"] = table[2]
        self.pairs["row_a"] = a._snapshot.first + table[0]
        self.pairs["row_b"] = b._snapshot.first + table[1]
        for column in ("step", "token", "call"):
            self.pairs[column] = self.a._column(column)
        self.pairs["relative_error"] = self.pairs["cosine"] = math.nan
        self.pairs["tolerance"] = self._tolerances() if rtol is None else rtol

    def _tolerances(self) -> npt.NDArray[np.float64]:
        """The relative tolerances of the pairs, by their types and the errors of storing them."""
        coarsest, stored = np.zeros((2, len(self.pairs)))
        for view in (self.a, self.b):
            catalogue = view._snapshot.catalogue
            for column in ("source_dtype", "stored_dtype"):
                codes, names = catalogue.texts(column)
                # Packets that no index describes are float16.
                known = np.array([RTOL.get(name, 0.0) for name in names] + [RTOL["float16"]])
                coarsest = np.maximum(coarsest, known[codes[view._rows]])
            with np.errstate(invalid="ignore", divide="ignore"):
                share = view._column("mse") / view._column("mean_square")
            # The values of a twin are exact, and where nothing was rounded no error is known.
            exact = np.isin(view._rows, np.fromiter(catalogue.twins, np.int64))
            exact |= ~np.isfinite(share)
            stored += np.sqrt(np.where(exact, 0.0, share))
        return coarsest + stored

    def run(self, progress: Callable[[int, int], Any]) -> None:
        """Compares all pairs. Small packets are decoded many at a time, as the views read ahead.

        Raises:
            CorruptError: a packet is damaged; the message names its capture.
        """
        for place, (a, b) in enumerate(zip(self.a, self.b, strict=True)):
            if reason := _incomparable(a, b) or self._fill(self.pairs[place], a, b):
                self.reasons[place] = reason
            if (place + 1) % _TOLD_EVERY == 0:
                progress(place + 1, len(self.pairs))

    def _fill(self, one: Any, a: Activation, b: Activation) -> str:
        """Compares a pair. Returns why it cannot be compared, or ""."""
        x, y = self._values(a, 0), self._values(b, 1)
        if x.size != y.size:  # of a packet that no index describes
            return f"{x.size} values in the first capture, {y.size} in the second"
        found = difference(x, y)
        error = math.sqrt(found.error_squares / max(1, found.values))
        rms = math.sqrt(found.a_squares / max(1, found.values))
        within = not found.nonfinite and error <= self._atol + float(one["tolerance"]) * rms
        one["compared"], one["over"] = True, not within
        one["relative_error"] = relative_error(found.error_squares, found.a_squares)
        one["cosine"] = cosine(found.products, found.a_squares, found.b_squares)
        for name, value in found._asdict().items():
            one[name] = value
        return ""

    def _values(self, activation: Activation, which: int) -> npt.NDArray[Any]:
        try:
            return activation.to_numpy()
        except CorruptError as error:
            raise CorruptError(
                f"{self._paths[which]}: {error}; strap salvage copies what is intact"
            ) from error


def _incomparable(a: Activation, b: Activation) -> str:
    """Why two tensors cannot be compared, as far as the indexes tell; or ""."""
    for activation, other in ((a, b), (b, a)):
        if activation.transform is not None and (
            (activation.transform, activation.parameters) != (other.transform, other.parameters)
        ):
            return "one capture has only some elements of the tensor, the other has others"
    shapes = a.shape, b.shape
    if None not in shapes and _without_ones(a.shape) != _without_ones(b.shape):
        return (
            f"shape {list(a.shape or ())} in the first capture, {list(b.shape or ())} in the second"
        )
    return ""


def _without_ones(shape: tuple[int, ...] | None) -> list[int]:
    return [size for size in shape or () if size != 1]
