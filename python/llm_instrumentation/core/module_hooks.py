"""The hooks that a capture has on one module."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from ..errors import UnsupportedError
from .config import InstrumentationConfig
from .outputs import walk_output
from .sink import RECOMPUTED, ModuleTensors, TensorSink, When
from .steps import Steps

__all__ = ["ModuleHooks"]


class ModuleHooks:
    """What takes the tensors of one module when it runs.

    Args:
        sink: takes the tensors.
        steps: say when that is.
        config: what is captured.
        tensors: of the module.
        index: of the module among all that are captured: into the calls of a step, and `ran`.
        ran: gets a 1 for each module that ran.
        unwalked: gets the names of types that hold tensors and are of no known kind.
    """

    def __init__(
        self,
        sink: TensorSink,
        steps: Steps,
        config: InstrumentationConfig,
        tensors: ModuleTensors,
        index: int,
        ran: bytearray,
        unwalked: set[str],
    ) -> None:
        self._sink = sink
        self._steps = steps
        self._kv_cache = config.kv_cache
        self._tensors = tensors
        self._index = index
        self._ran = ran
        self._unwalked = unwalked

    def output_hook(self) -> Callable[..., None]:
        """The forward hook, in C where that can be."""
        in_c = self._sink.in_c
        if in_c is None:
            return self._output
        return in_c.new(self._tensors.root, self._index, self._output)

    def _output(self, module: nn.Module, args: Any, output: Any) -> None:
        if not self._sink.running:
            return
        place = self._steps.here()
        if not place.mine:
            return
        calls, index = place.calls, self._index
        when = When(place.step, place.token, calls[index], place.request)
        calls[index] += 1
        self._ran[index] = 1
        try:
            found = walk_output(output, kv_cache=self._kv_cache, unwalked=self._unwalked)
        except Exception as error:  # of methods that the output's types have
            refused = UnsupportedError(f"looking for tensors in it raised {error!r}")
            refused.__cause__ = error
            self._tensors.refuse(refused, when)
            return
        self._tensors.take(found, when, RECOMPUTED if place.again else "")
