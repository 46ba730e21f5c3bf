"""What a model gave and was given, kept by plain hooks."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

from plain_hooks import tensors
from torch import Tensor, nn

__all__ = ["Outermost", "Watched", "watched"]


@dataclasses.dataclass
class Outermost:
    """A call of a module that no other module of the model made.

    Attributes:
        name: the module's; "" for the model.
        given: its named arguments.
        seen: the outputs of it and all modules inside it, as they ended, by packet name.
    """

    name: str
    given: dict[str, Any]
    seen: list[tuple[str, Tensor]] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class Watched:
    """All calls of a model, in order."""

    calls: list[Outermost] = dataclasses.field(default_factory=list)

    @property
    def seen(self) -> list[tuple[str, Tensor]]:
        return list(itertools.chain.from_iterable(call.seen for call in self.calls))


@contextlib.contextmanager
def watched(model: nn.Module) -> Iterator[Watched]:
    """Keeps copies of the outputs of all modules. It shares no code with the package."""
    kept, depth, handles = Watched(), 0, []
    for name, module in model.named_modules():

        def begin(module: nn.Module, args: Any, kwargs: Any, name: str = name) -> None:
            nonlocal depth
            if depth == 0:
                kept.calls.append(Outermost(name, dict(kwargs)))
            depth += 1

        def end(module: nn.Module, args: Any, output: Any, name: str = name) -> None:
            nonlocal depth
            depth -= 1
            for at, tensor in tensors(name, output):
                kept.calls[-1].seen.append((at, tensor.detach().to("cpu", copy=True)))

        handles.append(module.register_forward_pre_hook(begin, with_kwargs=True))
        handles.append(module.register_forward_hook(end))
    try:
        yield kept
    finally:
        for handle in handles:
            handle.remove()
