"""The modules of models, and the code of their methods, for recognising frames."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Sequence
from types import CodeType

from torch import nn

__all__ = ["ModelCode"]

# Generators and coroutines: other code may call the model while these are suspended.
_RESTS = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR


class ModelCode:
    """The modules of models by their ids, and the code of their methods.

    Attributes:
        roots: the ids of the models.
        members: the ids of all their modules.
    """

    def __init__(self, models: Sequence[nn.Module]) -> None:
        self.roots = {id(model) for model in models}
        modules = [module for model in models for module in model.modules()]
        self.members = {id(module) for module in modules}
        self._kinds = {type(module) for module in modules}

    @functools.cached_property
    def forwards(self) -> dict[int, CodeType]:
        """The code objects of the ``forward`` of all modules by their ids: to hash one is slow."""
        found = {}
        for kind in self._kinds:
            for base in kind.__mro__:
                forward = inspect.unwrap(vars(base).get("forward", None))
                code = getattr(forward, "__code__", None)
                if isinstance(code, CodeType) and code.co_argcount:
                    found[id(code)] = code
        return found

    @functools.cached_property
    def methods(self) -> set[CodeType]:
        """The code objects of all modules' methods, except generators and coroutines."""
        found = set()
        for kind in {base for own in self._kinds for base in own.__mro__} - {nn.Module, object}:
            for value in vars(kind).values():
                code = getattr(inspect.unwrap(value), "__code__", None) if callable(value) else None
                if isinstance(code, CodeType) and not code.co_flags & _RESTS:
                    found.add(code)
        return found
