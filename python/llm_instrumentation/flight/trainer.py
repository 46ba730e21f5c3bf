"""A flight recorder in the Trainer of transformers."""

from __future__ import annotations

import os
from typing import Any

from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from ._recorder import FlightRecorder

__all__ = ["FlightCallback"]


class FlightCallback(TrainerCallback):  # type: ignore[misc]
    """Records the last steps of the model of a Trainer::

        callback = FlightCallback("flight/train", config=config.with_gradients())
        Trainer(model, arguments, train_dataset=data, callbacks=[callback]).train()

    An exception that ends the training leaves the recorder running, so that its dump is finished at
    the end of the process, or by ``callback.recorder.stop()``.

    Args:
        path: where dumps go; see :class:`.FlightRecorder`.
        options: further arguments of :class:`.FlightRecorder`.

    Attributes:
        recorder: the recorder; None before the training.
    """

    def __init__(self, path: str | os.PathLike[str] = "flight", **options: Any) -> None:
        self._path = path
        self._options = options
        self.recorder: FlightRecorder | None = None

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: nn.Module | None = None,
        **others: Any,
    ) -> None:
        """Begins to record."""
        if model is None:
            raise TypeError("this Trainer does not tell its callbacks of the model")
        self.recorder = FlightRecorder(model, self._path, **self._options).start()

    def on_train_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **others: Any,
    ) -> None:
        """Ends the recording."""
        if self.recorder is not None:
            self.recorder.stop()
