"""Where blocks add to the residual stream: found in the additions that a layer makes as it runs.

Some blocks return what they add, and their layer adds it. Others add it themselves and return the
sum, or a norm of the sum. In yet others a norm or a factor stands between. So what a module adds is
no tensor of a module in general, but one of the two summands of an addition.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from ..core.outputs import walk_output
from ..core.own_hook import OwnHook
from ..core.selection import has_forward, original_name
from ..errors import UnsupportedError

__all__ = ["Additions", "Change", "Together", "layers_of", "scope_of"]

Change = Callable[["str | None", Tensor], Tensor]
"""Gets the name of the module that returned what is added, None if none did, and what is added."""

_SUMS = frozenset({"add", "add_", "__add__", "__radd__", "__iadd__"})
# What these return is their argument in another form, so a block that calls them on its input
# still has its input.
_SAME = frozenset(
    {
        "__get__", "__getitem__", "bfloat16", "clone", "contiguous", "cpu", "cuda", "detach",
        "double", "dropout", "expand", "flatten", "float", "half", "movedim", "permute", "reshape",
        "squeeze", "swapaxes", "to", "transpose", "type", "type_as", "unflatten", "unsqueeze",
        "view", "view_as",
    }
)  # fmt: skip
# The marks of what is computed from the residual stream, and from anything that the layer is given.
_STREAM, _GIVEN = 1, 2


class _Block(NamedTuple):
    """One call of a block whose addition is awaited.

    Attributes:
        name: of its module.
        change: what happens to what it adds.
        inside: the addition was found while the module ran; None: it is not found.
    """

    name: str
    change: Change
    inside: bool | None


class Additions:
    """The additions in one scope: a layer, or all of a model, and what is to happen to summands.

    A block's summand is the first one that is computed by the block, or from what it returns, if
    the other one is not, and comes from the residual stream. The stream is the first tensor of
    floats that the scope is given. Behind the block it may be another one of those (Reformer has
    two streams), but what a block itself adds to another one may be a position.

    Args:
        name: of the scope; "": the model.
        module: the scope.
    """

    def __init__(self, name: str, module: nn.Module) -> None:
        self.name = name
        self._module = module
        self._local = threading.local()

    def attach(self) -> Together:
        """Registers the hooks of the scope. Those of its blocks must come later."""
        undo = ExitStack()
        handles = [
            nn.Module.register_forward_pre_hook(
                self._module, OwnHook(self._begin), prepend=True, with_kwargs=True
            ),
            nn.Module.register_forward_hook(self._module, OwnHook(self._end), always_call=True),
        ]
        handles += [
            nn.Module.register_forward_hook(module, OwnHook(self._returned, original_name(name)))
            for name, module in self._module.named_modules(prefix=self.name)
            if module is not self._module
            and has_forward(module)
            and not isinstance(module, torch.jit.ScriptModule)  # it runs no hooks
        ]
        for handle in handles:
            undo.callback(handle.remove)
        return Together(undo)

    def begin(self, name: str, change: Change | None) -> None:
        """A block begins to run. Without a change it is of no interest.

        Raises:
            UnsupportedError: it runs outside of its scope.
        """
        if not self._running:
            raise UnsupportedError(
                f"{name!r} runs outside of {self.name!r}, so what it adds to the residual stream "
                'of that is unknown: leave side="added" out, to change what it returns'
            )
        self._running[-1].begin(name, change)

    def end(self, output: Any) -> None:
        """The block that began last has returned."""
        if self._running:
            self._running[-1].end(output)

    @property
    def _running(self) -> list[_ScopeCall]:
        found: list[_ScopeCall] = self._local.__dict__.setdefault("running", [])
        return found

    def _begin(self, module: nn.Module, args: Any, kwargs: Any = None) -> None:
        watched = _ScopeCall(self.name or type(module).__name__, args, kwargs or {})
        watched.__enter__()  # type: ignore[no-untyped-call]
        self._running.append(watched)

    def _end(self, module: nn.Module, args: Any, output: Any) -> None:
        if not self._running:
            return
        watched = self._running.pop()
        watched.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        if output is not None or watched.error:  # None: it has raised
            watched.check()

    def _returned(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        if self._running:
            self._running[-1].returned(name, output)


class Together:
    """The handles of several hooks."""

    def __init__(self, undo: ExitStack) -> None:
        self._undo = undo

    def remove(self) -> None:
        self._undo.close()


class _ScopeCall(TorchFunctionMode):
    """Sees all functions of torch in one call of a scope.

    Each tensor has marks: `_STREAM`, `_GIVEN`, and one for each call of a block that it is
    computed from, or that computed it from something else. If the scope is given no tensor of
    floats, all that it computes may be the stream.

    Args:
        name: of the scope.
        args, kwargs: what it is given.

    Attributes:
        error: why an addition was not changed. Operators take a TypeError for their own, so it is
            raised behind the scope.
    """

    def __init__(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        super().__init__()
        self.error: TypeError | None = None
        self._name = name
        stream = _stream(args, kwargs)
        self._marks: Any = WeakTensorKeyDictionary()
        self._names: Any = WeakTensorKeyDictionary()
        self._all = 0 if stream is not None else _STREAM
        for tensor in _tensors((args, kwargs)):
            self._marks[tensor] = _GIVEN
        if stream is not None:
            self._marks[stream] = _STREAM | _GIVEN
        self._shape = None if stream is None else stream.shape
        self._blocks: dict[int, _Block] = {}
        self._inside: list[int] = []
        self._next = _GIVEN << 1

    def begin(self, name: str, change: Change | None) -> None:
        mark = 0
        if change is not None:
            mark, self._next = self._next, self._next << 1
            self._blocks[mark] = _Block(name, change, None)
        self._inside.append(mark)

    def end(self, output: Any) -> None:
        mark = self._inside.pop()
        for _, tensor in walk_output(output, kv_cache=False):
            self._marks[tensor] = self._marks.get(tensor, 0) | mark

    def returned(self, name: str, output: Any) -> None:
        for path, tensor in walk_output(output, kv_cache=False):
            self._names[tensor] = name + path

    def check(self) -> None:
        """
        Raises:
            UnsupportedError: a block has added nothing, as far as can be seen.
            TypeError: a change raised it.
        """
        if self.error is not None:
            raise self.error
        for block in self._blocks.values():
            if block.inside is None:
                raise UnsupportedError(
                    f"{block.name!r}: it is not known what it adds to the residual stream of "
                    f"{self._name!r}, because no addition has what it returns as one of two "
                    f"summands: give Site({block.name!r}) to change what it returns, or the name "
                    "of another module"
                )

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        given = [(tensor, self._marks.get(tensor, 0)) for tensor in _tensors((args, kwargs))]
        marks = 0
        for _, mark in given:
            marks |= mark
        if name in _SUMS and self._blocks and self.error is None:
            try:
                args = self._changed(name, args, kwargs)
            except TypeError as error:
                self.error = error
        result = func(*args, **kwargs)
        if name not in _SAME:
            marks |= self._all
            for mark in self._inside:
                marks |= mark
        if marks:
            if name == "__setitem__":
                result_tensors: Iterable[Tensor] = args[:1]
            else:
                result_tensors = _tensors(result)
            for tensor in result_tensors:
                self._marks[tensor] = self._marks.get(tensor, 0) | marks
        return result

    def _changed(self, name: str, args: tuple[Any, ...], kwargs: Any) -> tuple[Any, ...]:
        """The summands of an addition, behind the changes of what blocks add."""
        if len(args) != 2 or kwargs or not all(isinstance(one, Tensor) for one in args):
            return args
        if args[0].shape != args[1].shape or not args[0].is_floating_point():
            return args
        marks = [self._marks.get(one, 0) for one in args]
        summands = list(args)
        for mark, block in self._blocks.items():
            of = [bool(one & mark) for one in marks]
            if of[0] == of[1]:
                continue
            at, inside = int(of[1]), mark in self._inside
            if not marks[1 - at] & (_STREAM if inside else _STREAM | _GIVEN):
                if marks[1 - at] & _GIVEN and args[0].shape == self._shape:
                    raise UnsupportedError(self._unclear(block))
                continue
            if block.inside is None:
                found = block.change(self._names.get(args[at]), summands[at])
                if found is not summands[at] and at == 0 and name in ("add_", "__iadd__"):
                    found = summands[0].copy_(found)  # others may have the same tensor
                summands[at] = found
                self._blocks[mark] = block._replace(inside=inside)
            elif block.inside and not inside:
                raise UnsupportedError(self._unclear(block))
        return tuple(summands)

    def _unclear(self, block: _Block) -> str:
        return (
            f"{block.name!r}: what it computes is added to two tensors that {self._name!r} has, "
            "and it is not known which of them is the residual stream: give "
            f"Site({block.name!r}) to change what it returns, or the name of another module"
        )


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for one in value:
            yield from _tensors(one)
    elif isinstance(value, dict):
        for one in value.values():
            yield from _tensors(one)


def _stream(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """The first tensor of floats that a layer gets; None: it gets none."""
    named = kwargs.get("hidden_states")
    for value in (*args, named, *kwargs.values()):
        if isinstance(value, Tensor) and value.is_floating_point() and value.dim() > 1:
            return value
    return None


def scope_of(layers: Iterable[str], name: str) -> str:
    """The outermost layer that a module is in; "": it is in none, or one itself."""
    return min((one for one in layers if name.startswith(f"{one}.")), key=len, default="")


def layers_of(model: nn.Module) -> list[str]:
    """The names of all entries of lists of modules that run."""
    return [
        original_name(f"{name}.{number}" if name else number)
        for name, module in model.named_modules(remove_duplicate=False)
        if isinstance(module, (nn.ModuleList, nn.Sequential))
        for number, entry in module.named_children()
        if has_forward(entry)
    ]
