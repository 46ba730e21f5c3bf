"""Calls the module that went wrong again, and names the operator in it."""

from __future__ import annotations

import ast
import inspect
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ..analysis.activation import Activation
from ..analysis.blame import Offender, blame
from ..analysis.reader import ActivationReader
from ..core.outputs import walk_output
from ..core.tensors.capture_state import GRADIENT, INPUT
from ..core.tensors.modules import original_name
from ..errors import NotFoundError, NotReproducedError, UnsupportedError

__all__ = ["Narrowed", "Operand", "narrow"]

# The values of the second call may differ from the captured ones by this share of the largest one:
# kernels round differently, and float16 may have stored them. Dropout and other weights do more.
_NEAR = 0.02
_DIFFER = "the weights, the mode of the model, a cache or random numbers differ"
_KEY = re.compile(r"""\[(\d+|'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")\]""")


@dataclass(frozen=True)
class Operand:
    """A tensor of floats that an operator was given.

    Attributes:
        name: the name of a parameter or buffer in the model; None: the tensor is none.
        shape, dtype: of the tensor.
        least, largest: of its finite values; 0.0: it has none.
        not_finite: how many of its values are not finite.
    """

    name: str | None
    shape: tuple[int, ...]
    dtype: str
    least: float
    largest: float
    not_finite: int


@dataclass(frozen=True)
class Narrowed:
    """The operator from which the first value that is not finite came.

    Attributes:
        offender: the tensor that shows the value, from :func:`.blame`.
        operator: the operator, as torch names it: "aten.sqrt.default".
        module: the module whose code called it: the offender's module or one inside.
        number: how many operators ran before it in the second call.
        operands: the tensors of floats that it was given. If one has values that are not finite,
            it is no result of an operator: a parameter, a buffer or a constant.
        shape: the shape of its first result that is not finite.
        not_finite: how many values of that are not finite.
    """

    offender: Offender
    operator: str
    module: str
    number: int
    operands: tuple[Operand, ...]
    shape: tuple[int, ...]
    not_finite: int


def narrow(model: nn.Module, capture: str | os.PathLike[str]) -> Narrowed:
    """Finds the operator from which the first value of a capture that is not finite came.

    The module that :func:`.blame` names is called once more, with the inputs that the capture has
    of it, in the mode that the model is in. Its output has to show the same value. Then the value
    is followed back through the operators to the one that made it of finite values.

    Args:
        model: the model that was captured, with the weights of that step.
        capture: a capture with ``with_inputs()``, such as a dump of a flight recorder.

    Raises:
        NotFoundError: all values are finite; or the capture lacks the inputs, or the model the
            module.
        UnsupportedError: (a TypeError) the value is in a gradient or in what the module is given,
            or the module cannot be called with tensors alone.
        NotReproducedError: (a ValueError) the second call gives other values, as with dropout,
            key-value caches or other weights.
        StrapError: the capture cannot be read.
    """
    first = blame(capture).first
    if first is None or first.times is not None:
        raise NotFoundError(f"{os.fspath(capture)}: all values are finite")
    where = f"{first.layer + first.path!r} of step {first.step}"
    if GRADIENT in first.path:
        raise UnsupportedError(f"{where} is a gradient: only forward calls are made again")
    if INPUT in first.path:
        raise UnsupportedError(
            f"{where} is given to the module, and no module before it has it: capture all modules"
        )
    modules = {original_name(name): module for name, module in model.named_modules()}
    if first.layer not in modules:
        raise NotFoundError(f"the model has no module {first.layer!r}, which {where} is of")
    with ActivationReader(capture) as reader:
        taken = reader.select(steps=first.step, calls=first.call)
        same = [one for one in taken if one.layer == first.layer and one.rank == first.rank]
        given = {
            one.path.removesuffix(INPUT): _original(one) for one in same if one.path.endswith(INPUT)
        }
        returned = {one.path: one.to_torch() for one in same if _is_output(one)}
    if not given:
        raise NotFoundError(f"{os.fspath(capture)} has no inputs of {first.layer!r}: capture them "
                            "with InstrumentationConfig.with_inputs()")  # fmt: skip
    module = modules[first.layer]
    args, kwargs = _arguments(module, given, where)
    return _Replay(model, modules, module).run(args, kwargs, first, returned)


