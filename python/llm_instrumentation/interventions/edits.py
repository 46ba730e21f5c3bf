"""Edits: what happens to the tensor of a site while the model runs.

Each function returns an :class:`Edit` for :func:`~llm_instrumentation.interventions.intervene`. It
takes a :class:`Site`, or the name of a layer and the other parts of a site::

    zero("model.layers.3.mlp", positions=-1)
    zero(Site("model.layers.3.self_attn", head=5))

A tensor for a site (`values`, or `of` of a mean) has the shape of the module's tensor, of which the
site's part is taken, or the shape of this part, or is a vector [width] for each row. Nothing else
is broadcast. Types and devices must be equal. An argument of another type or outside of its range
raises `InvalidArgumentError` at once.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from ..core.calls.arguments import Given
from ..errors import InvalidArgumentError, UnsupportedError
from .metrics import widened
from .running.part import Part
from .running.sources import (
    Source,
    activations_of,
    as_tensor,
    check_like,
    check_source,
    each_of,
    value_at,
)
from .running.spots import Spot
from .sites import Site, Where

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["Edit", "add", "apply", "freeze", "mean", "noise", "replace", "resample", "zero"]


class Call:
    """One call of a module, for an edit.

    Attributes:
        spot: the site in the model.
        tensor: the tensor of the module.
        path: the place of the tensor in what the module returns or is given. Of what it adds: the
            name in captures, None if no module returns it as it is.
        part: the elements of the site.
        values: these elements of the tensor.
        given: what the model was given in this step; None: unknown.
        step: number of the model's forward call in the block.
        call: call of the module within the step.
        kept: what the edit keeps until the end of the block.
    """

    def __init__(
        self, spot: Spot, path: str | None, tensor: Tensor, given: Given | None, step: int,
        call: int, kept: dict[str, Any],
    ) -> None:  # fmt: skip
        self.spot = spot
        self.tensor = tensor
        self.path = path
        self.given = given
        self.part = Part(spot, tensor.shape, given)
        self.step = step
        self.call = call
        self.kept = kept

    @property
    def name(self) -> str:
        """The name of the tensor in captures.

        Raises:
            UnsupportedError: captures do not have it.
        """
        if self.spot.side != "added":
            assert self.path is not None
            return self.spot.captured(self.path)
        if self.path is None:
            raise UnsupportedError(
                f"{self.spot.site}: no module returns what is added there, so captures do not have "
                "it: take the values from a run, or give a tensor"
            )
        return self.path

    @functools.cached_property
    def values(self) -> Tensor:
        return self.part.take(self.tensor)

    def part_at(self, site: Site) -> Part:
        """The elements of another site of the same tensor."""
        return Part(dataclasses.replace(self.spot, site=site), self.tensor.shape, self.given)

    def generator(self, seed: int, *of: object) -> torch.Generator:
        """A generator of random numbers for a seed and further values."""
        key = hashlib.blake2b(repr((seed, *of)).encode(), digest_size=8).digest()
        return torch.Generator().manual_seed(int.from_bytes(key, "little") >> 1)


@dataclasses.dataclass(frozen=True)
class Edit:
    """A change of a site, for `intervene`. It holds no state: it may be used in several blocks.

    Attributes:
        site: what is changed.
        kind: the name of the function that made it.
        by_column: its values are those of the same columns in other examples.
    """

    site: Site
    kind: str
    _change: Callable[[Call], Tensor] = dataclasses.field(repr=False)
    by_column: bool = False

    def __str__(self) -> str:
        return f"{self.kind}({self.site})"

    def _apply(self, call: Call) -> Tensor:
        """The module's tensor after the edit; the same one if the edit returns it."""
        _check_dense(call)
        new = self._change(call)
        if new is call.tensor:
            return new
        if not isinstance(new, Tensor):
            raise InvalidArgumentError(f"{self} returned a {type(new).__name__}, not a tensor")
        if new.shape != call.values.shape:
            raise InvalidArgumentError(
                f"{self} returned the shape {list(new.shape)}, not {list(call.values.shape)}"
            )
        check_like(call.spot, new, call.tensor, "what the edit returned")
        return call.part.put(call.tensor, new)


