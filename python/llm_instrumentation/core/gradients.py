"""The gradients of captured outputs, when a backward pass computes them."""

from __future__ import annotations

import threading

from torch import Tensor
from torch.utils.hooks import RemovableHandle

from .sink import GRADIENT, ModuleTensors, TensorSink, When

__all__ = ["Gradients"]


class Gradients:
    """Waits for the gradients of tensors, and gives them to a sink.

    Attributes:
        awaited: whether a tensor was seen that requires one.
        seen: whether one came.
    """

    def __init__(self, sink: TensorSink) -> None:
        self.awaited = self.seen = False
        self._sink = sink
        self._lock = threading.Lock()
        # Leaves keep their hooks, where the graph of others takes them along.
        self._on_leaves: dict[tuple[int, ModuleTensors, str], RemovableHandle] = {}

    def wait_for(self, tensor: Tensor, tensors: ModuleTensors, path: str, when: When) -> None:
        """Takes the gradient of a module's tensor in each backward pass that computes it."""

        def take(gradient: Tensor | None) -> None:
            # None: what this pass computes depends on others that came with the tensor, not on it.
            if gradient is not None and self._sink.running:
                self.seen = True
                tensors.take([(path, gradient)], when, GRADIENT)

        if not tensor.requires_grad:
            return
        self.awaited = True
        handle: RemovableHandle = tensor.register_hook(take)  # type: ignore[no-untyped-call]
        if tensor.is_leaf:  # a parameter, or an argument that is returned as it is
            at = id(tensor), tensors, path
            with self._lock:
                earlier = self._on_leaves.pop(at, None)
                self._on_leaves[at] = handle
            if earlier is not None:
                earlier.remove()

    def forget(self) -> None:
        """Leaves no hook on tensors that outlive their graph."""
        with self._lock:
            for handle in self._on_leaves.values():
                handle.remove()
            self._on_leaves.clear()
