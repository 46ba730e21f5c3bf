"""Lets compiled models run eagerly while they are captured or traced: compiled code calls no hooks
and shows no operators.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from .._warn import warn
from ..errors import UnsupportedError
from .selection import has_forward

__all__ = ["run_eagerly"]


class _Stance:
    """Compiles nothing anew while captures run; the first one begins that, the last one ends it.

    A stance that someone else has chosen stays. To set one imports ``torch._dynamo``, which takes
    two seconds; in a program that did not, the first call of ``torch.compile`` sets it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._captures = 0
        self._ours: object = None  # what torch has while ours is in force
        self._compile: Any = None  # torch's own, while ours stands in its place
        self._waiting: Any = None  # ours

    def __enter__(self) -> None:
        with self._lock:
            self._captures += 1
            self._begin()

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._captures -= 1
            if self._captures > 0:
                return
            self._give_back_compile()
            if self._ours is not None:
                if _stance_object() is self._ours:
                    torch.compiler.set_stance("default")
                self._ours = None

    def _begin(self) -> None:
        if "torch._dynamo" not in sys.modules:
            if self._waiting is None:
                self._wait_for_compile()
            return
        self._give_back_compile()
        if self._ours is None and _current_stance() in (None, "default"):
            torch.compiler.set_stance("eager_on_recompile")
            self._ours = _stance_object()

    def _wait_for_compile(self) -> None:
        own: Any = torch.compile

        @functools.wraps(own)
        def waiting(*args: Any, **kwargs: Any) -> Any:
            compiled = own(*args, **kwargs)
            with self._lock:
                if self._captures > 0:
                    self._begin()
            return compiled

        self._compile, self._waiting = own, waiting
        vars(torch)["compile"] = waiting

    def _give_back_compile(self) -> None:
        if self._waiting is not None and torch.compile is self._waiting:
            vars(torch)["compile"] = self._compile
        self._compile = self._waiting = None


def _stance_object() -> object:
    """The stance as torch has it; each change makes another one."""
    return getattr(sys.modules.get("torch._dynamo.eval_frame"), "_stance", None)


def _current_stance() -> str | None:
    return getattr(_stance_object(), "stance", None)


@dataclasses.dataclass
class _Held:
    captures: int
    own: Any
    earlier: Any  # what the module had as an attribute before, None: nothing


class _OwnForward:
    """A module's ``forward`` as an attribute of its own, for as long as captures need it.

    Code that was compiled around a module checks where its ``forward`` comes from. So all such
    code is out of date meanwhile, and valid again afterwards.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: dict[int, _Held] = {}  # by the id of the module

    def take(self, module: nn.Module) -> None:
        with self._lock:
            held = self._held.get(id(module))
            if held is not None:
                held.captures += 1
                return
            earlier = vars(module).get("forward")
            own: Any = module.forward
            if earlier is not None:
                own = functools.update_wrapper(functools.partial(earlier), earlier)
            self._held[id(module)] = _Held(1, own, earlier)
            vars(module)["forward"] = own

    def give_back(self, module: nn.Module) -> None:
        with self._lock:
            held = self._held[id(module)]
            held.captures -= 1
            if held.captures > 0:
                return
            del self._held[id(module)]
            if vars(module).get("forward") is not held.own:
                return  # someone has put theirs there
            if held.earlier is None:
                del vars(module)["forward"]
            else:
                vars(module)["forward"] = held.earlier


_stance = _Stance()
_own_forward = _OwnForward()


@contextlib.contextmanager
def run_eagerly(
    models: Sequence[nn.Module],
    *,
    when: str = "during the capture",
    why: str = "compiled code does not call hooks",
) -> Iterator[bool]:
    """Lets all code that was compiled around the models' modules run as it is written.

    Other compiled code runs on; what would be compiled anew meanwhile runs eagerly.

    Args:
        models: the models.
        when: ends "it runs eagerly", in the warning of a compiled model and in the error.
        why: gives the reason in that warning.

    Yields:
        whether a model is known to be compiled.

    Raises:
        UnsupportedError: a model is compiled, and this torch has no way out of that.
    """
    modules = list(dict.fromkeys(module for model in models for module in model.modules()))
    compiled = any(_is_compiled(module) for module in modules)
    can = hasattr(torch.compiler, "set_stance")
    if compiled:
        if not can:
            raise UnsupportedError(
                f"the model is compiled, and torch {torch.__version__} cannot run it eagerly "
                f"{when}: begin that before torch.compile, or use torch 2.6 or newer"
            )
        warn(f"the model is compiled: it runs eagerly {when}, since {why}")
    if not can:
        yield compiled
        return
    with contextlib.ExitStack() as undo:
        # DataParallel copies a module's attributes to replicas, of which this would not be.
        replicated = any(isinstance(module, nn.DataParallel) for module in modules)
        for module in modules if _anything_compiled() and not replicated else ():
            if has_forward(module) and not isinstance(module, torch.jit.ScriptModule):
                _own_forward.take(module)
                undo.callback(_own_forward.give_back, module)
        undo.enter_context(_stance)
        yield compiled


def _anything_compiled() -> bool:
    """Whether compiled code is in this process; where torch does not tell, there may be."""
    if "torch._dynamo" not in sys.modules:
        return False
    frames = sys.modules.get("torch._dynamo.convert_frame")
    codes = getattr(getattr(frames, "input_codes", None), "seen", None)
    return codes is None or len(codes) > 0


def _is_compiled(module: nn.Module) -> bool:
    return (
        "_orig_mod" in module._modules
        or getattr(module, "_compiled_call_impl", None) is not None
        or hasattr(vars(module).get("forward"), "_torchdynamo_orig_callable")
    )
