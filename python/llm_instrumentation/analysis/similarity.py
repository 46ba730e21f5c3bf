"""How similar the layers of captures are, by centred kernel alignment (CKA)::

    found = cka("run.stream")                # the blocks of the model beside each other
    found.values                             # [layers, layers], 1: the same but for rotation
    cka("base.stream", other="tuned.stream") # the layers of two models for the same tokens
    plots.plot_similarity(found)

Linear CKA (Kornblith et al. 2019, arXiv:1905.00414) compares how the tokens lie to each other in
the vectors of two layers. Rotating or scaling the vectors, or adding a constant, changes nothing,
and the widths may differ.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from .._extras import extra
from .._html import block, table
from .._pages import units
from ..errors import InvalidArgumentError
from ..progress.bars import steps_bar
from .dataset import ActivationDataset, LayersDifferError
from .reading.opened import Capture, opened
from .rows import Rows
from .token_rows.text_rows import chosen_layers

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["LayerSimilarity", "cka"]

_BATCH = 512  # tokens that are read and multiplied together
_LEAST = 4  # tokens that the unbiased estimate needs
_SHOWN = 30  # rows and columns of a table in a notebook
# An estimate below this share of its first term has lost its digits to rounding.
_ROUNDING = 1e-10

Pairs: TypeAlias = "list[tuple[int, int]]"


@dataclasses.dataclass(frozen=True, repr=False)
class LayerSimilarity:
    """The linear CKA of each layer with each other one.

    A notebook shows it as a table, and `plots.plot_similarity` draws it.

    Attributes:
        a: path of the capture of `layers`.
        b: path of the capture of `other_layers`; `a` again if only one was given.
        layers: names of the rows, in the order of execution.
        other_layers: names of the columns.
        values: float64, [layers, other_layers]. At most 1. A debiased value of layers that have
            nothing in common is about 0, and may be below; a biased one is above 0.
        tokens: number of tokens.
        debiased: whether the estimate is unbiased.
    """

    a: str
    b: str
    layers: tuple[str, ...]
    other_layers: tuple[str, ...]
    values: npt.NDArray[np.float64]
    tokens: int
    debiased: bool

    @property
    def title(self) -> str:
        """A title for a figure of the values."""
        how = "debiased" if self.debiased else "biased"
        return f"Linear CKA of {self.tokens:,} tokens, {how}"

    def to_pandas(self) -> pd.DataFrame:
        """The values as a table: `layers` is the index, `other_layers` are the columns.

        Raises:
            MissingExtraError: pandas is not installed; the extra "report" brings it.
        """
        with extra("report", "A table"):
            import pandas as pd

        found: pd.DataFrame = pd.DataFrame(self.values, list(self.layers), list(self.other_layers))
        return found

    def __repr__(self) -> str:
        size = " x ".join(map(str, self.values.shape))
        return f"<LayerSimilarity: {self.title}, {size} layers>"

    def _repr_html_(self) -> str:
        rounded = self.values.round(3) + 0.0  # not -0.000
        rows = (
            [name or "<root>", *(f"{value:.3f}" for value in of_layer[:_SHOWN])]
            for name, of_layer in zip(self.layers[:_SHOWN], rounded, strict=False)
        )
        heads = [name or "<root>" for name in self.other_layers[:_SHOWN]]
        more = max(self.values.shape) > _SHOWN
        note = f"The first {_SHOWN} layers; to_pandas() has all." if more else ""
        return block(repr(self).strip("<>"), table(["", *heads], rows, note))


def cka(
    capture: Capture,
    layers: str | Iterable[str] | None = None,
    other: Capture | None = None,
    debiased: bool = True,
    rows: int | None = None,
    *,
    other_layers: str | Iterable[str] | None = None,
    without_tokens: Iterable[int] = (),
    without_calls: bool = False,
    max_bytes: int = 2 << 30,
    progress: bool | None = None,
) -> LayerSimilarity:
    """Linear CKA of each layer with each other one, over the tokens of a capture.

    CKA is HSIC(X, Y) / √(HSIC(X, X) HSIC(Y, Y)), where X and Y are the [tokens, width] vectors of
    two layers less their means. The biased estimate of HSIC is ‖XᵀY‖² / (n-1)² for n tokens. Its
    CKA grows with width / n, also for layers that have nothing in common. The unbiased estimate
    (Song et al. 2012, used for CKA by Nguyen et al. 2021, arXiv:2010.15327) is, with the vectors xᵢ
    and yᵢ of token i ::

        [‖XᵀY‖² - n/(n-2) Σ ‖xᵢ‖²‖yᵢ‖² + Σ‖xᵢ‖² Σ‖yᵢ‖² / ((n-1)(n-2))] / (n(n-3))

    All are sums over tokens, in float64, so the result does not depend on batches.

    The capture is read once for the means, and then once for the products XᵀY. If the products of
    all pairs take more than `max_bytes`, it is read again for each group of pairs that fits.
    Besides `max_bytes` and the indexes it takes the memory of the data set, about three times 512
    tokens of all layers or 16 MiB, and 512 tokens of the layers of a group in float64.

    The time is that of tokens x width x width multiplications for each pair of layers; `rows`
    limits it.

    Args:
        capture: a reader or the path of a stream.
        layers: names or patterns of layers; None: the blocks of the model, as for `token_norms`.
        other: a capture of the same tokens, to compare with. None: the layers of `capture` are
            compared with each other.
        debiased: unbiased estimates; otherwise the biased ones, which most older papers show.
        rows: so many tokens, spread evenly over the capture; None: all.
        other_layers: as `layers`, of `other`; None: the same names, or the blocks.
        without_tokens: ids of tokens to leave out, as those of special tokens. A few vectors that
            are much longer than all others, as of the first token, decide on linear CKA.
        without_calls: see `ActivationReader.rows`. It lets each vector be a row of its own, for a
            model that is not given tokens.
        max_bytes: memory of the products.
        progress: show a progress bar; None: on a terminal, and in a notebook.

    Raises:
        InvalidArgumentError: (a ValueError) there are fewer than 4 tokens; a layer is constant, or
            has NaN, infinite or complex values; a pair alone takes more than `max_bytes`; or an
            argument is out of its range.
        LayersDifferError: (a ValueError) the captures, or the layers, have different tokens.
        NotTokenAlignedError: (a ValueError) a layer has no vector for each token.
        NoCallsError: (a LookupError) the capture does not have what the model was given.
        UnknownActivationError: (a KeyError) a name or pattern matches no layer.
        NotFoundError: (a FileNotFoundError) there is no such file.
        CorruptError: (a ValueError) a file is no stream, or a packet is damaged.
    """
    if rows is not None and (not isinstance(rows, int) or isinstance(rows, bool) or rows < _LEAST):
        raise InvalidArgumentError(f"rows = {rows!r}: give an integer from {_LEAST} on, or None")
    if other is None and other_layers is not None:
        raise InvalidArgumentError("other_layers are of another capture: pass other too")
    if layers is not None and not isinstance(layers, str):
        layers = list(layers)
    if other_layers is None:
        other_layers = layers
    how = {"without_tokens": tuple(without_tokens), "without_calls": without_calls}
    if without_calls and how["without_tokens"]:
        raise InvalidArgumentError("without_tokens needs the calls, which have the ids of tokens")
    with contextlib.ExitStack() as stack:
        sources = [stack.enter_context(_Source(capture, layers, rows, how))]
        if other is not None:
            sources.append(stack.enter_context(_Source(other, other_layers, rows, how)))
        _check_tokens(sources)
        widths = [width for source in sources for width in source.widths]
        first = len(sources[0].widths)
        pairs = _pairs(first, len(widths) - first)
        names = [name for source in sources for name in source.names]
        groups = _groups(pairs, widths, names, max_bytes)
        tokens = sources[0].data.rows
        with steps_bar("comparing layers", progress) as told:
            passes = _Passes(sources, names, (1 + len(groups)) * tokens, told)
            means = passes.means()
            hsic: dict[tuple[int, int], float] = {}
            for group in groups:
                hsic |= passes.hsic(group, means, debiased)
    columns = range(first, len(widths)) if other is not None else range(first)
    values = [
        [
            hsic[min(i, j), max(i, j)] / (math.sqrt(hsic[i, i]) * math.sqrt(hsic[j, j]))
            for j in columns
        ]
        for i in range(first)
    ]
    return LayerSimilarity(
        a=sources[0].path,
        b=sources[-1].path,
        layers=tuple(sources[0].names),
        other_layers=tuple(sources[-1].names),
        values=np.array(values),
        tokens=tokens,
        debiased=debiased,
    )


# ---- tokens ---------------------------------------------------------------------------------


class _Source:
    """The tokens of one capture, and their vectors at some layers.

    Attributes:
        path: the stream.
        data: the chosen tokens.
        tokens: how many there were to choose from.
        names: the layers.
        widths: the values of a vector of each layer.
    """

    def __init__(
        self,
        capture: Capture,
        layers: str | Iterable[str] | None,
        rows: int | None,
        how: Mapping[str, Any],
    ) -> None:
        with opened(capture) as reader:
            self.names = chosen_layers(reader, layers)
            self.path = reader.path
        self._rows = rows
        self.data = ActivationDataset(
            self.path, self.names, batch_size=_BATCH, columns=("token_id",), where=self._spread,
            **how,
        )  # fmt: skip
        self.widths = [math.prod(shape) for shape in self.data._tokens.shapes.values()]

    def _spread(self, rows: Rows) -> npt.NDArray[np.bool_]:
        """Chooses so many tokens, spread evenly."""
        self.tokens = len(rows)
        wanted = self.tokens if self._rows is None else min(self._rows, self.tokens)
        chosen = np.zeros(self.tokens, np.bool_)
        chosen[np.arange(wanted) * self.tokens // max(1, wanted)] = True
        return chosen

    def __enter__(self) -> _Source:
        return self

    def __exit__(self, *exc: object) -> None:
        self.data.close()


def _check_tokens(sources: Sequence[_Source]) -> None:
    """Refuses too few tokens, and captures with different numbers of them."""
    one, two = sources[0], sources[-1]
    if one.tokens != two.tokens:
        raise LayersDifferError(
            f"{one.path} has {one.tokens:,} tokens, {two.path} has {two.tokens:,}: capture both "
            "models with the same inputs"
        )
    if one.data.rows < _LEAST:
        raise InvalidArgumentError(
            f"{one.path} has {one.data.rows} tokens: CKA needs {_LEAST} or more, and thousands "
            "to tell much"
        )


# ---- sums -----------------------------------------------------------------------------------


def _pairs(layers: int, others: int) -> Pairs:
    """The pairs of layers whose HSIC is needed; `others` are numbered behind `layers`."""
    if not others:
        return [(i, j) for i in range(layers) for j in range(i, layers)]
    behind = range(layers, layers + others)
    across = [(i, j) for i in range(layers) for j in behind]
    return [(i, i) for i in range(layers + others)] + across


def _groups(
    pairs: Pairs, widths: Sequence[int], names: Sequence[str], max_bytes: int
) -> list[Pairs]:
    """Splits pairs so that the products of each group have room in memory."""
    groups: list[Pairs] = []
    taken = max_bytes
    for i, j in pairs:
        needed = 8 * widths[i] * widths[j]
        if needed > max_bytes:
            raise InvalidArgumentError(
                f"{names[i]!r} and {names[j]!r} are {widths[i]:,} and {widths[j]:,} values wide, "
                f"and their products take {units.size(needed)}, more than max_bytes = "
                f"{max_bytes:,}: choose narrower layers, or pass max_bytes={needed:,}"
            )
        if taken + needed > max_bytes:
            groups.append([])
            taken = 0
        groups[-1].append((i, j))
        taken += needed
    return groups


class _Passes:
    """Reads the tokens from the first to the last, and sums up over them.

    Args:
        sources: one capture or two, with the same tokens.
        names: the layers of all sources; a layer's number is its place.
        total: tokens of all passes.
        told: called with the tokens that are done, `total`, and a text.
    """

    def __init__(
        self, sources: Sequence[_Source], names: Sequence[str], total: int, told: Any
    ) -> None:
        self._sources, self._names = sources, names
        self._total, self._told = total, told
        self._done = 0

    def _batches(self) -> Iterator[list[torch.Tensor]]:
        """The vectors of some tokens: of each layer [tokens, width], as stored."""
        for parts in zip(*(source.data for source in self._sources), strict=True):
            ids = [part["token_id"] for part in parts]
            self._check_ids(ids[0], ids[-1])
            yield [
                part[name].flatten(1)
                for source, part in zip(self._sources, parts, strict=True)
                for name in source.names
            ]
            self._done += len(ids[0])
            self._told(self._done, self._total, "")

    def _check_ids(self, a: torch.Tensor, b: torch.Tensor) -> None:
        for k in ((a != b) & (a >= 0) & (b >= 0)).nonzero().flatten().tolist():
            one, two = self._sources[0].path, self._sources[-1].path
            raise LayersDifferError(
                f"a token of {one} has the id {a[k]}, in {two} it has {b[k]}: capture both models "
                "with the same inputs, in the same order"
            )

    def means(self) -> list[torch.Tensor]:
        """The mean vector of each layer.

        Raises:
            InvalidArgumentError: a layer has values without a mean.
        """
        firsts: list[torch.Tensor] = []
        sums: list[torch.Tensor] = []
        tokens = 0
        for batch in self._batches():
            if not firsts:
                self._check_real(batch)
                firsts = [rows[0].double() for rows in batch]
                sums = [torch.zeros_like(first) for first in firsts]
            for rows, first, total in zip(batch, firsts, sums, strict=True):
                # Less the first vector, so that the mean of equal vectors is exactly theirs.
                total += (rows.double() - first).sum(0)
            tokens += len(batch[0])
        means = [first + total / tokens for first, total in zip(firsts, sums, strict=True)]
        for name, mean in zip(self._names, means, strict=True):
            if not mean.isfinite().all():
                raise InvalidArgumentError(
                    f"{name!r} has NaN or infinite values: leave the layer out"
                )
        return means

    def _check_real(self, batch: Sequence[torch.Tensor]) -> None:
        for name, rows in zip(self._names, batch, strict=True):
            if rows.is_complex():
                raise InvalidArgumentError(
                    f"{name!r} has complex values: choose layers of real ones"
                )

    def hsic(
        self, pairs: Pairs, means: Sequence[torch.Tensor], debiased: bool
    ) -> dict[tuple[int, int], float]:
        """Estimates HSIC of some pairs of layers.

        Raises:
            InvalidArgumentError: a layer is constant.
        """
        used = sorted({k for pair in pairs for k in pair})
        products = {
            (i, j): torch.zeros(len(means[i]), len(means[j]), dtype=torch.float64) for i, j in pairs
        }
        squares = dict.fromkeys(pairs, 0.0)  # Σ ‖xᵢ‖²‖yᵢ‖²
        traces = dict.fromkeys(used, 0.0)  # Σ ‖xᵢ‖²
        tokens = 0
        for batch in self._batches():
            rows = {k: batch[k].double() - means[k] for k in used}
            norms = {k: rows[k].square().sum(1) for k in used}
            for k in used:
                traces[k] += float(norms[k].sum())
            for (i, j), product in products.items():
                product.addmm_(rows[i].T, rows[j])
                squares[i, j] += float(norms[i] @ norms[j])
            tokens += len(batch[0])
        found = {}
        for (i, j), product in products.items():
            whole = float(product.square_().sum())
            hsic = whole
            if debiased:
                hsic -= tokens / (tokens - 2) * squares[i, j]
                hsic += traces[i] * traces[j] / ((tokens - 1) * (tokens - 2))
            if i == j and hsic <= _ROUNDING * whole:
                raise InvalidArgumentError(
                    f"{self._names[i]!r} has the same vector for all {tokens:,} tokens, or for all "
                    "but one: leave the layer out"
                )
            found[i, j] = hsic  # without the divisor, which cancels
        return found
