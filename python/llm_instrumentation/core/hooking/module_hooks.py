"""The hooks that a capture has on one module."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ...errors import UnsupportedError
from ..calls.steps import Place, Steps
from ..config import InstrumentationConfig
from ..outputs import walk_output
from ..tensors.capture_state import INPUT, RECOMPUTED, CaptureState
from ..tensors.enqueue import When
from ..tensors.sink import ModuleTensors
from .gradients import Gradients
from .inside import Emission, Receiver

__all__ = ["ModuleHooks"]


class ModuleHooks:
    """The hooks of one module. They pass its tensors to a sink.

    Args:
        state: the capture's state.
        steps: the capture's steps.
        config: the capture's configuration.
        gradients: receives the outputs whose gradients are captured.
        tensors: the module's tensors.
        index: the module's number among all hooked ones; its place in `ran` and in a step's calls.
        ran: a byte per module; the hook sets it to 1.
        unwalked: receives the names of types that hold tensors but cannot be walked.
    """

    def __init__(
        self,
        state: CaptureState,
        steps: Steps,
        config: InstrumentationConfig,
        gradients: Gradients,
        tensors: ModuleTensors,
        index: int,
        ran: bytearray,
        unwalked: set[str],
    ) -> None:
        self._state = state
        self._steps = steps
        self._config = config
        self._kv_cache = config.kv_cache
        self._gradients = gradients
        self._tensors = tensors
        self._index = index
        self._ran = ran
        self._unwalked = unwalked

    def attach_inside(self, module: nn.Module) -> Iterable[Emission]:
        """Lets the module emit its tensors, also from inside of compiled code."""
        if self._config.inputs:
            inputs = Receiver(self.inputs, False, self.input_emitted)
            yield Emission(module, inputs, kv_cache=False, inputs=True)
        output = Receiver(self._output_hook(), self._state.in_c is not None, self.output_emitted)
        yield Emission(module, output, kv_cache=self._kv_cache)

    def attach(self, module: nn.Module, wrap: Callable[..., Any]) -> Iterable[RemovableHandle]:
        """Registers the hooks on the module.

        The register functions are those of nn.Module: scripted modules refuse to call their own.

        Args:
            wrap: applied to each hook before it is registered.
        """
        output = self._output_hook()
        if self._config.inputs:
            yield nn.Module.register_forward_pre_hook(module, wrap(self.inputs), with_kwargs=True)
        yield nn.Module.register_forward_hook(module, wrap(output))
        if self._config.gradients:
            yield nn.Module.register_forward_hook(module, wrap(self.gradients))

    def _output_hook(self) -> Callable[..., None]:
        in_c = self._state.in_c
        if in_c is None:
            return self.output
        return in_c.new(self._tensors.root, self._index, self.output)

    def output(self, module: nn.Module, args: Any, output: Any) -> None:
        """The forward hook for outputs. The hook in C calls it for all but plain CPU tensors."""
        if not self._state.running:
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

    def inputs(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None
    ) -> None:
        """The forward pre-hook for inputs."""
        if not self._state.running or kwargs is None:  # None: as for `Steps.enter`
            return
        place = self._steps.here()
        if not place.mine:
            return
        # The output of this call gets the same number, even if an earlier call raised.
        call = max(place.calls[self._index], place.entered.get(self._index, 0))
        place.calls[self._index], place.entered[self._index] = call, call + 1
        when, ending = self._when(place, 0), RECOMPUTED * place.again + INPUT
        try:
            found: list[tuple[str, Tensor]] = []
            for part in (args, kwargs):  # no caches: each layer receives those of all layers
                found += walk_output(part, kv_cache=False, unwalked=self._unwalked)
        except Exception as error:
            self._tensors.refuse(_not_walked(error), when, ending)
            return
        self._tensors.take(found, when, ending)

    def output_emitted(self, path: str, tensor: Tensor | None, first: bool) -> None:
        """Takes a tensor of an output that compiled code computes; see :class:`Receiver`."""
        place = self._here()
        if place is None:
            return
        if first:
            place.calls[self._index] += 1
            self._ran[self._index] = 1
        if tensor is None:
            self._unwalked.update(path.splitlines())
        else:
            when = self._when(place, 1)
            self._tensors.take([(path, tensor)], when, RECOMPUTED * place.again)

    def input_emitted(self, path: str, tensor: Tensor | None, first: bool) -> None:
        """Takes a tensor that compiled code gives the module; see :class:`Receiver`."""
        place = self._here()
        if place is None:
            return
        if first:
            call = max(place.calls[self._index], place.entered.get(self._index, 0))
            place.calls[self._index], place.entered[self._index] = call, call + 1
        if tensor is None:
            self._unwalked.update(path.splitlines())
        else:
            when, ending = self._when(place, 0), RECOMPUTED * place.again + INPUT
            self._tensors.take([(path, tensor)], when, ending)

    def _here(self) -> Place | None:
        """This thread's place; None if what runs now is not captured."""
        if not self._state.running:
            return None
        place = self._steps.here()
        return place if place.mine else None

    def gradients(self, module: nn.Module, args: Any, output: Any) -> None:
        """The forward hook for gradients. It runs after the output's hook."""
        if not self._state.running:
            return
        place = self._steps.here()
        if not place.mine:
            return
        try:
            found = walk_output(output, kv_cache=self._kv_cache)
        except Exception:  # the output's hook has reported it
            return
        when = self._when(place, 1)
        for path, tensor in found:
            self._gradients.wait_for(tensor, self._tensors, path, when)

    def _when(self, place: Place, ended: int) -> When:
        """The moment of a call. ended is 1 if the call was counted already, else 0."""
        return When(place.step, place.token, place.calls[self._index] - ended, place.request)


def _not_walked(error: Exception) -> UnsupportedError:
    refused = UnsupportedError(f"looking for tensors in it raised {error!r}")
    refused.__cause__ = error
    return refused
