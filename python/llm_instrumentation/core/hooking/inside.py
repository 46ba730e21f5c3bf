"""Captures tensors inside compiled code, by an operator that the compiler keeps in its graph.

The hook of a module is traced with the module. It calls ``strap::emit`` for each tensor that the
module returns, and compiled code runs that operator with the value that it computes there. Three
things make the operator sound:

- It says that it changes `order`. So the compiler neither drops nor reorders it.
- The number of the module comes in a tensor, which compiled code reads at each call. Code that
  torch shares between layers, or between models, passes the number of the module that runs.
- A captured module has its ``forward`` as an instance attribute. Compiled code depends on where a
  ``forward`` comes from, so torch keeps code with emissions beside code without, and each capture
  after the first finds its code compiled.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..._native import emission, emit_to, view_function
from ..._warn import warn
from ...errors import UnsupportedError
from ..calls.compiled import compiled_region, compiles_its_hooks, is_compiled
from ..calls.own_hook import OwnHook
from ..config import InstrumentationConfig
from ..outputs import walk_output
from ..tensors.modules import has_forward
from .eager import own_forward

__all__ = ["Emission", "Receiver", "can_emit", "runs_inside", "why_eagerly"]


class Receiver(NamedTuple):
    """Receives what one module returns, or is given, for one capture.

    Attributes:
        hook: called in place of the emission where the module is not compiled.
        in_c: `hook` is in C, where it takes the tensors of compiled code, too.
        emitted: takes the tensors of compiled code: ``emitted(path, tensor, first)``. `path` is the
            place of the tensor, see :func:`walk_output`. Without a tensor it has the names of types
            that cannot be walked, a line for each. `first`: the tensor is the first one of a call.
            The memory may be used again after the return.
    """

    hook: Callable[..., Any]
    in_c: bool
    emitted: Callable[[str, Tensor | None, bool], None]


_OLDEST = "2.13"  # the oldest release of torch that was tested

_receivers: dict[int, list[Receiver]] = {}  # by the number of the module
_numbers = itertools.count(1)


class _Site:
    """A module that emits: its number, and the hook that compiled code has traced.

    It lives as long as its module, so that the compiled code stays valid. It does not refer to the
    module, which would never be freed then.
    """

    def __init__(self, module: nn.Module, *, kv_cache: bool, inputs: bool) -> None:
        self.number = next(_numbers)
        # Compiled code that was kept in a file finds the hook by its key, in another process.
        self.key: Any = f"strap.emit(kv_cache={kv_cache}, inputs={inputs})"
        site = _new_tensor(self.number)
        receivers = self.receivers = _receivers[self.number] = []
        self.attached = 0  # emissions
        weakref.finalize(module, _receivers.pop, self.number)

        def hook(module: nn.Module, args: Any, other: Any) -> None:
            if not torch.compiler.is_compiling():
                for receiver in receivers:
                    receiver.hook(module, args, other)
                return
            unwalked: set[str] = set()
            found = list(walk_output(args, kv_cache=False, unwalked=unwalked)) if inputs else []
            found += walk_output(other, kv_cache=kv_cache, unwalked=unwalked)
            first = True
            for path, tensor in found:
                if reason := _cannot_be_emitted(type(tensor), tensor.dtype):
                    unwalked.add(reason)
                    continue
                torch.ops.strap.emit(_ORDER, site, tensor.detach(), path, first)
                first = False
            if first or unwalked:
                torch.ops.strap.emit(_ORDER, site, None, "\n".join(unwalked), first)

        self.hook = OwnHook(hook)

    def receive(self, receiver: Receiver) -> None:
        self.receivers.append(receiver)
        self._tell_c()

    def leave(self, receiver: Receiver) -> None:
        self.receivers.remove(receiver)
        self._tell_c()

    def _tell_c(self) -> None:
        if not self.receivers:
            emit_to(self.number, None, in_c=False)
        else:
            first = self.receivers[0]
            emit_to(self.number, first.hook, in_c=first.in_c and len(self.receivers) == 1)


# By module, then by whether it emits key-value caches, and whether it emits inputs.
_sites: weakref.WeakKeyDictionary[nn.Module, dict[tuple[bool, bool], _Site]] = (
    weakref.WeakKeyDictionary()
)


class Emission:
    """Lets a module emit what it returns, or is given, from construction to :meth:`remove`.

    Args:
        module: the module.
        receiver: receives its tensors; None: nobody does, until another emission does.
        kv_cache: emit the tensors of key-value caches, too.
        inputs: emit what the module is given, not what it returns.
    """

    def __init__(
        self,
        module: nn.Module,
        receiver: Receiver | None,
        *,
        kv_cache: bool,
        inputs: bool = False,
    ) -> None:
        _define()
        sites = _sites.setdefault(module, {})
        if (kv_cache, inputs) not in sites:
            sites[kv_cache, inputs] = _Site(module, kv_cache=kv_cache, inputs=inputs)
        self._module, self._site, self._receiver = module, sites[kv_cache, inputs], receiver
        self._inputs, self._removed = inputs, False
        own_forward.take(module)
        self._site.attached += 1
        hooks: dict[Any, Any] = module._forward_pre_hooks if inputs else module._forward_hooks
        if receiver is not None:
            self._site.receive(receiver)
            keys = list(hooks)
            behind = keys[keys.index(self._site.key) + 1 :] if self._site.key in keys else []
            if not all(isinstance(hooks[key], OwnHook) for key in behind):
                warn(
                    f"a {type(module).__name__} got a hook after an earlier prepare() or capture "
                    "began, and that goes on: this capture takes its tensors as they are before "
                    "that hook. End the earlier one, then begin again"
                )
        hooks[self._site.key] = self._site.hook
        if inputs:
            module._forward_pre_hooks_with_kwargs[self._site.key] = True

    def remove(self) -> None:
        """Ends the emission. The compiled code stays with torch, for the next capture."""
        if self._removed:
            return
        self._removed = True
        module, site = self._module, self._site
        if self._receiver is not None:
            site.leave(self._receiver)
        own_forward.give_back(module)
        site.attached -= 1
        if site.attached > 0:
            return
        if self._inputs:
            module._forward_pre_hooks.pop(site.key, None)
            module._forward_pre_hooks_with_kwargs.pop(site.key, None)
        else:
            module._forward_hooks.pop(site.key, None)


def can_emit(module: nn.Module) -> bool:
    """Whether the module has a forward in Python, which torch.compile can trace with a hook."""
    return has_forward(module) and not isinstance(module, torch.jit.ScriptModule)


def _cannot_be_emitted(kind: type, dtype: torch.dtype) -> str:
    """What the compiler cannot pass to the operator; empty: it can.

    Of a tensor that wraps others it would pass each of them by itself. Inductor fails at an
    operator that takes complex numbers and changes another argument.
    """
    if hasattr(kind, "__tensor_flatten__"):
        return f"{kind.__name__} inside compiled code"
    return f"{dtype} inside compiled code" if dtype.is_complex else ""


# torch.compile calls the function while it traces, and takes its result for a constant.
vars(_cannot_be_emitted)["_dynamo_marked_constant"] = True


def runs_inside(models: Sequence[nn.Module], config: InstrumentationConfig) -> bool:
    """Whether a capture takes the tensors inside of compiled code, see `with_compiled`.

    Raises:
        UnsupportedError: it should, and cannot.
    """
    if config.compiled == "eager":
        return False
    cannot = _obstacle(models, config)
    if config.compiled == "inside":
        if cannot:
            raise UnsupportedError(f"no capture inside of compiled code: {cannot}")
        return True
    return not cannot and any(is_compiled(part) for model in models for part in model.modules())


def why_eagerly(models: Sequence[nn.Module], config: InstrumentationConfig) -> str:
    """The reason for which a capture runs compiled models eagerly. The warning about it ends so."""
    cannot = "" if config.compiled == "eager" else _obstacle(models, config)
    return cannot or "compiled code does not call hooks"


def _obstacle(models: Sequence[nn.Module], config: InstrumentationConfig) -> str:
    """Why a capture cannot take the tensors inside of compiled code; empty: it can."""
    if torch.__version__ < _OLDEST:
        return f"torch {torch.__version__} is older than {_OLDEST}"
    if config.gradients:
        return "gradients are captured by hooks, which compiled code does not call"
    if any(isinstance(part, nn.DataParallel) for model in models for part in model.modules()):
        return "the replicas of nn.DataParallel are copies"
    if any(_compiled_in_place(model) and compiles_its_hooks(model) for model in models):
        return (
            "torch compiles the hooks of a model of torch.nn that was compiled in place, so a step "
            "cannot begin outside of compiled code: give torch.compile(model)"
        )
    for kind in {type(part) for model in models for part in model.modules()}:
        if region := compiled_region(kind):
            return (
                f"{kind.__name__}.{region} is a nested_compile_region, whose code is that of "
                "the first module for all modules"
            )
    return ""


def _compiled_in_place(module: nn.Module) -> bool:
    return getattr(module, "_compiled_call_impl", None) is not None


def _new_tensor(number: int) -> Tensor:
    """A tensor that compiled code may read and change in any mode, whatever mode is on now."""
    with torch.inference_mode(False):
        return torch.tensor(number, dtype=torch.int64, device="cpu")


_ORDER = _new_tensor(0)


@functools.cache
def _define() -> Any:
    """Registers the operator."""
    new: Any = torch.library.Library  # it has no annotations
    library = new("strap", "DEF")
    library.define("emit(Tensor(a!) order, Tensor site, Tensor? value, str path, bool first) -> ()")
    view = view_function(Tensor)
    emit = emission(view, _emit) if view else _emit
    library.impl("emit", emit, "CompositeExplicitAutograd")
    torch.library.register_fake("strap::emit", lambda *_: None, lib=library)
    return library


def _emit(order: Tensor, site: Tensor, value: Tensor | None, path: str, first: bool) -> None:
    for receiver in _receivers.get(int(site), ()):
        receiver.emitted(path, value, first)
