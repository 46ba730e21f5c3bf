"""Compares two captures: which layers differ, by how much, and where the difference begins::

    found = compare_captures("float32.stream", "bfloat16.stream")
    print(found.first)                       # the first tensor beyond the tolerance
    for layer in found.layers:               # in the order of execution
        print(layer.name, layer.relative_error, layer.snr_db)

The first capture is the reference: errors are relative to its values.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import InvalidArgumentError
from ..progress.bars import Progress, reported
from .comparing.compared import RTOL, Comparing
from .comparing.difference import cosine, relative_error
from .comparing.pairs import match_layers
from .reader import ActivationReader, ActivationView
from .reading.opened import Capture, opened
from .reading.selection import Selector
from .rows import NoCallsError

__all__ = ["RTOL", "CaptureComparison", "Divergence", "LayerComparison", "compare_captures"]


@dataclasses.dataclass(frozen=True)
class LayerComparison:
    """The differences of the tensors of one layer. Infinite and NaN values count in `nonfinite`
    alone.

    Attributes:
        name: the layer in the first capture.
        name_b: the layer in the second capture.
        dtypes_a, dtypes_b: types of the captured tensors, by torch's names; empty if unknown.
        tensors: number of pairs that were compared.
        equal: number of these without any difference.
        over: number of these beyond the tolerance.
        incomparable: number of pairs that could not be compared, as for their shapes.
        reason: why the first of them could not be compared; "" if there is none.
        only_a, only_b: number of tensors that only one capture has.
        nonfinite: number of values that are NaN or infinite in one capture, and not the same in the
            other.
        max_abs_error: the largest difference of two values.
        relative_error: ‖b - a‖ / ‖a‖ over all pairs; infinite if a is 0 and b is not.
        worst_relative_error: the largest of a pair.
        worst_step: the step of that pair; None if unknown.
        cosine: the cosine of the angle between a and b over all pairs; NaN if one of them is 0.
        snr_db: 20·log10(1 / relative_error), in decibels; infinite if the relative error is 0.
        tolerance: the largest relative tolerance of a pair.
    """

    name: str
    name_b: str
    dtypes_a: tuple[str, ...]
    dtypes_b: tuple[str, ...]
    tensors: int
    equal: int
    over: int
    incomparable: int
    reason: str
    only_a: int
    only_b: int
    nonfinite: int
    max_abs_error: float
    relative_error: float
    worst_relative_error: float
    worst_step: int | None
    cosine: float
    snr_db: float
    tolerance: float

    @property
    def agrees(self) -> bool:
        """Whether all its tensors have a partner and are within the tolerance."""
        return not (self.over or self.incomparable or self.only_a or self.only_b)


@dataclasses.dataclass(frozen=True)
class Divergence:
    """A pair of tensors that differ by more than the tolerance.

    Attributes:
        layer: the layer in the first capture.
        step, token: of the tensor in the first capture; None if unknown.
        call: which call of the module within the step, from 0.
        row_a, row_b: rows in `ActivationReader.index` of the captures.
        nonfinite, max_abs_error, relative_error: as in `LayerComparison`, of this pair.
        tolerance: the largest relative error that is allowed, without `atol`.
    """

    layer: str
    step: int | None
    token: int | None
    call: int
    row_a: int
    row_b: int
    nonfinite: int
    max_abs_error: float
    relative_error: float
    tolerance: float


@dataclasses.dataclass(frozen=True)
class CaptureComparison:
    """The differences of two captures.

    Attributes:
        a, b: paths of the streams.
        agree: all compared layers agree, see `LayerComparison.agrees`. A layer that only one
            capture has does not count.
        first: the first pair beyond the tolerance, in the order of execution; None: there is none.
        layers: the layers of both captures, in the order of execution.
        only_in_a, only_in_b: the layers that only one capture has.
        other_tokens: the first step in which the models were given other tokens, if a tensor of it
            or of a later step was compared. Differences from there on say nothing about the models.
            None: there is no such step, or the tokens are unknown.
        rtol, atol: the tolerances that were given; rtol is None for that of each pair.
        pairs: a structured numpy array with an element for each pair, in the order of execution:
            layer (place in `layers`), row_a, row_b, step, token and call (-1 if unknown), compared,
            over, values, nonfinite, max_abs_error, relative_error, cosine and tolerance, and the
            sums error_squares, a_squares, b_squares and products of their values.
    """

    a: str
    b: str
    agree: bool
    first: Divergence | None
    layers: tuple[LayerComparison, ...]
    only_in_a: tuple[str, ...]
    only_in_b: tuple[str, ...]
    other_tokens: int | None
    rtol: float | None
    atol: float
    pairs: npt.NDArray[np.void] = dataclasses.field(repr=False, compare=False)


def compare_captures(
    a: Capture,
    b: Capture,
    layers: str | Iterable[str] | None = None,
    *,
    steps: Selector = None,
    rename: Mapping[str, str] | None = None,
    rtol: float | None = None,
    atol: float = 0.0,
    progress: Progress = None,
) -> CaptureComparison:
    """Compares the tensors of two captures, in float64.

    Tensors are paired by layer, request, step and call of the module within the step, and then by
    their order. If the steps of a layer are unknown, they are paired by their order alone. Shapes
    that differ in dimensions of 1 only are the same. Other shapes, and samples of other elements,
    cannot be compared: they are counted, with a reason. Types may differ. A pair is beyond the
    tolerance if its root mean square error is above ``atol + rtol * (root mean square of a)``, or
    if a value is NaN or infinite in one tensor alone.

    Besides the indexes it takes the memory of two tensors and about 10 MiB.

    Args:
        a: the reference: a reader or the path of a stream.
        b: the capture to compare with it.
        layers: names or patterns of layers of `a`, as for `ActivationReader.select`; None: all.
        steps: the steps, as for `ActivationReader.select`; None: all.
        rename: what layers of `a` are called in `b`, by name or pattern. Each ``*`` of the name
            takes the text that the ``*`` of the pattern stands for:
            ``{"model.layers.*": "blocks.*"}``. The first pattern that fits counts.
        rtol: the relative tolerance. None: for each pair that of its coarsest type, captured or
            stored, in `RTOL`, and the errors that the index says storing made.
        atol: the absolute tolerance, in the unit of the values.
        progress: show a progress bar; None: on a terminal, and in a notebook. Or a function to
            call from time to time with the number of compared pairs and of all pairs.

    Raises:
        NotFoundError: (a FileNotFoundError) there is no such file.
        CorruptError: (a ValueError) a file is no stream, or a packet is damaged; the message names
            the capture.
        UnknownActivationError: (a KeyError) a pattern fits no layer of `a`.
        InvalidArgumentError: (a ValueError) the captures have no layer in common; a tolerance is
            negative; `rename` is ambiguous.
    """
    for what, value in (("rtol", rtol), ("atol", atol)):
        if value is not None and not 0 <= value < math.inf:
            raise InvalidArgumentError(f"{what} = {value!r}: give a number from 0 up")
    with opened(a) as reader_a, opened(b) as reader_b:
        targets, only_b = match_layers(reader_a, reader_b, layers, rename or {})
        names = {name: target for name, target in targets.items() if target in reader_b}
        only_a = tuple(name for name in targets if name not in names)
        if not names:
            raise InvalidArgumentError(_nothing_in_common(reader_a, reader_b, only_a, only_b))
        comparing = Comparing(reader_a, reader_b, names, steps, rtol, atol)
        with reported(progress, "comparing tensors") as told:
            comparing.run(told)
        found = _layers(comparing, names)
        other_tokens = first_other_tokens(reader_a, reader_b)
        if other_tokens is not None and not (comparing.pairs["step"] >= other_tokens).any():
            other_tokens = None
    return CaptureComparison(
        a=reader_a.path,
        b=reader_b.path,
        agree=all(layer.agrees for layer in found),
        first=_first(found, comparing.pairs),
        layers=found,
        only_in_a=only_a,
        only_in_b=only_b,
        other_tokens=other_tokens,
        rtol=rtol,
        atol=atol,
        pairs=comparing.pairs,
    )


def _nothing_in_common(
    a: ActivationReader, b: ActivationReader, only_a: tuple[str, ...], only_b: tuple[str, ...]
) -> str:
    for reader in (a, b):
        if not reader.layers:
            return f"{reader.path} has no activations to compare"
    return (
        f"{a.path} and {b.path} have no layer in common: the first has {only_a[0]!r}, the second "
        f"{(only_b or b.layers)[0]!r}. Say what the layers of the first are called in the second: "
        "rename={'model.layers.*': 'blocks.*'}, or --map 'model.layers.*=blocks.*'"
    )


def first_other_tokens(a: ActivationReader, b: ActivationReader) -> int | None:
    """The first step in which the models were given other tokens; None: none is known."""
    try:
        return a._calls_of_capture().first_other_tokens(b._calls_of_capture())
    except NoCallsError:
        return None


def _layers(comparing: Comparing, names: Mapping[str, str]) -> tuple[LayerComparison, ...]:
    """Sums up the pairs of each layer."""
    layer = comparing.pairs["layer"]
    order = np.argsort(layer, kind="stable")
    ends = np.searchsorted(layer[order], np.arange(len(names)), "right").tolist()
    return tuple(
        _layer(comparing, number, name, name_b, order[begin:end])
        for number, ((name, name_b), begin, end) in enumerate(
            zip(names.items(), [0, *ends[:-1]], ends, strict=True)
        )
    )


def _layer(
    comparing: Comparing, number: int, name: str, name_b: str, places: npt.NDArray[np.int64]
) -> LayerComparison:
    pairs = comparing.pairs[places]
    there, odd = pairs[pairs["compared"]], places[~pairs["compared"]]
    errors, a, b, products = (
        float(there[column].sum())
        for column in ("error_squares", "a_squares", "b_squares", "products")
    )
    relative = relative_error(errors, a) if len(there) else math.nan
    worst = there[np.argmax(there["relative_error"])] if len(there) else None
    return LayerComparison(
        name=name,
        name_b=name_b,
        dtypes_a=_types(comparing.a, places),
        dtypes_b=_types(comparing.b, places),
        tensors=len(there),
        equal=int(((there["max_abs_error"] == 0) & (there["nonfinite"] == 0)).sum()),
        over=int(there["over"].sum()),
        incomparable=len(odd),
        reason=comparing.reasons[int(odd[0])] if len(odd) else "",
        only_a=comparing.only[number][0],
        only_b=comparing.only[number][1],
        nonfinite=int(there["nonfinite"].sum()),
        max_abs_error=float(there["max_abs_error"].max(initial=0.0)),
        relative_error=relative,
        worst_relative_error=math.nan if worst is None else float(worst["relative_error"]),
        worst_step=None if worst is None else _known(worst["step"]),
        cosine=cosine(products, a, b),
        snr_db=_decibels(relative),
        tolerance=float(there["tolerance"].max(initial=0.0)),
    )


def _types(view: ActivationView, places: npt.NDArray[np.int64]) -> tuple[str, ...]:
    codes, names = view._snapshot.catalogue.texts("source_dtype")
    return tuple(names[code] for code in np.unique(codes[view._rows[places]]) if code >= 0)


def _decibels(relative: float) -> float:
    return -20 * math.log10(relative) if relative else math.inf


def _known(number: Any) -> int | None:
    return None if number < 0 else int(number)


def _first(layers: tuple[LayerComparison, ...], pairs: npt.NDArray[np.void]) -> Divergence | None:
    beyond = np.flatnonzero(pairs["over"])
    if not len(beyond):
        return None
    one = pairs[int(beyond[0])]
    return Divergence(
        layer=layers[int(one["layer"])].name,
        step=_known(one["step"]),
        token=_known(one["token"]),
        call=int(one["call"]),
        row_a=int(one["row_a"]),
        row_b=int(one["row_b"]),
        nonfinite=int(one["nonfinite"]),
        max_abs_error=float(one["max_abs_error"]),
        relative_error=float(one["relative_error"]),
        tolerance=float(one["tolerance"]),
    )
