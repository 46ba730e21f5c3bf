"""The gradients of captured outputs, when a backward pass computes them."""

from __future__ import annotations

import threading

from torch import Tensor
from torch.utils.hooks import RemovableHandle

from .sink import GRADIENT, ModuleTensors, TensorSink, When
from .steps import Steps

__all__ = ["Gradients"]


_NO_STEP = When(-1, -1, 0, 0)


class Gradients:
    """Waits for the gradients of tensors, and gives them to a sink.

    Args:
        sink: takes them.
        steps: say whether those of leaves are left out.

    Attributes:
        awaited: whether a tensor was seen that requires one.
        seen: whether one came.
    """

    def __init__(self, sink: TensorSink, steps: Steps) -> None:
        self.awaited = self.seen = False
        self._sink = sink
        self._steps = steps
        self._lock = threading.Lock()
        # Leaves keep their hooks, where the graph of others takes them along. By the leaf's id.
        self._on_leaves: dict[tuple[int, ModuleTensors, str], RemovableHandle] = {}

    def wait_for(self, tensor: Tensor, tensors: ModuleTensors, path: str, when: When) -> None:
        """Takes the gradient of a module's tensor in each backward pass that computes it.

        That of a leaf, as a parameter or an argument that is returned as it is, is the sum over all
        its uses: it belongs to no step.
        """
        leaf = tensor.is_leaf

        def take(gradient: Tensor | None) -> None:
            # None: what this pass computes depends on others that came with the tensor, not on it.
            if gradient is None or not self._sink.running or (leaf and self._steps.leaves_out):
                return
            self.seen = True
            tensors.take([(path, gradient)], _NO_STEP if leaf else when, GRADIENT)

        if not tensor.requires_grad:
            return
        self.awaited = True
        handle: RemovableHandle = tensor.register_hook(take)  # type: ignore[no-untyped-call]
        if leaf:
            at = id(tensor), tensors, path
            with self._lock:
                # Of another leaf, which had this id before: its hooks are gone with it.
                earlier, self._on_leaves[at] = self._on_leaves.get(at), handle
            if earlier is not None:
                earlier.remove()

    def forget(self) -> None:
        """Leaves no hook on tensors that outlive their graph."""
        with self._lock:
            for handle in self._on_leaves.values():
                handle.remove()
            self._on_leaves.clear()
