"""A flight recorder as a callback of Lightning."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from .._extras import extra
from ._recorder import FlightRecorder

with extra("lightning", "A recorder of a Trainer of Lightning"):
    from lightning.pytorch.callbacks import Callback

__all__ = ["RecorderOfLightning"]


class RecorderOfLightning(Callback):  # type: ignore[misc]
    """See :func:`llm_instrumentation.flight.lightning_callback`."""

    def __init__(self, make: Callable[[nn.Module], FlightRecorder]) -> None:
        self._make = make
        self.recorder: FlightRecorder | None = None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.recorder = self._make(pl_module).start()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        if self.recorder is not None:
            self.recorder.__exit__(type(exception), exception, exception.__traceback__)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        if self.recorder is not None:
            self.recorder.stop()
