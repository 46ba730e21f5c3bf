"""Makes compiled models run eagerly while they are captured or traced.

Compiled code calls no hooks and shows no operators.
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

from ..._warn import warn
from ...errors import UnsupportedError
from ..calls.compiled import is_compiled
from ..tensors.modules import has_forward

__all__ = ["own_forward", "run_eagerly"]


class _Stance:
    """Keeps torch from compiling anything while captures run.

    The first capture sets torch's stance, and the last one resets it. A stance that the user has
    set stays. Setting a stance imports ``torch._dynamo``, which takes two seconds. In a program
    that has not imported it, a wrapper around ``torch.compile`` sets the stance at its first call.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._captures = 0
        self._ours: object = None  # torch's stance object while our stance is set
        self._compile: Any = None  # torch.compile while our wrapper replaces it
        self._waiting: Any = None  # our wrapper

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
    """Torch's stance object; each change of the stance makes another one."""
    return getattr(sys.modules.get("torch._dynamo.eval_frame"), "_stance", None)


def _current_stance() -> str | None:
    return getattr(_stance_object(), "stance", None)


@dataclasses.dataclass
class _Held:
    captures: int
    own: Any
    earlier: Any  # the instance attribute `forward` that the module had before; None: none


class _OwnForward:
    """Gives modules their ``forward`` as an instance attribute while captures run.

    Compiled code checks where a module's ``forward`` comes from. So the attribute makes compiled
    code out of date, and it is valid again when the attribute is removed.
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
                return  # other code has replaced the attribute
            if held.earlier is None:
                del vars(module)["forward"]
            else:
                vars(module)["forward"] = held.earlier


_stance = _Stance()
own_forward = _OwnForward()


@contextlib.contextmanager
def run_eagerly(
    models: Sequence[nn.Module],
    *,
    when: str = "during the capture",
    why: str = "compiled code does not call hooks",
) -> Iterator[bool]:
    """Makes all code that was compiled around the models' modules run eagerly.

    Other compiled code runs on. Code that would be compiled for the first time runs eagerly.

    Args:
        models: the models.
        when: completes "it runs eagerly ..." in the warning about a compiled model and in the
            error.
        why: the reason in that warning.

    Yields:
        True if a model is known to be compiled.

    Raises:
        UnsupportedError: a model is compiled, and this torch cannot run it eagerly.
    """
    modules = list(dict.fromkeys(module for model in models for module in model.modules()))
    compiled = any(is_compiled(module) for module in modules)
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
        # DataParallel copies instance attributes to its replicas, whose forward must be their own.
        replicated = any(isinstance(module, nn.DataParallel) for module in modules)
        for module in modules if _anything_compiled() and not replicated else ():
            if has_forward(module) and not isinstance(module, torch.jit.ScriptModule):
                own_forward.take(module)
                undo.callback(own_forward.give_back, module)
        undo.enter_context(_stance)
        yield compiled


def _anything_compiled() -> bool:
    """Whether compiled code may be in this process; True if torch does not tell."""
    if "torch._dynamo" not in sys.modules:
        return False
    frames = sys.modules.get("torch._dynamo.convert_frame")
    codes = getattr(getattr(frames, "input_codes", None), "seen", None)
    return codes is None or len(codes) > 0
