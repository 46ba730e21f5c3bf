"""A flight recorder as a callback of the Trainer of transformers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from .._extras import extra
from ._recorder import FlightRecorder

with extra("trainer", "A recorder of a Trainer"):
    from transformers import TrainerCallback

__all__ = ["RecorderOfTrainer"]


class RecorderOfTrainer(TrainerCallback):  # type: ignore[misc]
    """See :func:`llm_instrumentation.flight.trainer_callback`."""

    def __init__(self, make: Callable[[nn.Module], FlightRecorder]) -> None:
        self._make = make
        self.recorder: FlightRecorder | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        if self.recorder is not None:  # an exception has ended the training before
            self.recorder.stop()
        self.recorder = self._make(others["model"]).start()

    def on_train_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        if self.recorder is not None:
            self.recorder.stop()
