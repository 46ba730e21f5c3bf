"""Where a run went wrong first: values that are not finite, and values far beyond the usual."""

from __future__ import annotations

import math
import os
import statistics
from dataclasses import dataclass, replace

from ..errors import InvalidArgumentError, NotFoundError
from ..progress.bars import steps_bar
from .activation import Activation
from .reader import ActivationReader

__all__ = ["Blame", "LayerRange", "Offender", "blame"]


_BEFORE = 64  # at most so many tensors of a layer say what is usual


@dataclass(frozen=True)
class Offender:
    """The first tensor that shows the fault, in the order in which modules returned.

    Attributes:
        layer, path: the module, and the place of the tensor in its output.
        step, call: the step, and which call of the module within it.
        request: the request that the step served; None: none.
        rank: the process in a distributed run; None: unknown.
        element: the number of its first value that is not finite, row-major; of an outlier the
            number of its largest value.
        value: that value.
        not_finite: how many of its values are not finite.
        elements: how many values it has.
        times: an outlier's largest magnitude over the layer's usual one; None: a value is not
            finite.
    """

    layer: str
    path: str
    step: int | None
    call: int | None
    request: str | None
    rank: int | None
    element: int
    value: float
    not_finite: int
    elements: int
    times: float | None


@dataclass(frozen=True)
class LayerRange:
    """The values of one layer.

    Attributes:
        name: the layer.
        tensors: how many of its tensors were looked at.
        usual: the median over its tensors of the largest magnitude, of finite values.
        largest: the largest of them, of finite values.
        last: that of the last tensor.
        first_bad_step: the first step with a value that is not finite; None: there is none.
        not_finite: values that are not finite, in all tensors.
    """

    name: str
    tensors: int
    usual: float
    largest: float
    last: float
    first_bad_step: int | None
    not_finite: int


@dataclass(frozen=True)
class Blame:
    """Where a capture went wrong.

    Attributes:
        path: the capture.
        steps: how many steps were looked at.
        first: the first tensor with a value that is not finite. If there is none, the first one
            whose largest magnitude is far beyond that of the layer before; None: there is none.
        layers: the layers, in the order in which they first returned.
    """

    path: str
    steps: int
    first: Offender | None
    layers: tuple[LayerRange, ...]


class _Layer:
    """What was seen of one layer so far."""

    def __init__(self) -> None:
        self.magnitudes: list[float] = []
        self.first_bad_step: int | None = None
        self.not_finite = 0


def blame(
    capture: str | os.PathLike[str],
    *,
    steps: int | None = None,
    times: float = 100.0,
    progress: bool | None = None,
) -> Blame:
    """Finds the first tensor of a capture that went wrong, and the range of each layer.

    It reads all tensors of floats once, in the order in which modules returned. So a module is
    named before those that use what it returned.

    Args:
        capture: a capture, such as a dump of a flight recorder.
        steps: only so many of the last steps; None: all.
        times: a tensor is an outlier if its largest magnitude is above so many times the median
            of up to 64 tensors of the layer before it, of which there must be three.
        progress: show a progress bar; None: on a terminal, and in a notebook.

    Raises:
        InvalidArgumentError: (a ValueError) `steps` is below 1, or `times` is not above 1.
        NotFoundError: there is no such capture, or it has no tensor of floats.
        StrapError: the capture cannot be read.
    """
    if (steps is not None and steps < 1) or not times > 1:
        raise InvalidArgumentError(
            f"steps = {steps}, times = {times}: give at least one step, and more than 1"
        )
    found: dict[str, _Layer] = {}
    bad: Offender | None = None
    outlier: Offender | None = None
    with ActivationReader(capture) as reader, steps_bar("reading tensors", progress) as told:
        numbers = reader.steps if steps is None else reader.steps[-steps:]
        for number, activation in enumerate(reader):
            told(number, len(reader), "")
            if numbers and activation.step is not None and activation.step < numbers[0]:
                continue
            if activation.dtype is None or "float" not in activation.dtype:
                continue
            layer = found.setdefault(activation.name, _Layer())
            offender, largest = _look(activation)
            before = layer.magnitudes[-_BEFORE:]
            usual = statistics.median(before) if len(before) >= 3 else math.nan
            if offender.not_finite:
                layer.not_finite += offender.not_finite
                if layer.first_bad_step is None:
                    layer.first_bad_step = activation.step
                bad = bad or offender
            elif largest > usual * times and usual > 0 and outlier is None:
                outlier = replace(offender, times=largest / usual)
            layer.magnitudes.append(largest)
    if not found:
        raise NotFoundError(f"{os.fspath(capture)} has no tensor of floats")
    layers = tuple(
        LayerRange(
            name, len(one.magnitudes), statistics.median(one.magnitudes), max(one.magnitudes),
            one.magnitudes[-1], one.first_bad_step, one.not_finite,
        )
        for name, one in found.items()
    )  # fmt: skip
    return Blame(os.fspath(capture), len(numbers), bad or outlier, layers)


def _look(activation: Activation) -> tuple[Offender, float]:
    """The tensor as an offender, and its largest magnitude of finite values."""
    values = activation.to_torch().float().reshape(-1)
    finite = values.isfinite()
    not_finite = int((~finite).sum())
    magnitudes = values.abs().where(finite, 0)
    largest = float(magnitudes.max()) if len(values) else 0.0
    if not_finite:
        element = int((~finite).int().argmax())
    else:
        element = int(magnitudes.argmax()) if len(values) else 0
    return Offender(
        layer=activation.layer, path=activation.path, step=activation.step, call=activation.call,
        request=activation.request, rank=activation.rank, element=element,
        value=float(values[element]) if len(values) else 0.0, not_finite=not_finite,
        elements=len(values), times=None,
    ), largest  # fmt: skip
