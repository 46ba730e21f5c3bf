"""All units of a layer at a glance, and one unit in full, read in steps.

A scan is a generator. It yields the rows that are done and how many there are, after each block of
16 MiB, and returns what it found. So a program can show the progress, do something else between two
blocks, and stop.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Generator, Iterable
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import numpy.typing as npt

from ...progress.bars import Progress, reported
from ..reader import ActivationReader
from ..reading.opened import Capture, opened
from ..token_rows.contexts import TokenTexts
from ._blocks import Vectors, at_least, rows_of_layer, vector_blocks, width_of
from ._units import ChosenUnits, Unit

if TYPE_CHECKING:
    import pandas as pd
    from torch import Tensor, nn

__all__ = [
    "LayerUnits", "RelatedUnit", "UnitPage", "layer_units", "scan_layer", "scan_unit",
    "unit_page",
]  # fmt: skip

Ints = npt.NDArray[np.int64]
Found = TypeVar("Found")

_VALUES_BYTES = 2 << 30  # of the values of one unit
_LOST = 1e-13  # a variance below this share of a sum of squares is rounding


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class LayerUnits:
    """Statistics of all units of a layer.

    Values that are NaN or infinite count in `not_finite` and nowhere else. A unit without a finite
    value has NaN in place of its statistics.

    Attributes:
        layer: the layer.
        rows: number of rows.
        minimum, maximum, mean, std: float64 [units]: of the values of each unit.
        positive: int64 [units]: number of rows where the value is above 0.
        not_finite: int64 [units]: number of rows where the value is NaN or infinite.
    """

    layer: str
    rows: int
    minimum: Vectors
    maximum: Vectors
    mean: Vectors
    std: Vectors
    positive: Ints
    not_finite: Ints

    def __len__(self) -> int:
        return len(self.mean)

    def __repr__(self) -> str:
        return f"<LayerUnits of {self.layer!r}: {len(self):,} units on {self.rows:,} rows>"

    def to_pandas(self) -> pd.DataFrame:
        """A row for each unit.

        Raises:
            MissingExtraError: pandas is not installed; the extra "report" brings it.
        """
        from ..._extras import extra

        with extra("report", "A table"):
            import pandas as pd

        names = ("minimum", "maximum", "mean", "std", "positive", "not_finite")
        found: pd.DataFrame = pd.DataFrame({name: getattr(self, name) for name in names})
        return found


@dataclasses.dataclass(frozen=True)
class RelatedUnit:
    """A unit of the same layer whose values rise and fall with those of another one.

    Attributes:
        unit: its number.
        correlation: Pearson's, of the values of the two units on the rows where both are finite.
    """

    unit: int
    correlation: float


@dataclasses.dataclass(frozen=True)
class UnitPage:
    """A unit, and the units of its layer whose values correlate with its own.

    Attributes:
        unit: its statistics, contexts and effects.
        related: those with the largest magnitude of the correlation, the largest first.
    """

    unit: Unit
    related: list[RelatedUnit]


def layer_units(
    capture: Capture,
    layer: str,
    *,
    without_tokens: Iterable[int] = (),
    progress: Progress = None,
) -> LayerUnits:
    """Statistics of all units of a layer, to find those worth a look.

    The capture is read once, in blocks of 16 MiB; it takes the memory of three at most. Padding has
    no row.

    Args:
        capture: a reader or the path of a stream.
        layer: the layer's name.
        without_tokens: ids of tokens without a row, as those of special tokens.
        progress: show a progress bar, or a function to call with the rows that are done and all
            rows; None: show a bar on a terminal, and in a notebook.

    Raises:
        InvalidArgumentError: (a ValueError) the layer has complex values or no rows.
        NoCallsError: (a LookupError) the capture does not have what the model was given.
        NotTokenAlignedError: (a ValueError) the layer has no vector for each token.
        UnknownActivationError: (a KeyError) there is no such layer.
        NotFoundError: (a FileNotFoundError) there is no such file.
        CorruptError: (a ValueError) bytes of the capture differ from the written ones.
    """
    with opened(capture) as reader:
        return _finished(scan_layer(reader, layer, without_tokens=without_tokens), progress)


def unit_page(
    capture: Capture,
    layer: str,
    unit: int,
    *,
    k: int = 20,
    context: int = 32,
    related: int = 10,
    tokenizer: Any = None,
    unembedding: nn.Module | Tensor | None = None,
    writes: nn.Module | Tensor | None = None,
    logits: int = 10,
    without_tokens: Iterable[int] = (),
    progress: Progress = None,
) -> UnitPage:
    """What `top_contexts` finds for a unit, and the units whose values correlate with its own.

    The capture is read once, in blocks of 16 MiB; it takes the memory of three at most, and 70
    bytes for each row.

    Args:
        capture: a reader or the path of a stream.
        layer: the layer's name.
        unit: the number of the unit.
        k: contexts at each end.
        context: the largest number of tokens in a context.
        related: the largest number of related units.
        tokenizer: its ``decode`` gives the texts of tokens.
        unembedding: as for `top_contexts`.
        writes: likewise.
        logits: likewise.
        without_tokens: likewise.
        progress: as for `layer_units`.

    Raises:
        InvalidArgumentError: (a ValueError) there is no such unit; an argument is out of its range;
            the layer has complex values or no rows; `unembedding` or `writes` does not fit.
        UnsupportedError: (a TypeError) it is not known what the model does behind its last block.
        NoCallsError, NotTokenAlignedError, UnknownActivationError, NotFoundError, CorruptError: as
            for `layer_units`.
    """
    with opened(capture) as reader:
        scan = scan_unit(
            reader, layer, unit, k=k, context=context, related=related, tokenizer=tokenizer,
            unembedding=unembedding, writes=writes, logits=logits, without_tokens=without_tokens,
        )  # fmt: skip
        return _finished(scan, progress)


def _finished(scan: Generator[tuple[int, int], None, Found], progress: Progress) -> Found:
    """What a scan returns."""
    with reported(progress, "units") as told:
        while True:
            try:
                told(*next(scan))
            except StopIteration as end:
                found: Found = end.value
                return found


def scan_layer(
    reader: ActivationReader, layer: str, *, without_tokens: Iterable[int] = ()
) -> Generator[tuple[int, int], None, LayerUnits]:
    """The scan of `layer_units`. The first step reads no values: it finds the rows."""
    rows = rows_of_layer(
        reader, layer, steps=None, without_tokens=without_tokens, without_calls=False
    )
    sums = _UnitSums(width_of(rows))
    yield 0, len(rows)
    for first, vectors in vector_blocks(rows, lambda done: None):
        sums.add(vectors)
        done = first + len(vectors)
        del vectors  # before the next block is read
        yield done, len(rows)
    return sums.found(layer, len(rows))


def scan_unit(
    reader: ActivationReader,
    layer: str,
    unit: int,
    *,
    k: int = 20,
    context: int = 32,
    related: int = 10,
    tokenizer: Any = None,
    unembedding: nn.Module | Tensor | None = None,
    writes: nn.Module | Tensor | None = None,
    logits: int = 10,
    without_tokens: Iterable[int] = (),
) -> Generator[tuple[int, int], None, UnitPage]:
    """The scan of `unit_page`. The first step reads no values: it finds rows and effects."""
    for name, number in (("k", k), ("context", context), ("related", related), ("logits", logits)):
        at_least(name, number, 1)
    rows = rows_of_layer(
        reader, layer, steps=None, without_tokens=without_tokens, without_calls=False
    )
    chosen = ChosenUnits(rows, unit, None)
    texts = TokenTexts(tokenizer)
    effects = chosen.effects(unembedding, writes, logits, texts)
    values = chosen.room(rows, _VALUES_BYTES)
    correlations = _Correlations(width_of(rows), unit)
    yield 0, len(rows)
    for first, vectors in vector_blocks(rows, lambda done: None):
        chosen.fill(values[:, first : first + len(vectors)], vectors)
        correlations.add(vectors)
        done = first + len(vectors)
        del vectors  # before the next block is read
        yield done, len(rows)
    (found,) = chosen.described(rows, values, effects, k, context, texts)
    return UnitPage(found, correlations.largest(related))


class _UnitSums:
    """The sums that the statistics of units are made of.

    Values are counted from the first finite one of their unit on. So the sums of squares keep their
    digits beside a large mean, and a unit with one value has a variance of exactly 0.
    """

    def __init__(self, width: int) -> None:
        self._origin = np.full(width, np.nan)
        self._sum, self._squares = np.zeros(width), np.zeros(width)
        self._low, self._high = np.full(width, np.inf), np.full(width, -np.inf)
        self._count, self._rows = np.zeros(width, np.int64), 0
        self._positive = np.zeros(width, np.int64)

    def add(self, vectors: Vectors) -> None:
        """Takes a block of rows, [rows, width], and overwrites it."""
        finite = np.isfinite(vectors)
        self._origin = _origin(self._origin, vectors, finite)
        self._rows += len(vectors)
        self._count += finite.sum(axis=0)
        with np.errstate(all="ignore"):
            self._positive += ((vectors > 0) & finite).sum(axis=0)
            vectors[~finite] = np.nan
            self._low = np.fmin(self._low, np.fmin.reduce(vectors, axis=0))
            self._high = np.fmax(self._high, np.fmax.reduce(vectors, axis=0))
            vectors -= self._origin
            vectors[~finite] = 0.0
            self._sum += vectors.sum(axis=0)
            self._squares += np.einsum("rw,rw->w", vectors, vectors)

    def found(self, layer: str, rows: int) -> LayerUnits:
        """The statistics of all blocks."""
        with np.errstate(all="ignore"):
            mean = self._sum / self._count
            variance = np.maximum(0.0, self._squares / self._count - mean**2)
        none = self._count == 0
        return LayerUnits(
            layer, rows,
            minimum=np.where(none, np.nan, self._low), maximum=np.where(none, np.nan, self._high),
            mean=self._origin + mean, std=np.sqrt(variance),
            positive=self._positive, not_finite=self._rows - self._count,
        )  # fmt: skip


class _Correlations:
    """Pearson's correlations of one unit with all of its layer, from sums.

    A row counts for a pair of units if both values are finite. Values are counted from the first
    finite one of their unit on, as in `_UnitSums`.
    """

    def __init__(self, width: int, unit: int) -> None:
        self._unit = unit
        self._origin = np.full(width, np.nan)
        self._count, self._x, self._xx, self._y, self._yy, self._xy = np.zeros((6, width))

    def add(self, vectors: Vectors) -> None:
        """Takes a block of rows, [rows, width], and overwrites it."""
        finite = np.isfinite(vectors)
        self._origin = _origin(self._origin, vectors, finite)
        with np.errstate(all="ignore"):
            y = vectors
            y -= self._origin
            if finite.all():
                x = y[:, self._unit].copy()
                self._count += len(y)
                self._x += x.sum()
                self._xx += x @ x
            else:
                both = finite & finite[:, [self._unit]]
                y[~both] = 0.0
                x = y[:, self._unit].copy()
                self._count += both.sum(axis=0)
                self._x += np.einsum("r,rw->w", x, both)
                self._xx += np.einsum("r,rw->w", x * x, both)
            self._y += y.sum(axis=0)
            self._yy += np.einsum("rw,rw->w", y, y)
            self._xy += x @ y

    def largest(self, count: int) -> list[RelatedUnit]:
        """The units with the largest magnitude; those without a correlation are left out."""
        with np.errstate(all="ignore"):
            of_x = self._xx - self._x**2 / self._count
            of_y = self._yy - self._y**2 / self._count
            found = (self._xy - self._x * self._y / self._count) / np.sqrt(of_x * of_y)
            known = (of_x > _LOST * self._xx) & (of_y > _LOST * self._yy) & np.isfinite(found)
        known[self._unit] = False
        numbers = np.flatnonzero(known)
        numbers = numbers[np.argsort(-np.abs(found[numbers]), kind="stable")][:count]
        values = np.clip(found[numbers], -1.0, 1.0).tolist()
        return [RelatedUnit(*one) for one in zip(numbers.tolist(), values, strict=True)]


def _origin(known: Vectors, vectors: Vectors, finite: npt.NDArray[np.bool_]) -> Vectors:
    """The first finite value of each unit; NaN: there was none yet."""
    if not np.isnan(known).any():
        return known
    first = vectors[finite.argmax(axis=0), np.arange(vectors.shape[1])]
    return np.where(np.isnan(known) & finite.any(axis=0), first, known)
