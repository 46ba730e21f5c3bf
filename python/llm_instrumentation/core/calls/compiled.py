"""Modules that torch.compile has compiled, and the hooks that run around their code."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from types import CodeType, FrameType
from typing import Any

import torch
from torch import nn

__all__ = [
    "called_by", "compilations", "compiled_region", "compiles_its_hooks", "is_compiled",
    "original_code", "outside", "outside_of_compiled",
]  # fmt: skip

# The files of the frames that torch puts around a function that it compiles, or does not.
_AROUND = frozenset(
    os.path.join(os.path.dirname(torch.__file__), "_dynamo", name)
    for name in ("eval_frame.py", "external_utils.py")
)


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
        own = set() if compiles_its_hooks(original) else {original}
        inner |= set(original.modules()) - own
    return {module for model in models for module in model.modules()} - inner


def compiled_region(kind: type[nn.Module]) -> str | None:
    """A method that torch.compile compiles once for all modules of the class; None: there is none.

    ``torch.compiler.nested_compile_region`` marks such methods.
    """
    for base in kind.__mro__:
        for name, value in vars(base).items():
            if hasattr(value, "__marked_compile_region_fn__"):
                return name
    return None


def original_code(code: CodeType) -> CodeType:
    """The code as it was before torch compiled it, or cut it where a graph breaks."""
    utils = sys.modules.get("torch._dynamo.utils")
    if utils is None:
        return code
    made = getattr(utils, "orig_code_map", None)  # another thread may be importing the module
    if not made or not made.values:
        return code
    code = made.values.get(id(code), code)
    rests = sys.modules["torch._dynamo.resume_execution"].ContinueExecutionCache
    rest = rests.generated_code_metadata.values.get(id(code))
    return code if rest is None else rest.code


def called_by(frame: FrameType | None) -> FrameType | None:
    """`frame`, or the one that called it, if it is one of torch.compile's around a function."""
    while frame is not None and frame.f_code.co_filename in _AROUND:
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
