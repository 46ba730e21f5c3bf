"""The contexts in which units and directions of a layer have their largest and smallest values."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, overload

import numpy as np
import numpy.typing as npt

from ..._extras import extra
from ..._pages import units
from ...errors import InvalidArgumentError
from ...progress.bars import steps_bar
from ..files.export_source import text_order
from ..reading.opened import Capture, opened
from ..reading.selection import Selector
from ..rows import Rows
from ..token_rows.contexts import TextOrder, TokenContext, TokenTexts, aligned
from ._around import contexts_around
from ._blocks import as_vectors, at_least, rows_of_layer, vector_blocks, width_of

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa
    from torch import Tensor, nn

    from ..sae.logits import TokenEffect

__all__ = ["QUANTILES", "ChosenUnits", "TopContexts", "Unit", "top_contexts"]

Ints = npt.NDArray[np.int64]
Values = npt.NDArray[np.floating[Any]]

#: The shares of rows whose values `Unit.quantiles` has.
QUANTILES = (0.0, 0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99, 1.0)
"""The shares of the rows whose values lie below each of `Unit.quantiles`."""

_BINS = 40
_LINES = 5  # contexts of a unit in a text
_WIDE = {"float64", "int32", "int64", "uint32", "uint64"}  # more digits than float32 has


@dataclasses.dataclass(frozen=True)
class Unit:
    """A unit or a direction on the rows of a layer.

    Rows without a value (NaN) count in `nan` and nowhere else. If no row has a value, all numbers
    are NaN and there are no contexts.

    Attributes:
        layer: the layer.
        name: the number of the unit as a text, or the name of the direction.
        unit: the place of the unit in the vectors of the layer; None: it is a direction.
        rows: number of rows, those with NaN included.
        nan: number of rows where the value is NaN.
        positive: number of rows where the value is above 0.
        mean, std: of the values, in float64. NaN if a value is infinite.
        quantiles: the values at `QUANTILES`, exactly; between two values the linear interpolation,
            or the smaller one if a value is infinite. The first one is the smallest value, the last
            one the largest.
        histogram: 40 counts: how many finite values lie in each bin.
        edges: 41 edges of the bins, at equal distances from the smallest to the largest finite
            value. A value on an edge counts in the bin above; the largest one in the last bin.
        contexts: the tokens around the largest values, the largest first.
        lowest: the tokens around the smallest values, the smallest first.
        promoted: the tokens whose logits it raises the most, the largest effect first; None: no
            unembedding was given.
        suppressed: the tokens whose logits it lowers the most, the smallest effect first; or None.
    """

    layer: str
    name: str
    unit: int | None
    rows: int
    nan: int
    positive: int
    mean: float
    std: float
    quantiles: tuple[float, ...]
    histogram: list[int]
    edges: list[float]
    contexts: list[TokenContext]
    lowest: list[TokenContext]
    promoted: list[TokenEffect] | None
    suppressed: list[TokenEffect] | None

    @property
    def title(self) -> str:
        """The layer, and the unit or direction, as a heading."""
        return f"{self.layer}, {'direction' if self.unit is None else 'unit'} {self.name}"

    @property
    def minimum(self) -> float:
        """The smallest value."""
        return self.quantiles[0]

    @property
    def maximum(self) -> float:
        """The largest value."""
        return self.quantiles[-1]

    def summary(self) -> str:
        """The statistics as a sentence."""
        told = (
            f"{units.counted(self.rows, 'row')}, {self.positive / self.rows:.1%} above 0; "
            f"from {self.minimum:.3g} to {self.maximum:.3g}, median "
            f"{self.quantiles[QUANTILES.index(0.5)]:.3g}, mean {self.mean:.3g}, standard deviation "
            f"{self.std:.3g}"
        )
        return told + (f"; {self.nan:,} of NaN" if self.nan else "")

    def __str__(self) -> str:
        """The statistics, the effects on logits, and the first contexts, on some lines."""
        lines = [self.title, f"  {self.summary()}"]
        for what, effects in (("promotes", self.promoted), ("suppresses", self.suppressed)):
            if effects:
                told = ", ".join(f"{effect} {effect.value:.2g}" for effect in effects[:_LINES])
                lines.append(f"  {what} {told}")
        for what, contexts in (("highest", self.contexts), ("lowest", self.lowest)):
            shown = contexts[:_LINES]
            lines += [f"  {what}:", *aligned(shown)] if shown else []
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        from .page import notebook_html

        return notebook_html([self])


class TopContexts(Sequence[Unit]):
    """Units and directions of one layer, in the order in which they were asked for.

    ``found[0]`` is the first one, and ``found["7"]`` the one of this name. A notebook shows all of
    them, and `print` writes them on some lines each. It holds no reader open.

    Attributes:
        layer: the layer.
        names: the names of the units and directions.
        rows: number of rows.
        values: float32 [units, rows], in the order of capture; NaN: the row has no value. float64
            if the layer has float64 or integers of 32 bits or more.
    """

    def __init__(self, layer: str, values: Values, found: Sequence[Unit]) -> None:
        self.layer = layer
        self.values = values
        self._found = tuple(found)
        self.names = tuple(one.name for one in self._found)
        self.rows = values.shape[1]

    def __len__(self) -> int:
        return len(self._found)

    @overload
    def __getitem__(self, at: int | str) -> Unit: ...
    @overload
    def __getitem__(self, at: slice) -> tuple[Unit, ...]: ...
    def __getitem__(self, at: int | str | slice) -> Unit | tuple[Unit, ...]:
        """One of them by its place or its name, or those of a slice.

        Raises:
            IndexError: there is no such place.
            InvalidArgumentError: there is no such name.
        """
        if not isinstance(at, str):
            return self._found[at]
        if at not in self.names:
            raise InvalidArgumentError(f"{at!r} was not asked for: {', '.join(self.names)}")
        return self._found[self.names.index(at)]

    def __repr__(self) -> str:
        return f"<TopContexts of {self.layer!r}: {len(self)} units on {self.rows:,} rows>"

    def __str__(self) -> str:
        return "\n\n".join(map(str, self))

    def _repr_html_(self) -> str:
        from .page import notebook_html

        return notebook_html(self)

    def to_arrow(self) -> pa.Table:
        """A row for each context, the highest of a unit before its lowest.

        The columns are layer, name, kind ("highest" or "lowest"), the fields of `TokenContext`, and
        the context as a line of text.
        """
        import pyarrow as pa

        records = [
            {"layer": one.layer, "name": one.name, "kind": kind, **vars(each), "text": str(each)}
            for one in self
            for kind, contexts in (("highest", one.contexts), ("lowest", one.lowest))
            for each in contexts
        ]
        return pa.Table.from_pylist(records, _schema())

    def to_pandas(self) -> pd.DataFrame:
        """`to_arrow` as a pandas table.

        Raises:
            MissingExtraError: pandas is not installed; the extra "report" brings it.
        """
        with extra("report", "A table"):
            import pandas as pd

        found: pd.DataFrame = pd.DataFrame(self.to_arrow().to_pylist(), columns=_schema().names)
        return found


@functools.lru_cache(1)
def _schema() -> pa.Schema:
    import pyarrow as pa

    return pa.schema(
        [
            ("layer", pa.string()), ("name", pa.string()), ("kind", pa.string()),
            ("row", pa.int64()), ("value", pa.float64()), ("peak", pa.int32()),
            ("sequence", pa.int64()), ("position", pa.int64()), ("document", pa.string()),
            ("token_ids", pa.list_(pa.int64())), ("texts", pa.list_(pa.string())),
            ("values", pa.list_(pa.float64())), ("text", pa.string()),
        ]
    )  # fmt: skip


def top_contexts(
    capture: Capture,
    layer: str,
    unit: int | Iterable[int] | None = None,
    *,
    direction: Any = None,
    k: int = 20,
    context: int = 32,
    tokenizer: Any = None,
    unembedding: nn.Module | Tensor | None = None,
    writes: nn.Module | Tensor | None = None,
    logits: int = 10,
    steps: Selector = None,
    without_tokens: Iterable[int] = (),
    without_calls: bool = False,
    max_rows: int | None = None,
    max_bytes: int = 2 << 30,
    progress: bool | None = None,
) -> TopContexts:
    """Finds the contexts in which units or directions have their largest and smallest values.

    A unit is one value of a layer's vectors, as a neuron of an MLP. A direction is a vector; its
    value at a token is the product with the token's vector, in float64. The capture is read once
    for all of them, in blocks of 16 MiB. Padding has no row.

    A text is cut into windows of `context` tokens from its first row on, and at most one of a
    unit's contexts has its peak in a window. Of equal values the earlier row counts. A row with NaN
    has no context.

    In memory are a block, 66 bytes for each row, and the values: 4 bytes for each row and unit.

    Args:
        capture: a reader or the path of a stream.
        layer: the layer's name.
        unit: the number of a unit, or several. Those of a layer with heads count through the
            vectors of all heads.
        direction: a vector, a matrix [directions, width], or a dict of vectors by name. A vector
            alone has the name "direction", rows of a matrix "direction 0" and so on.
        k: contexts at each end.
        context: the largest number of tokens in a context: half of them before the token with the
            value, and fewer where the text ends or its next token has no row.
        tokenizer: its ``decode`` gives the texts of tokens.
        unembedding: the matrix [vocabulary, width] for `promoted` and `suppressed`, or a model of
            transformers, as for `describe_features`; None: leave them out. The effects leave out
            the last norm.
        writes: the linear module by which the layer writes to the residual stream, as the
            ``down_proj`` of an MLP for its neurons, or its matrix [width of the residual stream,
            width of the layer]. None: the layer is the residual stream, or is added to it.
        logits: tokens of each kind.
        steps: the steps to read, as for `ActivationReader.select`; None: all.
        without_tokens: ids of tokens without a row, as those of special tokens. The first token of
            a text often has values a hundred times those of others.
        without_calls: see `ActivationReader.rows`; token ids are then unknown.
        max_rows: the first so many rows; None: all.
        max_bytes: memory of the values.
        progress: show a progress bar; None: on a terminal, and in a notebook.

    Raises:
        InvalidArgumentError: (a ValueError) an argument is out of its range; there is no such unit;
            a direction has another width, is zero, or has NaN; the layer has complex values or no
            rows; the values take more than `max_bytes`; `unembedding` or `writes` does not fit.
        UnsupportedError: (a TypeError) it is not known what the model does behind its last block.
        NoCallsError: (a LookupError) the capture does not have what the model was given.
        NotTokenAlignedError: (a ValueError) the layer has no vector for each token.
        UnknownActivationError: (a KeyError) there is no such layer.
        NotFoundError: (a FileNotFoundError) there is no such file.
        CorruptError: (a ValueError) bytes of the capture differ from the written ones.
    """
    for name, number in (("k", k), ("context", context), ("logits", logits)):
        at_least(name, number, 1)
    if max_rows is not None:
        at_least("max_rows", max_rows, 1)
    with opened(capture) as reader:
        rows = rows_of_layer(
            reader, layer, steps=steps, without_tokens=without_tokens, without_calls=without_calls
        )
        rows = rows if max_rows is None else rows[:max_rows]
        chosen = ChosenUnits(rows, unit, direction)
        texts = TokenTexts(tokenizer)
        effects = chosen.effects(unembedding, writes, logits, texts)
        values = chosen.room(rows, max_bytes)
        with steps_bar("units", progress) as told:
            for first, vectors in vector_blocks(rows, lambda done: told(done, len(rows), "")):
                chosen.fill(values[:, first : first + len(vectors)], vectors)
        found = chosen.described(rows, values, effects, k, context, texts)
    return TopContexts(layer, values, found)


class ChosenUnits:
    """The units and directions that were asked for.

    Attributes:
        names: the name of each, and its number if it is a unit.
    """

    def __init__(self, rows: Rows, unit: int | Iterable[int] | None, direction: Any) -> None:
        self._layer, self._width = rows.layer, width_of(rows)
        self._numbers = self._checked(unit)
        by_name = self._named(direction)
        if not self._numbers and not by_name:
            raise InvalidArgumentError("name a unit or a direction")
        self._directions = np.array([*by_name.values()]).reshape(-1, self._width)
        self.names: list[tuple[str, int | None]] = [
            (str(number), number) for number in self._numbers
        ]
        self.names += [(name, None) for name in by_name]

    def _checked(self, unit: int | Iterable[int] | None) -> list[int]:
        several = [] if unit is None else unit if isinstance(unit, Iterable) else [unit]
        found = list(dict.fromkeys(at_least("unit", number, 0) for number in several))
        if odd := [number for number in found if number >= self._width]:
            raise InvalidArgumentError(
                f"unit {odd[0]}: the vectors of {self._layer!r} have {self._width:,}, from 0 on"
            )
        return found

    def _named(self, direction: Any) -> dict[str, npt.NDArray[np.float64]]:
        if direction is None:
            return {}
        if isinstance(direction, Mapping):
            found = {
                str(name): as_vectors(one, self._width, f"direction {name!r}")
                for name, one in direction.items()
            }
            if odd := [name for name, one in found.items() if len(one) != 1]:
                raise InvalidArgumentError(f"direction {odd[0]!r}: give one vector for each name")
            by_name = {name: one[0] for name, one in found.items()}
        else:
            vectors = as_vectors(direction, self._width, "direction")
            by_name = {f"direction {number}": one for number, one in enumerate(vectors)}
            if len(vectors) == 1:
                by_name = {"direction": vectors[0]}
        for name, one in by_name.items():
            if not one.any():
                raise InvalidArgumentError(f"direction {name!r} is zero, so it is no direction")
            if name.isdecimal() and int(name) in self._numbers:
                raise InvalidArgumentError(f"direction {name!r} has the name of a unit: rename it")
        return by_name

    def room(self, rows: Rows, max_bytes: int) -> Values:
        """Empty memory for the values of each on each row, [units, rows].

        Raises:
            InvalidArgumentError: it would be more than `max_bytes`.
        """
        dtype = np.dtype(np.float64 if rows.dtype in _WIDE else np.float32)
        needed = len(self.names) * len(rows) * dtype.itemsize
        if needed > max_bytes:
            raise InvalidArgumentError(
                f"the values of {len(self.names):,} units on {len(rows):,} rows take "
                f"{units.size(needed)}, more than max_bytes = {max_bytes:,}: ask for fewer units "
                f"at once, or pass max_rows, or max_bytes={needed:,}"
            )
        return np.empty((len(self.names), len(rows)), dtype)

    def fill(self, part: Values, vectors: npt.NDArray[np.float64]) -> None:
        """Writes the values of each on some vectors [rows, width] to `part`, [units, rows]."""
        several = len(self._numbers)
        # Infinite values times 0 are NaN, and large ones infinite: neither is worth a warning.
        with np.errstate(invalid="ignore", over="ignore"):
            part[:several] = vectors[:, self._numbers].T
            for out, direction in zip(part[several:], self._directions, strict=True):
                # Not a product of matrices, whose rounding depends on the place in the block.
                out[:] = np.einsum("rw,w->r", vectors, direction)

    def described(
        self,
        rows: Rows,
        values: Values,
        effects: Sequence[Any],
        k: int,
        context: int,
        texts: TokenTexts,
    ) -> list[Unit]:
        """Each with its statistics and contexts.

        Args:
            rows: the rows.
            values: of each on each row.
            effects: of each, from `effects`.
            k: contexts at each end.
            context: the largest number of tokens in a context.
            texts: gives the texts of tokens.
        """
        order = TextOrder(text_order(rows), rows.column("position"), context)
        ends = []
        for sign in (1.0, -1.0):
            best = [_best(sign * of_unit, order, k) for of_unit in values]
            ends.append(
                contexts_around(rows, order, best, lambda number, at: values[number, at], texts)
            )
        return [
            Unit(
                layer=self._layer, name=name, unit=number, **_statistics(of_unit), contexts=high,
                lowest=low, promoted=promoted, suppressed=suppressed,
            )
            for (name, number), of_unit, high, low, (promoted, suppressed) in zip(
                self.names, values, *ends, effects, strict=True
            )
        ]  # fmt: skip

    def effects(
        self,
        unembedding: nn.Module | Tensor | None,
        writes: nn.Module | Tensor | None,
        logits: int,
        texts: TokenTexts,
    ) -> list[Any]:
        """The promoted and suppressed tokens of each; (None, None) without an unembedding."""
        if unembedding is None:
            if writes is not None:
                raise InvalidArgumentError("writes: it needs unembedding")
            return [(None, None)] * len(self.names)
        import torch

        from ..sae.logits import LogitEffects

        units_of = np.zeros((len(self._numbers), self._width))
        units_of[np.arange(len(self._numbers)), self._numbers] = 1.0
        written = torch.from_numpy(np.concatenate([units_of, self._directions]))
        if writes is not None:
            written = written @ _matrix(writes, self._width).T
        return list(LogitEffects(written, unembedding, logits).of(np.arange(len(written)), texts))


def _matrix(writes: nn.Module | Tensor, width: int) -> Tensor:
    """The matrix [outputs, inputs] of a linear module, in float64.

    Raises:
        InvalidArgumentError: the module has no matrix of floats, or it takes another width.
    """
    weight: Any = getattr(writes, "weight", writes)
    if not getattr(weight, "is_floating_point", lambda: False)() or weight.dim() != 2:
        raise InvalidArgumentError(
            f"writes: a {type(writes).__name__} has no matrix of floats: give the linear module "
            "behind the layer, unquantised, or its matrix [width of the residual stream, width]"
        )
    matrix: Tensor = weight.detach().cpu().double()
    if type(writes).__name__ == "Conv1D":  # of transformers; its weight is [inputs, outputs]
        matrix = matrix.T
    if matrix.shape[1] != width:
        raise InvalidArgumentError(
            f"writes takes vectors of {matrix.shape[1]} values, and those of the layer have {width}"
        )
    return matrix


def _statistics(values: Values) -> dict[str, Any]:
    """The fields of `Unit` that are numbers."""
    known = values[~np.isnan(values)].astype(np.float64)
    finite = known[np.isfinite(known)]
    with np.errstate(invalid="ignore"):
        histogram, edges = _histogram(finite)
        return {
            "rows": len(values),
            "nan": len(values) - len(known),
            "positive": int((known > 0).sum()),
            "mean": float(known.mean()) if len(known) else np.nan,
            "std": float(known.std()) if len(known) else np.nan,
            "quantiles": _quantiles(known, all_finite=len(finite) == len(known)),
            "histogram": histogram.tolist(),
            "edges": edges.tolist(),
        }


def _quantiles(known: npt.NDArray[np.float64], *, all_finite: bool) -> tuple[float, ...]:
    if not len(known):
        return (np.nan,) * len(QUANTILES)
    method: Any = (
        "linear" if all_finite else "inverted_cdf"
    )  # nothing lies between inf and a number
    return tuple(np.quantile(known, QUANTILES, method=method).tolist())


def _histogram(finite: npt.NDArray[np.float64]) -> tuple[Ints, npt.NDArray[np.float64]]:
    if not len(finite):
        return np.zeros(_BINS, np.int64), np.full(_BINS + 1, np.nan)
    low, high = float(finite.min()), float(finite.max())
    edges = np.linspace(low, high, _BINS + 1)
    if (np.diff(edges) <= 0).any():  # one value, or values that differ in their last digits only
        edges = low + np.linspace(-0.5, 0.5, _BINS + 1) * max(1.0, abs(low))
    return np.histogram(finite, edges)[0].astype(np.int64), edges


def _best(values: Values, order: TextOrder, k: int) -> Ints:
    """The rows of the largest values, one of each window. Of equal ones the first row counts."""
    known = np.flatnonzero(~np.isnan(values))
    if len(known) > (some := k * order.context):
        # A window has at most `context` rows, so this many rows are in `k` windows or more.
        least = -np.partition(-values[known], some - 1)[some - 1]
        known = known[values[known] >= least]
    known = known[np.lexsort((known, -values[known]))]
    _, firsts = np.unique(order.window(known), return_index=True)
    found: Ints = known[np.sort(firsts)[:k]]
    return found
