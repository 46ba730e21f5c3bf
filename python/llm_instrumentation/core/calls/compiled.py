"""Modules that torch.compile has compiled, and the hooks that run around their code."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable, Iterator
from types import FrameType
from typing import Any

import torch
from torch import nn

__all__ = [
    "called_by", "compilations", "compiles_its_hooks", "is_compiled", "outside",
    "outside_of_compiled",
]  # fmt: skip

# The frames that torch puts around a function that it does not compile.
_EVAL_FRAME = os.path.join(os.path.dirname(torch.__file__), "_dynamo", "eval_frame.py")


def is_compiled(module: nn.Module) -> bool:
    """Whether torch.compile made the module, or compiled its call or its forward."""
    return (
        "_orig_mod" in module._modules
        or getattr(module, "_compiled_call_impl", None) is not None
        or getattr(module, "_compiled_callable", None) is not None  # by vLLM
        or _has_compiled_forward(module)
    )


def _has_compiled_forward(module: nn.Module) -> bool:
    return hasattr(vars(module).get("forward"), "_torchdynamo_orig_callable")


def compiles_its_hooks(module: nn.Module) -> bool:
    """Whether torch compiles the hooks of an outermost compiled module with its code.

    It does so where the forward is torch's own, as that of nn.Sequential. The hooks of other
    modules run before and after the code.
    """
    import torch._dynamo

    if _has_compiled_forward(module):
        return False
    return bool(torch._dynamo.trace_rules.check(module.forward))


def outside_of_compiled(models: Iterable[nn.Module]) -> set[nn.Module]:
    """The modules whose hooks run outside of compiled code.

    If no module is compiled, a compiled function may call the models. Then these are the models.
    """
    models = list(models)
    compiled = {module for model in models for module in model.modules() if is_compiled(module)}
    if not compiled:
        return set(models)
    inner: set[nn.Module] = set()
    for module in compiled:
        original: nn.Module = getattr(module, "_orig_mod", module)
        inner |= set(original.modules())
        if not compiles_its_hooks(original):
            inner.discard(original)
    return {module for model in models for module in model.modules()} - inner


def called_by(frame: FrameType | None) -> FrameType | None:
    """`frame`, or the frame that called it through :func:`outside`."""
    while frame is not None and frame.f_code.co_filename == _EVAL_FRAME:
        frame = frame.f_back
    return frame


def outside(hook: Callable[..., Any]) -> Callable[..., Any]:
    """A hook of a module that is called from outside of compiled code, and is not compiled itself.

    torch runs the hooks of the outermost compiled module before and after the compiled code.
    """
    import torch._dynamo

    disable: Any = torch._dynamo.disable  # it has no annotations
    disabled: Callable[..., Any] = disable(hook)
    return disabled


@contextlib.contextmanager
def compilations() -> Iterator[Callable[[], float]]:
    """Watches torch compile in the block.

    Yields:
        returns the seconds since the beginning of the compilation that runs now; 0: none runs.
    """
    from torch._dynamo.callback import callback_handler

    began: list[float] = []  # one may begin within another

    def begin(*_: object) -> None:
        began.append(time.monotonic())

    def end(*_: object) -> None:
        if began:
            began.pop()

    def seconds() -> float:
        try:
            return time.monotonic() - began[0]
        except IndexError:
            return 0.0

    callback_handler.register_start_callback(begin)
    callback_handler.register_end_callback(end)
    try:
        yield seconds
    finally:
        with contextlib.suppress(ValueError):  # torch._dynamo.reset() has removed them
            callback_handler.remove_start_callback(begin)
            callback_handler.remove_end_callback(end)
