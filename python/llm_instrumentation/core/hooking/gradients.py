"""Captures the gradients of outputs during backward passes."""

from __future__ import annotations

import threading

from torch import Tensor
from torch.utils.hooks import RemovableHandle

from ..calls.step_numbers import StepNumbers
from ..tensors.capture_state import GRADIENT, CaptureState
from ..tensors.enqueue import When
from ..tensors.sink import ModuleTensors

__all__ = ["Gradients"]


class Gradients:
    """Hooks output tensors, and puts their gradients into a sink.

    Args:
        state: the capture's state.
        numbers: the numbers of its steps.

    Attributes:
        awaited: a hooked output required a gradient.
        seen: a backward pass computed one.
    """

    def __init__(self, state: CaptureState, numbers: StepNumbers) -> None:
        self.awaited = self.seen = False
        self._state = state
        self._numbers = numbers
        self._lock = threading.Lock()
        # A hook on a leaf stays after the graph is gone, so it has to be removed. The key has the
        # leaf's id.
        self._on_leaves: dict[tuple[int, ModuleTensors, str], RemovableHandle] = {}

    def wait_for(self, tensor: Tensor, tensors: ModuleTensors, path: str, when: When) -> None:
        """Captures the gradient of an output in each backward pass that computes it.

        An output may be a leaf: a parameter, or an argument that the module returns as it is. The
        gradient of a leaf is the sum over all its uses, so it belongs to no step.
        """
        leaf = tensor.is_leaf

        def take(gradient: Tensor | None) -> None:
            # Autograd passes None if only other outputs of the same operator were used.
            if gradient is None or not self._state.running or (leaf and self._numbers.leaves_out):
                return
            self.seen = True
            tensors.take([(path, gradient)], When() if leaf else when, GRADIENT)

        if not tensor.requires_grad:
            return
        self.awaited = True
        handle: RemovableHandle = tensor.register_hook(take)  # type: ignore[no-untyped-call]
        if leaf:
            at = id(tensor), tensors, path
            with self._lock:
                earlier, self._on_leaves[at] = self._on_leaves.get(at), handle
            if earlier is not None:
                earlier.remove()

    def forget(self) -> None:
        """Removes the hooks on leaves."""
        with self._lock:
            for handle in self._on_leaves.values():
                handle.remove()
            self._on_leaves.clear()
