"""The modules through which calls enter models, with the hooks that see the calls begin and end."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from ..tensors.modules import has_forward
from .compiled import outside, outside_of_compiled
from .encoders import encoder_of
from .own_hook import OwnHook

__all__ = ["Entries"]


class Entries:
    """Hooks the modules through which calls enter models.

    Those are the models and their children, because some models are entered through a child, and
    in generation through their encoder. :meth:`watch` adds others.

    The register functions are those of nn.Module: scripted modules refuse to call their own.

    Args:
        models: the models.
        enter: the forward pre-hook, which takes keyword arguments.
        leave: the forward hook, which is called after an exception, too.
    """

    def __init__(
        self, models: Iterable[nn.Module], enter: Callable[..., Any], leave: Callable[..., Any]
    ) -> None:
        self._enter, self._leave = enter, leave
        self._lock = threading.Lock()
        self._handles: list[RemovableHandle] = []
        self._removed = self._inside = False
        self._models = list(models)
        found: dict[nn.Module, None] = {}
        for model in self._models:
            original = _original(model)
            found |= dict.fromkeys([model, original, *original.children()])
            if (encoder := encoder_of(original)) is not None:
                found[encoder] = None
        self._known = [module for module in found if has_forward(module)]
        self._watched = set(self._known)

    def hook_begins(self, *, inside: bool = False) -> None:
        """Adds the hooks that see calls begin. Add the hooks of other modules after it.

        Args:
            inside: compiled code is captured from inside. Then only modules around it are hooked,
                because the hooks of others would be compiled.
        """
        self._inside = inside
        if inside:
            around = outside_of_compiled(self._models)
            self._known = [module for module in self._known if module in around]
        for module in self._known:
            self._begins(module)

    def hook_ends(self) -> None:
        """Adds the hooks that see calls end. They come last, so a step includes all outputs."""
        for module in self._known:
            self._ends(module)

    def watch(self, module: nn.Module) -> None:
        """Hooks a further module through which a call entered a model."""
        with self._lock:
            if module not in self._watched and not self._removed and not self._inside:
                self._watched.add(module)
                self._begins(module)
                self._ends(module)

    def remove(self) -> None:
        """Removes all hooks. No module is watched from then on."""
        with self._lock:
            self._removed = True
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._known.clear()
        self._watched.clear()
        self._models.clear()

    def _begins(self, module: nn.Module) -> None:
        hook = self._hook(self._enter)
        self._handles.append(
            nn.Module.register_forward_pre_hook(module, hook, prepend=True, with_kwargs=True)
        )

    def _ends(self, module: nn.Module) -> None:
        hook = self._hook(self._leave)
        self._handles.append(nn.Module.register_forward_hook(module, hook, always_call=True))

    def _hook(self, hook: Callable[..., Any]) -> OwnHook:
        return OwnHook(outside(hook) if self._inside else hook)


def _original(model: nn.Module) -> nn.Module:
    original: nn.Module = getattr(model, "_orig_mod", model)
    return original