def _is_output(one: Activation) -> bool:
    return one.dtype is not None and "!" not in one.path


def _original(one: Activation) -> Tensor:
    """The values in the type that the module was given."""
    values = one.to_torch()
    return values if one.source_dtype is None else values.to(getattr(torch, one.source_dtype))


def _arguments(
    module: nn.Module, given: dict[str, Tensor], where: str
) -> tuple[list[Any], dict[str, Any]]:
    """The arguments of a call, of which only the tensors are known. Others have their defaults."""
    device = next((one.device for one in module.parameters()), torch.device("cpu"))
    tree: dict[Any, Any] = {}
    for path, tensor in given.items():
        keys = [ast.literal_eval(key) for key in _KEY.findall(path)] or [0]
        if path and _KEY.sub("", path):
            raise UnsupportedError(f"{where}: the argument {path} cannot be made again")
        at = tree
        for key in keys[:-1]:
            at = at.setdefault(key, {})
        at[keys[-1]] = tensor.to(device)
    kwargs = {key: _made(value, where) for key, value in tree.items() if isinstance(key, str)}
    places = {key: _made(value, where) for key, value in tree.items() if isinstance(key, int)}
    defaults = [one.default for one in inspect.signature(module.forward).parameters.values()]
    args = []
    for place in range(max(places, default=-1) + 1):
        value = places.get(place, inspect.Parameter.empty)
        if value is inspect.Parameter.empty and place < len(defaults):
            value = defaults[place]
        if value is inspect.Parameter.empty:
            raise UnsupportedError(f"{where}: argument {place} is no tensor, so it is not known")
        args.append(value)
    return args, kwargs


def _made(tree: Any, where: str) -> Any:
    """A tensor, or a tuple or dict of them."""
    if isinstance(tree, Tensor):
        return tree
    if all(isinstance(key, str) for key in tree):
        return {key: _made(value, where) for key, value in tree.items()}
    if sorted(tree) != list(range(len(tree))):
        raise UnsupportedError(f"{where}: a part of an argument is no tensor, so it is not known")
    return tuple(_made(tree[place], where) for place in sorted(tree))


@dataclass
class _Ran:
    """An operator that ran, with what it was given before it ran."""

    name: str
    module: str
    operands: list[tuple[Tensor, Operand]]
    bad: Tensor | None  # its first result that is not finite


