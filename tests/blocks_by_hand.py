"""What a block adds to the residual stream, taken away by hand::

    tiny = make("bloom")
    contribution_ablated(tiny.model, tiny.inputs(), "transformer.h.0.self_attention")

It is found by experiment, from values alone, so it knows nothing of names and classes. Each
addition of the model is recorded in three runs: one as it is, one in which the weights of the block
are a little different, and one with other inputs. Where the block meets the stream is the first
addition of which one summand changes with the weights of the block, and the other one changes with
the inputs only. In a last run this addition returns that other summand.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["NothingAddedError", "contribution_ablated", "tensors_of"]

Sums: TypeAlias = list[tuple[Tensor, Tensor]]
_SUMS = ("add.Tensor", "add_.Tensor")


class NothingAddedError(Exception):
    """No addition was found that adds what the block returns to something that it did not make."""


@torch.no_grad()
def contribution_ablated(model: nn.Module, inputs: Mapping[str, Any], site: Any) -> Any:
    """What the model returns without what a block adds to the residual stream.

    Args:
        model: in eval mode, on the CPU. It runs with the seed 0.
        inputs: arguments of the model.
        site: the name of the block's module, or a site with it as `layer`. If the model calls the
            module several times, what each of the calls adds is taken away.

    Raises:
        NothingAddedError: there is no such addition.
    """
    name = site if isinstance(site, str) else site.layer
    block = model.get_submodule(name)
    clean = _recorded(model, inputs)
    other = _recorded(model, _others(inputs))
    calls = _calls(model, inputs, block)
    if not calls:
        raise NothingAddedError(f"{name!r} does not run")
    dropped: dict[int, int] = {}
    for call in range(calls):
        with _perturbed(block, call):
            moved = _recorded(model, inputs)
        # A stream of learned queries is the same for all inputs. Then the block alone counts.
        found = _meets(clean, moved, other) or _meets(clean, moved, None)
        if found is None:
            raise NothingAddedError(f"call {call} of {name!r} adds to nothing")
        dropped[found[0]] = found[1]
    with torch.random.fork_rng(devices=[]), _Dropped(dropped):
        torch.manual_seed(0)
        return model(**inputs)


def tensors_of(output: Any) -> list[Tensor]:
    """All tensors of floats in an output of a model, but those of its caches."""
    if isinstance(output, Tensor):
        return [output] if output.is_floating_point() else []
    if isinstance(output, Mapping):
        output = list(output.values())
    if isinstance(output, (list, tuple)):
        return [tensor for one in output for tensor in tensors_of(one)]
    return []


class _Recorded(TorchDispatchMode):
    """Keeps both summands of each addition of two tensors of one shape."""

    def __init__(self) -> None:
        super().__init__()
        self.sums: Sums = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (summands := _summands(func, args)) is not None:
            self.sums.append((summands[0].clone(), summands[1].clone()))
        return func(*args, **(kwargs or {}))


class _Dropped(TorchDispatchMode):
    """Returns one of the summands, where the numbers of additions say so."""

    def __init__(self, dropped: Mapping[int, int]) -> None:
        super().__init__()
        self._dropped = dropped
        self._number = -1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (summands := _summands(func, args)) is not None:
            self._number += 1
            if (without := self._dropped.get(self._number)) is not None:
                args = list(args)
                args[without] = torch.zeros_like(summands[without])
                if without == 0 and func.__name__ == "add_.Tensor":
                    return summands[0].copy_(func(args[0], args[1], **(kwargs or {})))
        return func(*args, **(kwargs or {}))


def _summands(func: Any, args: Any) -> tuple[Tensor, Tensor] | None:
    if func.__name__ not in _SUMS:
        return None
    one, other = args[:2]
    if not (isinstance(one, Tensor) and isinstance(other, Tensor)):
        return None
    if one.shape != other.shape or one.dim() < 2 or not one.is_floating_point():
        return None
    return one, other


def _recorded(model: nn.Module, inputs: Mapping[str, Any]) -> Sums:
    with torch.random.fork_rng(devices=[]), _Recorded() as mode:
        torch.manual_seed(0)
        model(**inputs)
    return mode.sums


def _meets(clean: Sums, moved: Sums, other: Sums | None) -> tuple[int, int] | None:
    """The number of the addition, and which of its summands is the block's."""
    for number, (before, after) in enumerate(zip(clean, moved, strict=False)):
        changed = [not _equal(a, b) for a, b in zip(before, after, strict=True)]
        if changed[0] == changed[1]:
            continue
        kept = int(changed[0])
        if other is None or number >= len(other):
            return number, 1 - kept
        if not _equal(before[kept], other[number][kept]):
            return number, 1 - kept
    return None


def _equal(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and bool(torch.equal(one.nan_to_num(), other.nan_to_num()))


def _others(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Other inputs of the same shapes: other tokens, but the same masks."""
    found = dict(inputs)
    for name, value in inputs.items():
        if not isinstance(value, Tensor) or "mask" in name:
            continue
        if value.is_floating_point():
            found[name] = value.flip(-1) * 1.1
        elif name.endswith("input_ids"):
            found[name] = torch.where(value == value.min(), value, value.roll(1, -1) ^ 1)
            found[name] = torch.where(value < 30, value, found[name].clamp(30, 60))
    return found


def _calls(model: nn.Module, inputs: Mapping[str, Any], block: nn.Module) -> int:
    count = 0

    def ran(module: nn.Module, args: Any, output: Any) -> None:
        nonlocal count
        count += 1

    handle = block.register_forward_hook(ran)
    try:
        with torch.random.fork_rng(devices=[]):
            model(**inputs)
    finally:
        handle.remove()
    return count


@contextmanager
def _perturbed(block: nn.Module, call: int) -> Iterator[None]:
    """In one of its calls the block has weights that are a little different."""
    weights = [weight for weight in block.parameters() if weight.is_floating_point()]
    kept = [weight.detach().clone() for weight in weights]
    random = torch.Generator().manual_seed(7)
    noise = [torch.randn(weight.shape, generator=random).to(weight) for weight in weights]
    # Made before the run, whose additions are counted.
    others = [weight.detach() + 0.01 * one for weight, one in zip(weights, noise, strict=True)]
    number = -1

    def begin(module: nn.Module, args: Any) -> None:
        nonlocal number
        number += 1
        if number == call:
            for weight, value in zip(weights, others, strict=True):
                weight.data.copy_(value)

    def end(module: nn.Module, args: Any, output: Any) -> Any:
        for weight, value in zip(weights, kept, strict=True):
            weight.data.copy_(value)
        return _moved(output) if number == call and not weights else output

    handles: list[Callable[[], None]] = [
        block.register_forward_pre_hook(begin).remove,
        block.register_forward_hook(end).remove,
    ]
    try:
        yield
    finally:
        for remove in handles:
            remove()
        for weight, value in zip(weights, kept, strict=True):
            weight.data.copy_(value)


def _moved(output: Any) -> Any:
    """What a block without weights returns, a little different."""
    if isinstance(output, Tensor):
        return output * 1.01
    if isinstance(output, tuple):
        return (_moved(output[0]), *output[1:])
    return output