def _check_dense(call: Call) -> None:
    tensor = call.tensor
    if tensor.is_quantized or tensor.is_nested or tensor.layout is not torch.strided:
        raise UnsupportedError(
            f"{call.spot.site}: the tensor is "
            + ("quantized" if tensor.is_quantized else "nested" if tensor.is_nested else "sparse")
            + ": edit a dense one, before or behind it"
        )


def _check_floats(call: Call, kind: str) -> None:
    if not call.tensor.is_floating_point():
        raise UnsupportedError(f"{call.spot.site}: {kind} needs floats, not {call.tensor.dtype}")


def zero(site: str | Site, **where: Unpack[Where]) -> Edit:
    """Puts zeros at the site: zero ablation."""
    return Edit(Site.of(site, **where), "zero", lambda call: torch.zeros_like(call.values))


def apply(site: str | Site, function: Callable[[Tensor], Tensor], **where: Unpack[Where]) -> Edit:
    """Puts the result of a function at the site.

    Args:
        site: where.
        function: receives the values, [batch, tokens, width], or [tokens, width] of a mask. Returns
            values of the same shape, type and device, without changing those that it received. If
            it returns the tensor that it received, nothing changes: so it can read values.
        where: the other parts of the site.
    """
    return Edit(Site.of(site, **where), "apply", lambda call: function(call.values))


def add(site: str | Site, values: Tensor, *, scale: float = 1.0, **where: Unpack[Where]) -> Edit:
    """Adds a vector or a tensor: steering.

    Args:
        site: where.
        values: a vector [width] that is added to each row, or a tensor of the shape of the module's
            tensor or of the site's part of it.
        scale: factor of the values.
        where: the other parts of the site.

    Raises:
        InvalidArgumentError: `values` is no tensor, or `scale` is not finite; while the model
            runs: the shape, type or device does not fit.
    """
    if not isinstance(values, Tensor):
        raise InvalidArgumentError(f"values is a {type(values).__name__}: give a tensor")
    if not math.isfinite(scale):
        raise InvalidArgumentError(f"scale = {scale}: give a finite number")

    def change(call: Call) -> Tensor:
        check_like(call.spot, values, call.tensor, "values")
        return call.values + scale * call.part.fit(values, "values")

    return Edit(Site.of(site, **where), "add", change)


def replace(
    site: str | Site, values: Source, *, first_step: int = 0, **where: Unpack[Where]
) -> Edit:
    """Puts other values at the site: activation patching.

    Args:
        site: where.
        values: a tensor of the shape of the module's tensor (the site's part of it is taken), or of
            the shape of this part, or a vector [width] for each row. Or values of a capture: an
            `Activation`, or a reader or view, of which the tensor of the same name, step and call
            is read when the layer runs. An `Activation` is taken at each call. Values of float32
            that were stored as float16 become float32 again, and have that error; capture with
            `with_float32()` for exact ones.
        first_step: the captured step that belongs to step 0 of the block.
        where: the other parts of the site.

    Raises:
        InvalidArgumentError: `values` is of another type; while the model runs: the shape, type or
            device does not fit, or the capture has no such step and call.
        UnknownActivationError: (a KeyError) while the model runs: the capture has no such tensor.
    """
    check_source(values, "values")

    def change(call: Call) -> Tensor:
        if isinstance(values, Tensor):
            check_like(call.spot, values, call.tensor, "values")
            # A copy, because the model may change what modules return in place.
            return call.part.fit(values, "values").clone()
        step = first_step + call.step
        found = value_at(values, call.name, step, call.call, call.tensor, call.spot)
        return call.part.fit(found, "the captured tensor")

    return Edit(Site.of(site, **where), "replace", change)


