"""What the layers of a capture hold, as numbers; `analysis.plots` draws them::

    norms = token_norms("run.stream", tokenizer=tokenizer)
    norms.values                             # [layers, tokens]
    lens = logit_lens("run.stream", model, tokenizer=tokenizer)
    lens.texts[-1]                           # what the last layer predicts behind each token

Without `layers` the functions take the blocks of a model: the modules with a number as name, as
"model.layers.3". If there are none, they take all layers.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import InvalidArgumentError
from .comparing.difference import relative_error
from .comparing.pairs import match_layers
from .reading.opened import Capture, opened
from .reading.selection import Selector
from .reading.statistics import statistics
from .rows import NotTokenAlignedError, Rows
from .token_rows.text_rows import chosen_layers, one_text, rows_of_text, rows_of_texts, token_labels

__all__ = [
    "LargeActivation",
    "LayerStatistics",
    "MassiveActivations",
    "TokenErrors",
    "TokenNorms",
    "layer_statistics",
    "massive_activations",
    "token_errors",
    "token_norms",
]

Floats = npt.NDArray[np.float64]


# ---- tokens ---------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class TokenNorms:
    """The lengths of the vectors of one text.

    Attributes:
        layers: the layers, in the order of execution.
        tokens: a label for each token: its text, or else its id, or else its position.
        values: L2 norms, float64, [layers, tokens].
    """

    layers: tuple[str, ...]
    tokens: tuple[str, ...]
    values: Floats


def token_norms(
    capture: Capture,
    layers: str | Iterable[str] | None = None,
    *,
    sequence: int = 0,
    tokenizer: Any = None,
) -> TokenNorms:
    """The L2 norm of the vector of each token at each layer.

    Args:
        capture: a reader or the path of a stream.
        layers: names or patterns; None: the blocks.
        sequence: the number of the text in the capture, from 0, through all steps of a generation.
            If the capture does not have what the model was given: of a row of a batch.
        tokenizer: its `decode` gives the texts of tokens.

    Raises:
        UnknownActivationError: (a KeyError) a name or pattern matches no layer.
        NotTokenAlignedError: (a ValueError) a layer has no vector for each token.
        InvalidArgumentError: (a ValueError) `sequence` is not the number of a text.
    """
    with opened(capture) as reader:
        return norms_of(rows_of_texts(reader, layers, one_text(sequence), tokenizer))


def norms_of(rows: Mapping[str, Rows]) -> TokenNorms:
    """The norms of the rows of one text, by layer, as of `rows_of_texts`."""
    values = [np.linalg.norm(_vectors(of_layer), axis=1) for of_layer in rows.values()]
    return TokenNorms(tuple(rows), _labels(rows), np.stack(values))


@dataclasses.dataclass(frozen=True)
class TokenErrors:
    """The relative errors of the vectors of one text, between two captures.

    Attributes:
        layers: the layers in the first capture, in the order of execution.
        tokens: a label for each token, as in `TokenNorms`.
        values: ‖b - a‖ / ‖a‖ of each vector, float64, [layers, tokens].
    """

    layers: tuple[str, ...]
    tokens: tuple[str, ...]
    values: Floats


def token_errors(
    a: Capture,
    b: Capture,
    layers: str | Iterable[str] | None = None,
    *,
    sequence: int = 0,
    rename: Mapping[str, str] | None = None,
    tokenizer: Any = None,
) -> TokenErrors:
    """The relative error of the vector of each token at each layer, between two captures.

    Args:
        a: the reference: a reader or the path of a stream.
        b: the capture to compare with it.
        layers: names or patterns of layers of `a`; None: its blocks.
        sequence: as for `token_norms`.
        rename: as for `compare_captures`.
        tokenizer: as for `token_norms`.

    Raises:
        UnknownActivationError: (a KeyError) a layer is in one capture only.
        NotTokenAlignedError: (a ValueError) a layer has no vector for each token, or the captures
            have different tokens, as far as they know their ids and positions.
        InvalidArgumentError: (a ValueError) `sequence` is not the number of a text.
    """
    with opened(a) as reader_a, opened(b) as reader_b:
        rows = rows_of_texts(reader_a, layers, one_text(sequence), tokenizer)
        names, _ = match_layers(reader_a, reader_b, list(rows), rename or {})
        errors = []
        for layer, of_a in rows.items():
            of_b = rows_of_text(reader_b, names[layer], one_text(sequence))
            x, y = _vectors(of_a), _vectors(of_b)
            if x.shape != y.shape:
                raise NotTokenAlignedError(
                    f"{layer!r} has {x.shape[0]} tokens of width {x.shape[1]} in {reader_a.path}, "
                    f"and {y.shape[0]} of width {y.shape[1]} in {reader_b.path}"
                )
            _check_same_tokens(layer, (reader_a.path, of_a), (reader_b.path, of_b))
            squares = ((y - x) ** 2).sum(axis=1).tolist(), (x**2).sum(axis=1).tolist()
            errors.append([relative_error(*one) for one in zip(*squares, strict=True)])
        return TokenErrors(tuple(rows), _labels(rows), np.array(errors))


def _check_same_tokens(layer: str, a: tuple[str, Rows], b: tuple[str, Rows]) -> None:
    """
    Raises:
        NotTokenAlignedError: a token has another id or position in the other capture. Unknown ones
            are not compared.
    """
    # Without what the model was given, positions are places in a row, and padding is unknown.
    given = np.all([rows.column("padding") >= 0 for _, rows in (a, b)], axis=0)
    for name in ("token_id", "position"):
        x, y = (np.asarray(rows.column(name), np.int64) for _, rows in (a, b))
        differs = np.flatnonzero(given & (x != y) & (x >= 0) & (y >= 0))
        if len(differs):
            k = differs[0]
            raise NotTokenAlignedError(
                f"token {k} of {layer!r} has the {name.replace('_', ' ')} {x[k]} in {a[0]}, and "
                f"{y[k]} in {b[0]}: capture both models with the same inputs, in the same order"
            )


# ---- outliers -------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class LargeActivation:
    """One of the largest values of a layer.

    Attributes:
        layer: the layer's name.
        place: the token's place in `MassiveActivations.tokens`.
        token: the token's label.
        channel: place in the vector.
        value: the value.
        ratio: its magnitude over the median magnitude of the layer; infinite if that is 0, or if
            the value is.
        massive: whether both limits are met.
    """

    layer: str
    place: int
    token: str
    channel: int
    value: float
    ratio: float
    massive: bool


@dataclasses.dataclass(frozen=True)
class MassiveActivations:
    """The largest values of each layer beside its median.

    Attributes:
        layers: the layers, in the order of execution.
        tokens: a label for each token, as in `TokenNorms`.
        median: the median magnitude of the finite values of each layer, float64, [layers].
        largest: for each layer its largest values, by magnitude, without NaN.
    """

    layers: tuple[str, ...]
    tokens: tuple[str, ...]
    median: Floats
    largest: tuple[tuple[LargeActivation, ...], ...]

    @property
    def massive(self) -> tuple[LargeActivation, ...]:
        """The values of `largest` that meet both limits."""
        return tuple(one for of_layer in self.largest for one in of_layer if one.massive)


def massive_activations(
    capture: Capture,
    layers: str | Iterable[str] | None = None,
    *,
    sequence: int = 0,
    tokenizer: Any = None,
    largest: int = 3,
    min_magnitude: float = 100.0,
    min_ratio: float = 1000.0,
) -> MassiveActivations:
    """Finds the largest values of one text at each layer, with their channels and tokens.

    The limits are those of Sun et al. 2024, "Massive Activations in Large Language Models",
    arXiv:2402.17762: a magnitude above 100, and about 1,000 times the median magnitude of the
    hidden state, or more.

    The median is that of the finite values. NaN is left out, as `layer_statistics` counts it.
    Infinite values are the largest ones, and massive. If no value is finite, the median is NaN, and
    only infinite values are massive.

    Args:
        capture: a reader or the path of a stream.
        layers: names or patterns; None: the blocks.
        sequence: as for `token_norms`.
        tokenizer: as for `token_norms`.
        largest: how many values of each layer to give, 1 or more.
        min_magnitude: what the magnitude of a massive activation is above.
        min_ratio: the least ratio of its magnitude to the median.

    Raises:
        UnknownActivationError: (a KeyError) a name or pattern matches no layer.
        NotTokenAlignedError: (a ValueError) a layer has no vector for each token.
        InvalidArgumentError: (a ValueError) `sequence` is not the number of a text, or `largest` is
            below 1.
    """
    if largest < 1:
        raise InvalidArgumentError(f"largest = {largest}: give at least 1")
    with opened(capture) as reader:
        rows = rows_of_texts(reader, layers, one_text(sequence), tokenizer)
        return massive_of(rows, largest=largest, min_magnitude=min_magnitude, min_ratio=min_ratio)


def massive_of(
    rows: Mapping[str, Rows],
    *,
    largest: int = 3,
    min_magnitude: float = 100.0,
    min_ratio: float = 1000.0,
) -> MassiveActivations:
    """The largest values of the rows of one text, by layer, as of `rows_of_texts`."""
    tokens = _labels(rows)
    medians, found = [], []
    for layer, of_layer in rows.items():
        vectors = _vectors(of_layer)
        sizes = np.abs(vectors)
        finite = sizes[np.isfinite(sizes)]
        median = float(np.median(finite)) if len(finite) else math.nan
        order = np.argsort(-sizes, axis=None, kind="stable")  # NaN is behind all others
        order = order[: min(largest, sizes.size - int(np.isnan(sizes).sum()))]
        ones = []
        for place, channel in zip(*np.unravel_index(order, sizes.shape), strict=True):
            size = float(sizes[place, channel])
            ratio = size / median if median and math.isfinite(size) else math.inf
            ones.append(
                LargeActivation(
                    layer, int(place), tokens[place], int(channel),
                    float(vectors[place, channel]), ratio,
                    size > min_magnitude and ratio >= min_ratio,
                )
            )  # fmt: skip
        medians.append(median)
        found.append(tuple(ones))
    return MassiveActivations(tuple(rows), tokens, np.array(medians), tuple(found))


# ---- statistics -----------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class LayerStatistics:
    """Statistics over all values of a layer.

    Attributes:
        name: the layer's name.
        tensors, values: their numbers.
        nan, inf, zeros: number of values that are NaN, infinite, and 0.
        min, max, mean, std, rms: of the finite values, in float64; NaN if there are none.
    """

    name: str
    tensors: int
    values: int
    nan: int
    inf: int
    zeros: int
    min: float
    max: float
    mean: float
    std: float
    rms: float


def layer_statistics(
    capture: Capture, layers: str | Iterable[str] | None = None, *, steps: Selector = None
) -> list[LayerStatistics]:
    """Statistics of each layer over all its tensors. One tensor is in memory at a time.

    Complex values count by their magnitudes, booleans as 0 and 1.

    Args:
        capture: a reader or the path of a stream.
        layers: names or patterns; None: the blocks.
        steps: the steps, as for `ActivationReader.select`; None: all.

    Raises:
        UnknownActivationError: (a KeyError) a name or pattern matches no layer.
        CorruptError: (a ValueError) a packet is damaged.
    """
    with opened(capture) as reader:
        return [
            _of_layer(name, (a.to_numpy() for a in reader[name].select(steps=steps)))
            for name in chosen_layers(reader, layers)
        ]


def _of_layer(name: str, tensors: Iterable[npt.NDArray[Any]]) -> LayerStatistics:
    every = [statistics(values) for values in tensors]
    finite = [one for one in every if one.mean is not None]
    count = np.array([one.values - one.nan - one.inf for one in finite], np.float64)
    mean, std = np.array([(one.mean, one.std) for one in finite], np.float64).reshape(-1, 2).T
    total = count.sum()
    whole = float((count * mean).sum() / total) if total else math.nan
    variance = float((count * (std**2 + (mean - whole) ** 2)).sum() / total) if total else math.nan
    return LayerStatistics(
        name=name,
        tensors=len(every),
        values=sum(one.values for one in every),
        nan=sum(one.nan for one in every),
        inf=sum(one.inf for one in every),
        zeros=sum(one.zeros for one in every),
        min=min((one.min for one in finite if one.min is not None), default=math.nan),
        max=max((one.max for one in finite if one.max is not None), default=math.nan),
        mean=whole,
        std=math.sqrt(variance),
        rms=math.sqrt(variance + whole**2),
    )


def _vectors(rows: Rows) -> Floats:
    """The vectors of rows, [rows, width]; those of all heads of a token joined."""
    values: Floats = rows.to_numpy("float64").reshape(len(rows), -1)
    return values


def _labels(rows: Mapping[str, Rows]) -> tuple[str, ...]:
    return token_labels(next(iter(rows.values())))
