"""Notices that the modules of edits have left their places in the model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import nn

from ...core.tensors.modules import original_name
from ...errors import UnsupportedError

__all__ = ["Places"]


class Places:
    """The places of some modules in their model.

    A module keeps its hooks when another one takes its place, or wraps it, as an adapter does. An
    edit would then change what is no longer the output of the module of that name.

    Args:
        modules: all modules of the model by name.
        names: the names of the modules, as captures have them.
    """

    def __init__(self, modules: Mapping[str, nn.Module], names: Iterable[str]) -> None:
        wanted = set(names)
        # The place of a module: its parent, its name there, and the module; and the whole name.
        self._places: dict[str, tuple[nn.Module, str, nn.Module]] = {}
        for name, module in modules.items():
            inside = original_name(name)
            if name and any(one == inside or one.startswith(f"{inside}.") for one in wanted):
                parent, _, child = name.rpartition(".")
                self._places[name] = modules[parent], child, module

    def check(self) -> None:
        """
        Raises:
            UnsupportedError: another module is at one of the places.
        """
        for name, (parent, child, module) in self._places.items():
            if parent._modules.get(child) is not module:
                raise UnsupportedError(
                    f"{original_name(name)!r} is no longer the module that was there when the "
                    "block of intervene began, as when an adapter is added, so the edits would "
                    "change something else: change the model before the block"
                )