class _OperatorsSeen(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes each operator. Tensors are kept, so that each memory has one meaning."""

    def __init__(self, names: dict[int, str], stack: list[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ran: list[_Ran] = []
        self._names, self._stack = names, stack
        self._kept: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        operands = [(one, _operand(one, self._names)) for one in _floats((args, kwargs))]
        output = func(*args, **(kwargs or {}))
        self._kept.append((args, kwargs, output))
        bad = next((one for one in _floats(output) if not bool(one.isfinite().all())), None)
        self.ran.append(_Ran(str(func), self._stack[-1], operands, bad))
        return output


def _floats(tree: Any) -> Iterator[Tensor]:
    for one in tree_leaves(tree):
        if isinstance(one, Tensor) and one.is_floating_point():
            yield one


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _operand(tensor: Tensor, names: dict[int, str]) -> Operand:
    finite = tensor[tensor.isfinite()].float()
    least, largest = (float(finite.min()), float(finite.max())) if len(finite) else (0.0, 0.0)
    return Operand(
        names.get(_memory(tensor)), tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."),
        least, largest, tensor.numel() - len(finite),
    )  # fmt: skip


class _Replay:
    """One more call of a module."""

    def __init__(self, model: nn.Module, modules: dict[str, nn.Module], module: nn.Module) -> None:
        self._modules, self._module = modules, module
        self._names = {
            _memory(one): original_name(name)
            for name, one in [*model.named_parameters(), *model.named_buffers()]
        }

    def run(
        self, args: list[Any], kwargs: dict[str, Any], first: Offender, returned: dict[str, Tensor]
    ) -> Narrowed:
        buffers = [(one, one.clone()) for one in self._module.buffers()]
        stack = [first.layer]
        watch = _OperatorsSeen(self._names, stack)

        def left(*_: Any) -> None:
            stack.pop()

        handles = [
            handle
            for name, module in self._modules.items()
            for handle in (
                module.register_forward_pre_hook(lambda *_, name=name: stack.append(name)),
                module.register_forward_hook(left, always_call=True),
            )
        ]
        try:
            with torch.no_grad(), watch:
                output = self._module(*args, **kwargs)
        except Exception as error:
            raise UnsupportedError(
                f"{first.layer!r} cannot be called with the captured inputs alone: {error}"
            ) from error
        finally:
            for handle in handles:
                handle.remove()
            with torch.no_grad():
                for buffer, before in buffers:
                    buffer.copy_(before)
        again = dict(walk_output(output, kv_cache=False))
        _check_same(first, returned, again)
        return self._followed(first, watch.ran, again[first.path])

    def _followed(self, first: Offender, ran: list[_Ran], value: Tensor) -> Narrowed:
        """Follows a value back to the operator that made it of finite values."""
        number = _maker(ran, len(ran), value)
        if number is None:
            raise NotReproducedError(f"{first.layer!r} returns a value that no operator made")
        while True:
            one = ran[number]
            before = (
                _maker(ran, number, tensor)
                for tensor, operand in one.operands
                if operand.not_finite
            )
            earlier = next((found for found in before if found is not None), None)
            if earlier is None:
                break
            number = earlier
        assert one.bad is not None
        return Narrowed(
            first, one.name, one.module, number, tuple(operand for _, operand in one.operands),
            tuple(one.bad.shape), int((~one.bad.isfinite()).sum()),
        )  # fmt: skip


def _maker(ran: list[_Ran], before: int, tensor: Tensor) -> int | None:
    """The last operator before a number that put values that are not finite into this memory."""
    memory = _memory(tensor)
    for number in range(before - 1, -1, -1):
        bad = ran[number].bad
        if bad is not None and _memory(bad) == memory and not _is_view(ran[number]):
            return number
    return None


def _is_view(one: _Ran) -> bool:
    """Whether the result is the memory of an operand that had the value already."""
    assert one.bad is not None
    memory = _memory(one.bad)
    return any(_memory(tensor) == memory and operand.not_finite for tensor, operand in one.operands)


def _check_same(first: Offender, returned: dict[str, Tensor], again: dict[str, Tensor]) -> None:
    """Refuses a second call whose results are not those of the first one."""
    for path, before in returned.items():
        where = f"{first.layer + path!r} of step {first.step}"
        now = again.get(path)
        if now is None or now.shape != before.shape:
            raise NotReproducedError(f"{where}: the second call returned no such tensor")
        a, b = before.double().cpu(), now.double().cpu()
        finite = a.isfinite()
        if not torch.equal(_kinds(a), _kinds(b)):
            raise NotReproducedError(
                f"{where} has other values that are not finite after the second call: {_DIFFER}"
            )
        largest = float(a[finite].abs().max()) if finite.any() else 0.0
        error = float((a - b)[finite].abs().max()) if finite.any() else 0.0
        if error > _NEAR * largest:
            raise NotReproducedError(
                f"{where} differs by {error:.3g} after the second call, of at most {largest:.3g}: "
                f"{_DIFFER}"
            )


def _kinds(values: Tensor) -> Tensor:
    """1 and -1 for infinities, 2 for NaN, 0 for other values."""
    return torch.where(values.isnan(), 2, values.isposinf().int() - values.isneginf().int())
