"""Where blocks add to the residual stream: found in the additions that a layer makes as it runs.

Some blocks return what they add, and their layer adds it. Others add it themselves and return the
sum, or a norm of the sum. In yet others a norm or a factor stands between. So what a module adds is
no tensor of a module in general, but one of the two summands of an addition.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ...core.calls.own_hook import OwnHook
from ...core.outputs import walk_output
from ...core.tensors.modules import has_forward, original_name
from ...errors import UnsupportedError

__all__ = ["Additions", "Change", "Together", "layers_of", "scope_of"]

Change = Callable[["str | None", Tensor], Tensor]
"""Gets the name of the module that returned what is added, None if none did, and what is added."""

_SUMS = frozenset({"add", "add_", "__add__", "__radd__", "__iadd__"})
# Other functions that add.
_LIKE_SUMS = frozenset(
    {
        "__isub__", "__rsub__", "__sub__", "addbmm", "addbmm_", "addcdiv", "addcdiv_", "addcmul",
        "addcmul_", "addmm", "addmm_", "baddbmm", "baddbmm_", "index_add", "index_add_", "lerp",
        "lerp_", "rsub", "scatter_add", "scatter_add_", "sub", "sub_", "subtract", "subtract_",
    }
)  # fmt: skip
_DIFFERENCES = frozenset({"__isub__", "__sub__", "sub", "sub_", "subtract", "subtract_"})
_PRODUCTS = frozenset(
    {
        "__imul__", "__itruediv__", "__matmul__", "__mul__", "__rmul__", "__truediv__", "bmm",
        "div", "div_", "einsum", "matmul", "mul", "mul_", "multiply", "true_divide",
    }
)  # fmt: skip
# What these return is their first argument in another form, so a block that calls them on its
# input still has its input.
_SAME = frozenset(
    {
        "__get__", "__getitem__", "bfloat16", "clone", "contiguous", "cpu", "cuda", "detach",
        "double", "dropout", "expand", "expand_as", "flatten", "float", "half", "masked_fill",
        "movedim", "permute", "reshape", "squeeze", "swapaxes", "to", "transpose", "type",
        "type_as", "unflatten", "unsqueeze", "view", "view_as",
    }
)  # fmt: skip
# These project all that they get with weights before they bring it together, so what they return
# has the stream in no form.
_PROJECT = frozenset({"multi_head_attention_forward"})
# The marks of what is computed from the residual stream, of what is computed from anything that the
# layer is given, and of the stream itself: a sum of what the layer is given and other things.
_STREAM, _GIVEN, _HOLDS = 1, 2, 4


def _behind(mark: int) -> int:
    """The mark of what is computed from the sum that has what a block adds as a summand."""
    return mark << 1


def _mixed(mark: int) -> int:
    """The mark of what is a block's times something from the stream that is not the block's."""
    return mark << 2


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

    A block is refused if it adds to the stream more than once, because one change is for all of
    what it adds. It is refused too if another function than a sum brings what it returns together
    with the stream or with what other blocks return, because no tensor is the block's alone then.

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
        if not self._running and change is None:
            return  # as when a backward pass recomputes the layer, past its hooks
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


_T = TypeVar("_T")


class _OfTensors(Generic[_T]):
    """A value for each of some tensors, which it does not keep alive.

    A model calls hundreds of functions in a run, so it looks tensors up much faster than torch's
    WeakTensorKeyDictionary.

    Args:
        default: the value of all other tensors.
    """

    def __init__(self, default: _T) -> None:
        self._default = default
        # By the id of a tensor. A tensor that is gone leaves its entry, and another one may have
        # its id.
        self._values: dict[int, tuple[weakref.ref[Tensor], _T]] = {}

    def __getitem__(self, tensor: Tensor) -> _T:
        found = self._values.get(id(tensor))
        return self._default if found is None or found[0]() is not tensor else found[1]

    def __setitem__(self, tensor: Tensor, value: _T) -> None:
        self._values[id(tensor)] = weakref.ref(tensor), value


class _ScopeCall(TorchFunctionMode):
    """Sees all functions of torch in one call of a scope.

    Each tensor has marks: `_STREAM`, `_GIVEN`, `_HOLDS`, and one for each call of a block that it
    is computed from, or that computed it from something else. Behind the addition that a block was
    awaited at, `_behind` takes the place of the block's mark. If the scope is given no tensor of
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
        self._marks: _OfTensors[int] = _OfTensors(0)
        self._names: _OfTensors[str | None] = _OfTensors(None)
        self._all = 0 if stream is not None else _STREAM
        self._others = [one for one in _tensors((args, kwargs)) if one is not stream]
        for tensor in self._others:
            self._marks[tensor] = _GIVEN
        if stream is not None:
            self._marks[stream] = _STREAM | _GIVEN | _HOLDS
        self._shape = None if stream is None else stream.shape
        self._blocks: dict[int, _Block] = {}
        self._inside: list[int] = []
        self._next = _HOLDS << 1

    def begin(self, name: str, change: Change | None) -> None:
        mark = 0
        if change is not None:
            mark, self._next = self._next, self._next << 3
            self._blocks[mark] = _Block(name, change, None)
        self._inside.append(mark)

    def end(self, output: Any) -> None:
        if not self._inside:
            return  # another thread made the hooks while the block ran in this one
        mark = self._inside.pop()
        for _, tensor in walk_output(output, kv_cache=False):
            marks = self._marks[tensor]
            if not marks & mark and any(tensor is one for one in self._others):
                continue  # the block passes on what the scope is given, as RWKV does its state
            self._marks[tensor] = marks & ~mark if marks & _behind(mark) else marks | mark

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
        given = [(tensor, self._marks[tensor]) for tensor in _tensors((args, kwargs))]
        found: list[int] = []
        checked = bool(self._blocks) and self.error is None and name not in _SAME
        if checked and name in _SUMS and _is_sum_of_two(args, kwargs):
            try:
                args, found = self._changed(name, args)
            except TypeError as error:
                self.error = error
            checked = False
        result = func(*args, **kwargs)
        made = args[:1] if name == "__setitem__" else result
        if checked and any(tensor.is_floating_point() for tensor in _tensors(made)):
            try:
                self._check_mixed(name, given)
            except TypeError as error:
                self.error = error
        marks = self._marks_of(name, given)
        for mark in found:
            marks = marks & ~(mark | _mixed(mark)) | _behind(mark)
            if mark in self._inside:
                marks |= _HOLDS
        if marks:
            for tensor in _tensors(made):
                # A sum in place is no longer what the block returned.
                self._marks[tensor] = marks if found else self._marks[tensor] | marks
        return result

    def _marks_of(self, name: str, given: list[tuple[Tensor, int]]) -> int:
        """The marks of what a function returns."""
        every = 0
        for _, one in given:
            every |= one
        first = given[0][1] if given else 0
        if name in _SAME:
            return every & ~_HOLDS | first & _HOLDS if name == "__getitem__" else first
        marks = every | self._all
        others = [one for _, one in given if not one & _HOLDS]
        scaled = name in _PRODUCTS and len(others) == len(given) - 1
        if not (name in _SUMS or (scaled and not any(one & _STREAM for one in others))):
            marks &= ~_HOLDS
        for mark in self._inside:
            if mark and not marks & _behind(mark):
                marks |= mark
        if name in _PRODUCTS:
            for mark in self._blocks:
                if mark not in self._inside and _is_mixed(mark, [one for _, one in given]):
                    marks |= _mixed(mark)
        return marks

    def _changed(self, name: str, args: tuple[Any, ...]) -> tuple[tuple[Any, ...], list[int]]:
        """The summands of an addition, behind the changes of what blocks add.

        Returns:
            the summands; the marks of the blocks that were awaited and have one of them.

        Raises:
            UnsupportedError: a block adds something else too, or something unknown.
        """
        marks = [self._marks[one] for one in args]
        summands = list(args)
        met = []
        for mark, block in self._blocks.items():
            of, inside = [bool(one & mark) for one in marks], mark in self._inside
            if block.inside is not None:
                self._check_again(mark, block, marks)
                continue
            if of[0] == of[1]:
                if of[0] and not inside and (marks[0] | marks[1]) & _mixed(mark):
                    raise UnsupportedError(self._mixture(block))
                continue
            at = int(of[1])
            if not marks[1 - at] & (_STREAM if inside else _STREAM | _GIVEN):
                if marks[1 - at] & _GIVEN and args[0].shape == self._shape:
                    raise UnsupportedError(self._unclear(block))
                continue
            if marks[at] & _HOLDS:
                raise UnsupportedError(self._mixture(block))
            found = block.change(self._names[args[at]], summands[at])
            if found is not summands[at] and at == 0 and name in ("add_", "__iadd__"):
                found = summands[0].copy_(found)  # others may have the same tensor
            summands[at] = found
            self._blocks[mark] = block._replace(inside=inside)
            met.append(mark)
        return tuple(summands), met

    def _check_again(self, mark: int, block: _Block, marks: list[int]) -> None:
        """Checks the summands of an addition behind the one that a block was awaited at.

        Raises:
            UnsupportedError: the block adds one of them too.
        """
        of = [bool(one & mark) for one in marks]
        behind = [bool(one & _behind(mark)) for one in marks]
        again = any(
            of[at] and (behind[1 - at] or (not of[1 - at] and marks[1 - at] & _STREAM))
            for at in (0, 1)
        )
        if mark in self._inside:
            again |= any(one & _behind(mark) and one & _HOLDS for one in marks)
        elif block.inside:  # it returns the sum
            again |= behind[0] != behind[1] and bool(marks[int(behind[0])] & _STREAM)
        if again:
            raise UnsupportedError(self._several(block))

    def _check_mixed(self, name: str, given: list[tuple[Tensor, int]]) -> None:
        """Checks what another function than the sum of two tensors brings together.

        Raises:
            UnsupportedError: it is the stream, or what is computed from it, and a block's.
        """
        marks = [one for _, one in given]
        for mark, block in self._blocks.items():
            inside, awaited = mark in self._inside, block.inside is None
            if inside and self._mixes_inside(name, mark, given, awaited):
                raise UnsupportedError(self._mixture(block) if awaited else self._several(block))
            if inside or not _is_mixed(mark, marks):
                continue
            with_stream = any(one & _HOLDS and not one & mark for one in marks)
            if with_stream or (awaited and name not in _PRODUCTS):
                raise UnsupportedError(self._mixture(block) if awaited else self._several(block))

    def _mixes_inside(
        self, name: str, mark: int, given: list[tuple[Tensor, int]], awaited: bool
    ) -> bool:
        """Whether a function in a block brings the stream together with something of the block.

        A norm that is written in Python multiplies the stream by a number for each token, or
        subtracts one.
        """
        if name in _PROJECT:
            return False
        for place, (_, one) in enumerate(given):
            if not one & _HOLDS or one & mark or bool(one & _behind(mark)) == awaited:
                continue
            others = [other for at, other in enumerate(given) if at != place]
            statistic = name in _PRODUCTS or name in _DIFFERENCES
            if statistic and all(tensor.shape[-1:] == (1,) for tensor, _ in others):
                continue
            if not awaited and (name in _SUMS or name in _LIKE_SUMS):
                return True
            own = mark if awaited else mark | _behind(mark)
            if any(marks & own for _, marks in others):
                return True
        return False

    def _unclear(self, block: _Block) -> str:
        return (
            f"{block.name!r}: what it computes is added to two tensors that {self._name!r} has, "
            "and it is not known which of them is the residual stream: give "
            f"Site({block.name!r}) to change what it returns, or the name of another module"
        )

    def _several(self, block: _Block) -> str:
        return (
            f"{block.name!r}: it adds to the residual stream of {self._name!r} more than once, so "
            f"all of what it adds is not known at one addition: give Site({block.name!r}) to "
            "change what it returns, or the names of modules inside it"
        )

    def _mixture(self, block: _Block) -> str:
        return (
            f"{block.name!r}: it is not known what it adds to the residual stream of "
            f"{self._name!r}, because what it returns and the stream, or what other modules "
            "compute from it, are brought together by another function than a sum of two: give "
            f"Site({block.name!r}) to change what it returns, or the name of another module"
        )


def _is_sum_of_two(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    if len(args) != 2 or kwargs or not all(isinstance(one, Tensor) for one in args):
        return False
    return args[0].shape == args[1].shape and bool(args[0].is_floating_point())


def _is_mixed(mark: int, marks: list[int]) -> bool:
    """Whether there is something of a block, and something of the stream that is not of it."""
    return any(one & mark for one in marks) and any(
        one & _STREAM and not one & mark for one in marks
    )


def _tensors(value: Any) -> list[Tensor]:
    """The tensors in arguments or a result, also those in lists and the like."""
    found: list[Tensor] = []
    _add_tensors(value, found)
    return found


def _add_tensors(value: Any, found: list[Tensor]) -> None:
    if isinstance(value, Tensor):
        found.append(value)
    elif isinstance(value, (tuple, list)):
        for one in value:
            _add_tensors(one, found)
    elif isinstance(value, dict):
        for one in value.values():
            _add_tensors(one, found)


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