def mean(
    site: str | Site,
    of: Source | None = None,
    *,
    over: Literal["tokens", "sequences"] = "tokens",
    **where: Unpack[Where],
) -> Edit:
    """Puts a mean at the site: mean ablation.

    Args:
        site: where.
        of: what the mean is of: a tensor [..., width], or all activations of the site's tensor in a
            capture. None: the tensor itself, in each call, without padding as the attention mask
            of the call has it. Means of a tensor or capture have all rows, padding too.
        over: "tokens": one vector, the mean of all tokens of all sequences. "sequences": a mean
            for each position, over the sequences; then tensors are [sequences, ...] with the shape
            of the module's tensor behind it.
        where: the other parts of the site.

    Raises:
        InvalidArgumentError: `of` or `over` is something else; while the model runs: a shape or
            type does not fit.
        UnsupportedError: (a TypeError) while the model runs: the tensor has integers.
    """
    if of is not None:
        check_source(of, "of")
    if over not in ("tokens", "sequences"):
        raise InvalidArgumentError(f'over = {over!r}: give "tokens" or "sequences"')

    def change(call: Call) -> Tensor:
        _check_floats(call, "mean")
        if of is None:
            return _own_mean(call, over)
        key = f"mean {list(call.tensor.shape[1:])}" if over == "sequences" else "mean"
        if key not in call.kept:
            call.kept[key] = _mean_of(call, of, over)
        found: Tensor = call.kept[key]
        if over == "tokens":
            return call.part.fit(found, "the mean")
        batch = call.part.batch(call.tensor)
        return call.part.take_of_batch(found.expand(batch.shape))

    return Edit(Site.of(site, **where), "mean", change, by_column=over == "sequences")


def _own_mean(call: Call, over: str) -> Tensor:
    """The mean of the tensor itself."""
    if over == "sequences":
        batch = call.part.batch(call.tensor)
        if len(batch) < 2:
            raise InvalidArgumentError(
                f"{call.spot.site}: the batch has one sequence, whose mean is itself: give of, or "
                "a batch_size that leaves no batch of one"
            )
        real = call.part.real_tokens
        precise = widened(batch)
        if real is None or real.shape != batch.shape[:2]:
            found = precise.mean(0, keepdim=True)
        else:
            counts = real.to(batch.device).reshape(*real.shape, *[1] * (batch.dim() - 2))
            total = (precise * counts).sum(0, keepdim=True)
            found = total / counts.sum(0, keepdim=True).clamp_min(1)
        return call.part.take_of_batch(found.to(batch.dtype).expand(batch.shape))
    if not call.tensor.dim():
        return call.values
    rows = call.tensor.reshape(-1, call.tensor.shape[-1])
    if (real := call.part.real_tokens) is not None and real.numel() == len(rows):
        rows = rows[real.flatten().to(rows.device)]
    return call.part.fit(widened(rows).mean(0).to(rows.dtype), "the mean")


def _mean_of(call: Call, of: Source, over: str) -> Tensor:
    """The mean of a source, computed in float64, with the type and device of the tensor."""
    total: Tensor | None = None
    count = 0
    for tensor in each_of(of, call.name, call.tensor, call.spot):
        if isinstance(of, Tensor):
            check_like(call.spot, tensor, call.tensor, "of")
        if over == "tokens":
            tensor = tensor.reshape(-1, *tensor.shape[-1:])
        elif tensor.shape[1:] != (wanted := call.part.batch(call.tensor).shape[1:]):
            raise InvalidArgumentError(
                f"{call.spot.site}: of has the shape {list(tensor.shape)}, the mean over sequences "
                f"needs [sequences, {', '.join(map(str, wanted))}]"
            )
        part = tensor.detach().to("cpu", torch.float64).sum(0)
        total = part if total is None else total + part
        count += len(tensor)
    if total is None or not count:
        raise InvalidArgumentError(f"{call.spot.site}: of is empty, it has no mean")
    return (total / count).to(call.tensor.device, call.tensor.dtype)


def resample(
    site: str | Site, of: Source | None = None, *, seed: int = 0, **where: Unpack[Where]
) -> Edit:
    """Puts the values of other examples at the site: resample ablation.

    Args:
        site: where.
        of: where the values come from: a tensor [examples, ...] with the shape of the module's
            tensor behind it, or the activations of the site's tensor in a capture. Each sequence
            gets those of a random example, drawn anew in each step. None: each sequence of the
            batch gets those of another one of the batch, the same one in all steps.
        seed: chooses the examples. They are the same at all sites of one seed.
        where: the other parts of the site.

    Raises:
        InvalidArgumentError: `of` is something else; while the model runs: the batch has one
            sequence, or a shape or type does not fit.
    """
    if of is not None:
        check_source(of, "of")

    def change(call: Call) -> Tensor:
        batch = call.part.batch(call.tensor)
        if of is not None:
            return call.part.take_of_batch(_drawn(call, of, batch, seed))
        if len(batch) < 2:
            raise InvalidArgumentError(
                f"{call.spot.site}: the batch has one sequence, and no other to resample from: "
                "give of, or a batch_size that leaves no batch of one"
            )
        order = torch.randperm(len(batch), generator=call.generator(seed))
        donors = torch.empty_like(order)
        donors[order] = order.roll(1)
        return call.part.take_of_batch(batch[donors.to(batch.device)])

    return Edit(Site.of(site, **where), "resample", change, by_column=True)


