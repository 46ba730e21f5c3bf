"""llm_instrumentation 1.3.1, an earlier package of the same name.

It hooks only the model and its direct children, and takes only outputs that are one tensor. Here it
gets hooks on every module for each tensor of an output, so that it stores as much as the others.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import nn

from . import OLDER
from .contender import Absent, Contender, Running, hooks, tensors

OWN_PROCESS = True  # it has the same name as this package


def contenders(model: nn.Module) -> list[Contender]:
    if not OLDER.exists():
        raise Absent("not installed")
    import llm_instrumentation
    from llm_instrumentation.core import framework as older

    if not Path(llm_instrumentation.__file__).is_relative_to(OLDER):
        raise Absent(f"{llm_instrumentation.__file__} is another release")

    class EveryModule(older.OptimizedHookManager):
        def attach_hooks(self, model: nn.Module, config: Any) -> None:
            def make(name: str) -> Any:
                def hook(module: nn.Module, args: Any, output: Any) -> None:
                    for tensor in tensors(output):
                        self._enqueue_async_processing(name, tensor)

                return hook

            self.registered = contextlib.ExitStack()
            self.registered.enter_context(hooks(model, make))

        def detach_hooks(self) -> None:
            self.registered.close()

    older.OptimizedHookManager = EveryModule

    @contextlib.contextmanager
    def capture(preset: str, folder: Path, memory: float | None) -> Iterator[Running]:
        config = getattr(older.InstrumentationConfig, preset)()
        framework = older.InstrumentationFramework(config)
        framework.instrument_model(model)
        with framework.capture_activations(str(folder / "run.stream")):
            yield Running(model)

    return [
        Contender(
            f"llm_instrumentation 1.3.1, {preset}",
            lambda folder, memory, preset=preset: capture(preset, folder, memory),
        )
        for preset in ("fast_capture", "balanced", "max_compression")
    ]
