"""What the units of layers write to the logits of a model, found once for each layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

from ...errors import UnsupportedError

if TYPE_CHECKING:
    from torch import nn

__all__ = ["UnitLogits", "Writes"]

#: Gives the module by which the units of a layer write to the residual stream, as `written_by`.
Writes: TypeAlias = "Callable[[str], nn.Module | None]"


class UnitLogits:
    """What the units of layers write to the logits of a model.

    Args:
        model: its unembedding is taken.
        writes: gives the module by which the units of a layer write to the residual stream, as
            `written_by` does.
    """

    def __init__(self, model: nn.Module, writes: Writes) -> None:
        self._model, self._writes = model, writes
        self._found: dict[str, tuple[dict[str, Any], str | None]] = {}

    def of(self, layer: str) -> tuple[dict[str, Any], str | None]:
        """The arguments for `unit_page` or `scan_unit`; and why there are none, or None."""
        if layer not in self._found:  # `writes` may run the model
            try:
                given = {"unembedding": self._model, "writes": self._writes(layer)}
                self._found[layer] = given, None
            except UnsupportedError as error:
                self._found[layer] = {}, str(error)
        return self._found[layer]