def _drawn(call: Call, of: Source, batch: Tensor, seed: int) -> Tensor:
    """Values of random examples of a source, for each sequence of the batch."""
    if isinstance(of, Tensor):
        check_like(call.spot, of, batch, "of")
        shapes = [of.shape]
    else:
        found = activations_of(of, call.name)
        shapes = [torch.Size(one.shape or ()) for one in found]
    for shape in shapes:
        if shape[1:] != batch.shape[1:] or not shape:
            raise InvalidArgumentError(
                f"{call.spot.site}: of has the shape {list(shape)}, and examples have "
                f"{list(batch.shape[1:])}"
            )
    counts = torch.tensor([shape[0] for shape in shapes])
    if not counts.sum():
        raise InvalidArgumentError(f"{call.spot.site}: of has no examples")
    places = torch.randint(
        int(counts.sum()), (len(batch),), generator=call.generator(seed, call.step)
    )
    if isinstance(of, Tensor):
        return of[places.to(of.device)]
    ends = counts.cumsum(0)
    new = torch.empty_like(batch)
    which = torch.searchsorted(ends, places, right=True)
    for number in sorted(set(which.tolist())):
        values = as_tensor(found[number], batch, call.spot)
        rows = (which == number).nonzero()[:, 0]
        begin = int(ends[number] - counts[number])
        new[rows.to(batch.device)] = values[(places[rows] - begin).to(batch.device)]
    return new


def noise(
    site: str | Site,
    scale: float,
    *,
    unit: Literal["absolute", "std"] = "absolute",
    seed: int = 0,
    **where: Unpack[Where],
) -> Edit:
    """Adds Gaussian noise.

    The noise is made on the CPU, so all devices get the same. It differs between sites, steps and
    calls, and is the same in each block with the same seed.

    Args:
        site: where.
        scale: the standard deviation of the noise.
        unit: of `scale`: "absolute", or "std" for standard deviations of all elements of the
            module's tensor in this call.
        seed: of the noise.
        where: the other parts of the site.

    Raises:
        InvalidArgumentError: `scale` is negative or not finite, or `unit` is something else.
        UnsupportedError: (a TypeError) while the model runs: the tensor has integers.
    """
    if not (math.isfinite(scale) and scale >= 0):
        raise InvalidArgumentError(f"scale = {scale}: give a finite number from 0 up")
    if unit not in ("absolute", "std"):
        raise InvalidArgumentError(f'unit = {unit!r}: give "absolute" or "std"')

    def change(call: Call) -> Tensor:
        _check_floats(call, "noise")
        values = call.values
        generator = call.generator(seed, str(call.spot.site), call.step, call.call)
        made = torch.randn(values.shape, generator=generator).to(values.device, values.dtype)
        factor: Any = scale
        if unit == "std":
            factor = scale * call.tensor.detach().float().std(correction=0).to(values.dtype)
        noisy: Tensor = values + factor * made
        return noisy

    return Edit(Site.of(site, **where), "noise", change)


def freeze(site: str | Site, **where: Unpack[Where]) -> Edit:
    """Keeps the values of the first call in the block that the site includes, for all later ones.

    The kept values are a copy without gradients. To freeze a site to the values of another run, use
    `replace` with an `Activation`.

    Args:
        site: where.
        where: the other parts of the site.

    Raises:
        InvalidArgumentError: while the model runs: a later call has another shape.
    """

    def change(call: Call) -> Tensor:
        first: Tensor | None = call.kept.get("first")
        if first is None:
            call.kept["first"] = call.values.detach().clone()
            return call.values
        if first.shape != call.values.shape:
            raise InvalidArgumentError(
                f"{call.spot.site}: the first call had the shape {list(first.shape)}, this one has "
                f"{list(call.values.shape)}: choose positions or steps that fit"
            )
        return first.clone()  # the model may change what modules return in place

    return Edit(Site.of(site, **where), "freeze", change)
