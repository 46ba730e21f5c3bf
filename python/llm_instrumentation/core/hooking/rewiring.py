"""Notices that other modules take the places of hooked ones while a capture runs."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Any, NamedTuple, Protocol

from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook

from ..tensors.modules import original_name

__all__ = ["Hooked", "Removable", "Rewiring"]


class Removable(Protocol):
    """What keeps a hook on a module."""

    def remove(self) -> None:
        """Removes the hook."""


class Hooked(NamedTuple):
    """A hooked module.

    Attributes:
        model: the model's number in the capture.
        name: the module's name.
        module: the module.
        layer: the session's layer of its outputs.
        handles: its hooks.
    """

    model: int
    name: str
    module: nn.Module
    layer: int
    handles: list[Removable]


class Rewiring:
    """The places of hooked modules in their models.

    A module keeps its hooks when another one takes its place, or wraps it, as an adapter does. What
    it returns is no longer what the module of its name returns. So its hooks are removed, and those
    of the modules inside it.

    Args:
        models: the models.
        hooked: their hooked modules.
        told: receives the name of each place that another module takes, and the modules that are no
            longer hooked.
    """

    def __init__(
        self,
        models: Iterable[nn.Module],
        hooked: list[Hooked],
        told: Callable[[str, list[Hooked]], object],
    ) -> None:
        self._hooked = hooked
        self._told = told
        # By the parent's id and the child's name: the model's number, the child's name, the child.
        self._places: dict[tuple[int, str], tuple[int, str, nn.Module]] = {}
        # Modules with children, by their ids, and the children when they were last compared.
        self._children: dict[int, tuple[nn.Module, dict[str, nn.Module | None]]] = {}
        self._lock = threading.Lock()
        for number, model in enumerate(models):
            for name, parent in model.named_modules(remove_duplicate=False):
                if parent._modules:
                    self._children[id(parent)] = parent, dict(parent._modules)
                for child, module in parent._modules.items():
                    if module is not None:
                        whole = original_name(f"{name}.{child}" if name else child)
                        self._places[id(parent), child] = number, whole, module
        # The attributes of these modules, and their children one after the other. A comparison of
        # all children at once takes a third of the time.
        self._parents = [vars(parent) for parent, _ in self._children.values()]
        self._all = self._now()

    @contextlib.contextmanager
    def followed(self, *, inside: bool = False) -> Iterator[None]:
        """Follows changes in the block.

        Args:
            inside: compiled code is captured from inside. It would depend on PyTorch's hook for
                new modules, so changes are found by :meth:`compare` alone.
        """
        with contextlib.ExitStack() as undo:
            if not inside:
                handle = register_module_module_registration_hook(self._registered)
                undo.callback(handle.remove)
            undo.callback(self._forget)
            yield

    def _forget(self) -> None:
        self._places.clear()
        self._children.clear()
        self._hooked, self._parents, self._all = [], [], []

    def _now(self) -> list[nn.Module | None]:
        return [*chain.from_iterable([its["_modules"].values() for its in self._parents])]

    def compare(self) -> None:
        """Compares the places with what they were.

        No hook of PyTorch tells of the children that a list deletes or inserts, nor of those that
        are put into ``_modules``.
        """
        if (every := self._now()) == self._all:
            return
        self._all = every
        for parent, children in list(self._children.values()):
            if (now := parent._modules) != children:
                for child in children:
                    self._registered(parent, child, now.get(child))
                self._children[id(parent)] = parent, dict(now)

    def _registered(self, parent: nn.Module, child: str, new: Any) -> None:
        number, place, module = self._places.get((id(parent), child), (0, "", None))
        if module is None or new is module:
            return
        with self._lock:
            gone = [one for one in self._hooked if one.model == number and _is_in(place, one.name)]
            for one in gone:
                self._hooked.remove(one)
        for one in gone:
            for handle in one.handles:
                handle.remove()
        if gone:
            self._told(place, gone)


def _is_in(place: str, name: str) -> bool:
    return name == place or name.startswith(f"{place}.")
