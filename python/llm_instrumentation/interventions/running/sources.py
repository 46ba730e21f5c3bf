"""Values that edits put into a model: tensors, and tensors of captures."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeAlias

from torch import Tensor

from ...analysis.reader import Activation, ActivationReader, ActivationView, UnknownActivationError
from ...analysis.reading.elements import torch_dtype
from ...core.tensors.capture_state import INPUT
from ...errors import InvalidArgumentError
from .spots import Spot

__all__ = [
    "Captured",
    "Source",
    "activations_of",
    "as_tensor",
    "check_like",
    "check_source",
    "each_of",
    "value_at",
]

Captured: TypeAlias = "Activation | ActivationView | ActivationReader"
"""Values of a capture: one tensor, some, or all."""
Source: TypeAlias = "Tensor | Captured"
"""A tensor, or values of a capture."""


def check_source(source: object, what: str) -> None:
    """Refuses what is no source.

    Raises:
        InvalidArgumentError: it is of another type.
    """
    if not isinstance(source, (Tensor, Activation, ActivationView, ActivationReader)):
        raise InvalidArgumentError(
            f"{what} is a {type(source).__name__}: give a tensor, an ActivationReader, or an "
            "Activation or ActivationView of one"
        )


def check_like(spot: Spot, values: Tensor, tensor: Tensor, what: str) -> None:
    """Refuses values of another type or device than the tensor has.

    Raises:
        InvalidArgumentError: the type or device differs; the message says how to convert.
    """
    if values.dtype != tensor.dtype:
        raise InvalidArgumentError(
            f"{spot.site}: {what} is {values.dtype}, the tensor {tensor.dtype}: convert it with "
            f".to({tensor.dtype})"
        )
    if values.device != tensor.device:
        raise InvalidArgumentError(
            f"{spot.site}: {what} is on {values.device}, the tensor on {tensor.device}: move it "
            f'with .to("{tensor.device}")'
        )


def activations_of(source: Captured, name: str) -> list[Activation] | ActivationView:
    """The activations of one name.

    Raises:
        UnknownActivationError: (a KeyError) there is none.
    """
    if isinstance(source, ActivationReader):
        if name.endswith(INPUT) and name not in source:
            raise UnknownActivationError(
                f"{source.path} has no {name!r}: capture inputs too, with config.with_inputs()"
            )
        return source[name]
    if isinstance(source, Activation):
        return [source]
    found = source.named(name)
    if not len(found):
        raise UnknownActivationError(f"{source!r} has no activation named {name!r}")
    return found


def value_at(source: Captured, name: str, step: int, call: int, like: Tensor, spot: Spot) -> Tensor:
    """The captured value of a tensor at a step and call, with its type and device.

    Raises:
        UnknownActivationError: (a KeyError) the source has no tensor of this name.
        InvalidArgumentError: it has none or several of this step and call, or one of another type.
    """
    if isinstance(source, Activation):
        return as_tensor(source, like, spot)
    found = activations_of(source, name)
    assert isinstance(found, ActivationView)
    chosen = found.select(steps=step, calls=call)
    if len(chosen) != 1:
        steps = sorted({one.step for one in found if one.step is not None})
        span = f"{steps[0]} to {steps[-1]}" if steps else "of no known number"
        raise InvalidArgumentError(
            f"{spot.site}: {source!r} has {len(chosen) or 'no'} activations {name!r} of step "
            f"{step}, call {call}; its steps are {span}. Choose with first_step, or give the one "
            "Activation"
        )
    return as_tensor(chosen[0], like, spot)


def as_tensor(activation: Activation, like: Tensor, spot: Spot) -> Tensor:
    """The values of an activation, with the type and device of a tensor.

    float32 that was stored as float16 becomes float32 again.
    """
    if activation.transform is not None:
        raise InvalidArgumentError(
            f"{spot.site}: {activation!r} holds {activation.transform} of a tensor: capture whole "
            "tensors"
        )
    source = activation.source_dtype or activation.dtype
    if source is None or torch_dtype(source) != like.dtype:
        raise InvalidArgumentError(
            f"{spot.site}: {activation!r} was {source or 'of no known type'}, the tensor is "
            f"{like.dtype}: give the tensor .to_torch(dtype={like.dtype})"
        )
    return activation.to_torch(dtype=like.dtype).to(like.device)


def each_of(source: Source, name: str, like: Tensor, spot: Spot) -> Iterator[Tensor]:
    """All tensors of a source that have the name of the site's tensor, one after the other."""
    if isinstance(source, Tensor):
        yield source
    else:
        for activation in activations_of(source, name):
            yield as_tensor(activation, like, spot)
