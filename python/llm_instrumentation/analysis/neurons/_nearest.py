"""The rows of a layer that lie nearest to some vectors."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args, overload

import numpy as np
import numpy.typing as npt

from ..._extras import extra
from ..._html import block, table
from ...errors import InvalidArgumentError
from ...progress.bars import steps_bar
from ..files.export_source import text_order
from ..reading.opened import Capture, opened
from ..reading.selection import Selector
from ..token_rows.contexts import TextOrder, TokenContext, TokenTexts, aligned
from ._around import contexts_around
from ._blocks import Vectors, as_vectors, at_least, rows_of_layer, vector_blocks, width_of

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

__all__ = ["Metric", "Neighbour", "Neighbours", "nearest"]

Ints = npt.NDArray[np.int64]

Metric: TypeAlias = Literal["cosine", "dot", "euclidean"]
"""How near two vectors are: by their angle, their product, or their distance."""

_ROUNDING = 1e-9  # of sums in float64, many times over
_SHOWN = 10  # neighbours of a vector in a notebook


@dataclasses.dataclass(frozen=True)
class Neighbour(TokenContext):
    """A row near a vector, with the tokens around it.

    `value` and `values` are the scores of the tokens: cosines, products or distances.

    Attributes:
        step: number of the model's call.
    """

    step: int


class Neighbours(Sequence[list[Neighbour]]):
    """The nearest rows of each vector that was asked for, in that order.

    ``found[0]`` are those of the first vector, the nearest first. A notebook shows a table, and
    `print` writes one.

    Attributes:
        layer: the layer.
        metric: "cosine", "dot" or "euclidean".
        searched: number of rows that were compared.
        left_out: number of rows without a score, which are in no list: those with NaN or infinite
            values, and for "cosine" those of zeros.
        rows: int64 [vectors, k]: the places of the nearest rows, in the order of capture.
        scores: float64 [vectors, k]: cosines and products, the largest first, or distances, the
            smallest first.
    """

    def __init__(
        self,
        layer: str,
        metric: Metric,
        searched: int,
        left_out: int,
        found: Sequence[Sequence[Neighbour]],
    ) -> None:
        self.layer = layer
        self.metric = metric
        self.searched, self.left_out = searched, left_out
        self._found = tuple(map(list, found))
        self.rows: Ints = np.array([[one.row for one in of] for of in found], np.int64)
        self.scores: Vectors = np.array([[one.value for one in of] for of in found], np.float64)

    def __len__(self) -> int:
        return len(self._found)

    @overload
    def __getitem__(self, at: int) -> list[Neighbour]: ...
    @overload
    def __getitem__(self, at: slice) -> tuple[list[Neighbour], ...]: ...
    def __getitem__(self, at: int | slice) -> list[Neighbour] | tuple[list[Neighbour], ...]:
        return self._found[at]

    def __repr__(self) -> str:
        return (
            f"<Neighbours in {self.layer!r} by {self.metric}: {len(self)} vectors, "
            f"{self.searched:,} rows searched>"
        )

    def __str__(self) -> str:
        lines = []
        for number, of in enumerate(self):
            lines.append(f"vector {number}: {self.metric}, {self.searched:,} rows of {self.layer}")
            lines += aligned(of)
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        cells = [
            [str(one), f"{one.value:.4g}", str(one.sequence), str(one.position), str(number)]
            for number, of in enumerate(self)
            for one in of[:_SHOWN]
        ]
        more = max(map(len, self), default=0) > _SHOWN
        note = f"The first {_SHOWN} of each vector; to_pandas() has all." if more else ""
        heads = ["token", self.metric, "text", "position", "vector"]
        return block(repr(self).strip("<>"), table(heads, cells, note))

    def to_arrow(self) -> pa.Table:
        """A row for each neighbour: the number of the vector, the fields, and a line of text."""
        import pyarrow as pa

        records = [
            {"vector": number, **vars(one), "text": str(one)}
            for number, of in enumerate(self)
            for one in of
        ]
        fields = [
            ("vector", pa.int64()), ("row", pa.int64()), ("value", pa.float64()),
            ("peak", pa.int32()), ("step", pa.int64()), ("sequence", pa.int64()),
            ("position", pa.int64()), ("document", pa.string()),
            ("token_ids", pa.list_(pa.int64())), ("texts", pa.list_(pa.string())),
            ("values", pa.list_(pa.float64())), ("text", pa.string()),
        ]  # fmt: skip
        return pa.Table.from_pylist(records, pa.schema(fields))

    def to_pandas(self) -> pd.DataFrame:
        """`to_arrow` as a pandas table.

        Raises:
            MissingExtraError: pandas is not installed; the extra "report" brings it.
        """
        with extra("report", "A table"):
            import pandas as pd

        arrow = self.to_arrow()
        found: pd.DataFrame = pd.DataFrame(arrow.to_pylist(), columns=arrow.column_names)
        return found


def nearest(
    capture: Capture,
    layer: str,
    vectors: Any,
    k: int = 10,
    metric: Metric = "cosine",
    *,
    context: int = 16,
    tokenizer: Any = None,
    steps: Selector = None,
    without_tokens: Iterable[int] = (),
    without_calls: bool = False,
    max_rows: int | None = None,
    progress: bool | None = None,
) -> Neighbours:
    """Finds the rows of a layer that lie nearest to some vectors.

    Every row is compared with every vector, in float64, so the result is exact. The capture is read
    once for all vectors, in blocks of 16 MiB. Of equal scores the earlier row comes first. A vector
    that is in the capture finds itself.

    In memory are a few blocks, 66 bytes for each row, and `k` rows of each vector.

    Args:
        capture: a reader or the path of a stream.
        layer: the layer's name.
        vectors: a vector, or a matrix [vectors, width]. Those of heads are joined.
        k: neighbours of a vector.
        metric: "cosine": the cosine of the angle, from -1 to 1. "dot": the product. "euclidean":
            the distance, of which the smallest is the nearest.
        context: the largest number of tokens around a neighbour.
        tokenizer: its ``decode`` gives the texts of tokens.
        steps: as for `top_contexts`.
        without_tokens: likewise.
        without_calls: likewise.
        max_rows: likewise.
        progress: likewise.

    Raises:
        InvalidArgumentError: (a ValueError) an argument is out of its range; a vector has another
            width, NaN or infinite values, or is zero while the metric is "cosine"; the layer has
            complex values, no rows, or no row with a score.
        NoCallsError: (a LookupError) the capture does not have what the model was given.
        NotTokenAlignedError: (a ValueError) the layer has no vector for each token.
        UnknownActivationError: (a KeyError) there is no such layer.
        NotFoundError: (a FileNotFoundError) there is no such file.
        CorruptError: (a ValueError) bytes of the capture differ from the written ones.
    """
    for name, number in (("k", k), ("context", context)):
        at_least(name, number, 1)
    if max_rows is not None:
        at_least("max_rows", max_rows, 1)
    if metric not in get_args(Metric):
        choice = ", ".join(map(repr, get_args(Metric)))
        raise InvalidArgumentError(f"metric = {metric!r}: choose one of {choice}")
    with opened(capture) as reader:
        rows = rows_of_layer(
            reader, layer, steps=steps, without_tokens=without_tokens, without_calls=without_calls
        )
        rows = rows if max_rows is None else rows[:max_rows]
        width = width_of(rows)
        queries = as_vectors(vectors, width, "vectors")
        if metric == "cosine" and (zero := np.flatnonzero(~queries.any(axis=1))).size:
            raise InvalidArgumentError(
                f"vector {zero[0]} is zero, so it has no cosine: leave it out, or choose another "
                "metric"
            )
        search = _Search(queries, metric, k)
        with steps_bar("searching", progress) as told:
            for first, some in vector_blocks(rows, lambda done: told(done, len(rows), "")):
                search.add(first, some)
        if search.left_out == len(rows):
            raise InvalidArgumentError(f"no row of {layer!r} has a {metric} score")

        def scores(number: int, at: Ints) -> Vectors:
            return search.scores(rows[at].to_numpy().reshape(-1, width).astype(np.float64), number)

        order = TextOrder(text_order(rows), rows.column("position"), context)
        found = contexts_around(rows, order, search.rows, scores, TokenTexts(tokenizer))
        told_steps = [rows[of].column("step").tolist() for of in search.rows]
    neighbours = [
        [Neighbour(**vars(one), step=step) for one, step in zip(of, its, strict=True)]
        for of, its in zip(found, told_steps, strict=True)
    ]
    return Neighbours(layer, metric, len(rows), search.left_out, neighbours)


class _Search:
    """The nearest rows so far.

    Attributes:
        rows: for each vector the places of its nearest rows, the nearest first.
        left_out: number of rows without a score.
    """

    def __init__(self, queries: Vectors, metric: Metric, k: int) -> None:
        self._queries, self._metric, self._k = queries, metric, k
        self._norms = np.linalg.norm(queries, axis=1)
        self.left_out = 0
        self.rows: list[Ints] = [np.empty(0, np.int64)] * len(queries)
        self._scores: list[Vectors] = [np.empty(0)] * len(queries)

    def scores(self, vectors: Vectors, number: int) -> Vectors:
        """The scores of vectors for one query; NaN: a vector has none.

        Sums are not those of a product of matrices, whose rounding depends on the place of a vector
        among the others: equal vectors have equal scores.
        """
        query = self._queries[number]
        with np.errstate(all="ignore"):
            if self._metric == "euclidean":
                apart = vectors - query
                found: Vectors = np.sqrt(np.einsum("rw,rw->r", apart, apart))
            else:
                found = np.einsum("rw,w->r", vectors, query)
            if self._metric == "cosine":
                norms = np.sqrt(np.einsum("rw,rw->r", vectors, vectors))
                found = np.clip(found / (norms * self._norms[number]), -1.0, 1.0)
        found[~np.isfinite(found)] = np.nan
        return found

    def add(self, first: int, vectors: Vectors) -> None:
        """Compares a block of rows with all queries."""
        known = np.isfinite(vectors).all(axis=1)
        if self._metric == "cosine":
            known &= vectors.any(axis=1)
        self.left_out += int((~known).sum())
        sign = 1.0 if self._metric == "euclidean" else -1.0  # the smallest is the nearest
        for number, rough in enumerate(self._distances(vectors)):
            kept = self._scores[number]
            limit = kept[-1] if len(kept) == self._k else np.inf
            places = np.flatnonzero(known & (rough <= limit))
            scores = sign * self.scores(vectors[places], number)
            both = np.concatenate([kept, scores])
            rows = np.concatenate([self.rows[number], first + places])
            order = np.lexsort((rows, both))[: self._k]
            order = order[~np.isnan(both[order])]
            self._scores[number], self.rows[number] = both[order], rows[order]

    def _distances(self, vectors: Vectors) -> Vectors:
        """Lower bounds of the scores, [queries, vectors]; the smallest are the nearest.

        One product of matrices finds the few rows whose scores are worth to be computed.
        """
        with np.errstate(all="ignore"):
            products = self._queries @ vectors.T
            norms = np.sqrt(np.einsum("rw,rw->r", vectors, vectors))
            both = self._norms[:, None] * norms
            squares = self._norms[:, None] ** 2 + norms**2
            bounds: dict[Metric, Vectors] = {
                "cosine": -products / both - _ROUNDING,
                "dot": -products - _ROUNDING * both,
                "euclidean": np.sqrt(np.maximum(0.0, squares * (1 - _ROUNDING) - 2 * products)),
            }
        return bounds[self._metric]
