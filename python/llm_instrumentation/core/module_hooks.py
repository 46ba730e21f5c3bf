"""The hooks that a capture has on one module."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ..errors import UnsupportedError
from .config import InstrumentationConfig
from .gradients import Gradients
from .outputs import walk_output
from .sink import INPUT, RECOMPUTED, ModuleTensors, TensorSink, When
from .steps import Place, Steps

__all__ = ["ModuleHooks"]


class ModuleHooks:
    """Takes the tensors of one module when it runs.

    Args:
        sink: takes the tensors.
        steps: say when that is.
        config: what is captured.
        gradients: waits for those of outputs.
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
        gradients: Gradients,
        tensors: ModuleTensors,
        index: int,
        ran: bytearray,
        unwalked: set[str],
    ) -> None:
        self._sink = sink
        self._steps = steps
        self._config = config
        self._kv_cache = config.kv_cache
        self._gradients = gradients
        self._tensors = tensors
        self._index = index
        self._ran = ran
        self._unwalked = unwalked

    def attach(self, module: nn.Module, wrap: Callable[..., Any]) -> Iterable[RemovableHandle]:
        """Hooks the module. The methods are nn.Module's, for scripted modules refuse their own.

        Args:
            wrap: what is put around each hook.
        """
        in_c = self._sink.in_c
        output: Callable[..., None] = self.output
        if in_c is not None:
            output = in_c.new(self._tensors.root, self._index, output)
        if self._config.inputs:
            yield nn.Module.register_forward_pre_hook(module, wrap(self.inputs), with_kwargs=True)
        yield nn.Module.register_forward_hook(module, wrap(output))
        if self._config.gradients:
            yield nn.Module.register_forward_hook(module, wrap(self.gradients))

    def output(self, module: nn.Module, args: Any, output: Any) -> None:
        """The forward hook; the one in C leaves to it what it does not know."""
        if not self._sink.running:
            return
        place = self._steps.here()
        if not place.mine:
            return
        when = self._when(place, 0)
        place.calls[self._index] += 1
        self._ran[self._index] = 1
        try:
            found = walk_output(output, kv_cache=self._kv_cache, unwalked=self._unwalked)
        except Exception as error:  # of methods that the output's types have
            self._tensors.refuse(_not_walked(error), when)
            return
        self._tensors.take(found, when, RECOMPUTED if place.again else "")

    def inputs(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The forward pre-hook."""
        if not self._sink.running:
            return
        place = self._steps.here()
        if not place.mine:
            return
        # The output of this call gets the same number, also where an earlier call had none.
        call = max(place.calls[self._index], place.entered.get(self._index, 0))
        place.calls[self._index], place.entered[self._index] = call, call + 1
        when, ending = self._when(place, 0), RECOMPUTED * place.again + INPUT
        try:
            found: list[tuple[str, Tensor]] = []
            for part in (args, kwargs):  # each layer is given the caches of all
                found += walk_output(part, kv_cache=False, unwalked=self._unwalked)
        except Exception as error:
            self._tensors.refuse(_not_walked(error), when, ending)
            return
        self._tensors.take(found, when, ending)

    def gradients(self, module: nn.Module, args: Any, output: Any) -> None:
        """The forward hook behind that of the output."""
        if not self._sink.running:
            return
        place = self._steps.here()
        if not place.mine:
            return
        try:
            found = walk_output(output, kv_cache=self._kv_cache)
        except Exception:  # which was told of when the output was taken
            return
        when = self._when(place, 1)
        for path, tensor in found:
            self._gradients.wait_for(tensor, self._tensors, path, when)

    def _when(self, place: Place, ended: int) -> When:
        """Of a call of the module, which has been counted or not."""
        return When(place.step, place.token, place.calls[self._index] - ended, place.request)


def _not_walked(error: Exception) -> UnsupportedError:
    refused = UnsupportedError(f"looking for tensors in it raised {error!r}")
    refused.__cause__ = error
    return refused
