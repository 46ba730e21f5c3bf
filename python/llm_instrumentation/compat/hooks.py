"""Forward hooks that pass a model's outputs to a processor.

The configuration types are in :mod:`.config` and are documented under this module's name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ..core.config import HookConfig, HookGranularity
from ..core.outputs import walk_output
from ..core.sampling import sample_tensor
from ..core.selection import LayerSelectionError, select_modules

__all__ = [
    "HookConfig",
    "HookGranularity",
    "LayerSelectionError",
    "OptimizedHookManager",
    "TensorProcessor",
]


class TensorProcessor(Protocol):
    """Receives captured tensors from an :class:`OptimizedHookManager`."""

    def process(self, tensor: Tensor, metadata: Mapping[str, Any]) -> Any:
        """Takes one output tensor.

        Args:
            tensor: detached; the model may change it in place after this returns.
            metadata: ``layer_name``, ``sync`` (True without ``async_enabled``) and ``compress``
                (the value of ``compression_enabled``).
        """


class OptimizedHookManager:
    """Hooks a model and passes every selected output to a processor of your own.

    :class:`~llm_instrumentation.InstrumentationFramework` captures to disk without it. Use this
    class to send tensors elsewhere::

        manager = OptimizedHookManager(processor)
        manager.attach_hooks(model, HookConfig(HookGranularity.MLP_ONLY))
    """

    def __init__(self, tensor_processor: TensorProcessor) -> None:
        self.tensor_processor = tensor_processor
        self.hooks: list[RemovableHandle] = []

    def attach_hooks(self, model: nn.Module, config: HookConfig) -> None:
        """Hooks the modules that ``config`` selects.

        Raises:
            LayerSelectionError: `config` selects no module.
        """
        for name, module in select_modules(model, config):
            self.hooks.append(module.register_forward_hook(self._hook(name, config)))

    def detach_hooks(self) -> None:
        """Removes all hooks."""
        for handle in self.hooks:
            handle.remove()
        self.hooks = []

    def _hook(self, name: str, config: HookConfig) -> Callable[[nn.Module, Any, Any], None]:
        sampled = config.granularity is HookGranularity.SAMPLED_SLICES
        process = self.tensor_processor.process

        def hook(module: nn.Module, args: Any, output: Any) -> None:
            with torch.no_grad():
                for path, tensor in walk_output(output, kv_cache=False):
                    tensor = tensor.detach()
                    if sampled:
                        tensor = sample_tensor(tensor, config.sampling_rate)
                    process(
                        tensor,
                        {
                            "layer_name": name + path,
                            "sync": not config.async_enabled,
                            "compress": config.compression_enabled,
                        },
                    )

        return hook
