"""Recorders that a training of transformers or Lightning starts and stops."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import nn

from ._recorder import FlightRecorder

if TYPE_CHECKING:
    from ._lightning import RecorderOfLightning
    from ._trainer import RecorderOfTrainer

__all__ = ["lightning_callback", "trainer_callback"]


def trainer_callback(path: str | os.PathLike[str] = "flight", **options: Any) -> RecorderOfTrainer:
    """A callback of the Trainer of transformers that records the training::

        recording = trainer_callback("flight/train", after=0)
        Trainer(model, arguments, train_dataset=data, callbacks=[recording]).train()
        print(recording.recorder.dumps)

    The recorder starts when the training begins, and stops when it ends. An exception that leaves
    the model is a trigger. Then the recorder goes on until the next training begins, or until
    ``recorder.stop()``. A step of the recorder is a call of the model, so each part of a batch
    that is accumulated is a step of its own, and so is each batch of an evaluation.

    Args:
        path: where dumps go; see :class:`.FlightRecorder`.
        options: further arguments of :class:`.FlightRecorder`.

    Returns:
        the callback. Its ``recorder`` is the :class:`.FlightRecorder`; None: no training has begun.

    Raises:
        MissingExtraError: transformers is not installed.
        TypeError: an option is no argument of :class:`.FlightRecorder`.
    """
    from ._trainer import RecorderOfTrainer

    return RecorderOfTrainer(_maker(path, options))


def lightning_callback(
    path: str | os.PathLike[str] = "flight", **options: Any
) -> RecorderOfLightning:
    """A callback of the Trainer of Lightning that records the training::

        recording = lightning_callback("flight/train", after=0)
        Trainer(max_steps=1000, callbacks=[recording]).fit(module, data)
        print(recording.recorder.dumps)

    The recorder starts when the training begins, behind the validation that comes before it, and
    stops when it ends. An exception that ends the training is a trigger. Lightning calls
    ``training_step``, which is no call of a module. So a step of the recorder is a call of a
    module in there: with two, a batch has two steps.

    Args:
        path: where dumps go; see :class:`.FlightRecorder`.
        options: further arguments of :class:`.FlightRecorder`.

    Returns:
        the callback. Its ``recorder`` is the :class:`.FlightRecorder`; None: no training has begun.

    Raises:
        MissingExtraError: lightning is not installed.
        TypeError: an option is no argument of :class:`.FlightRecorder`.
    """
    from ._lightning import RecorderOfLightning

    return RecorderOfLightning(_maker(path, options))


def _maker(
    path: str | os.PathLike[str], options: dict[str, Any]
) -> Callable[[nn.Module], FlightRecorder]:
    """Makes the recorder of a model that is not known yet. Unknown options are refused now."""
    inspect.signature(FlightRecorder).bind(None, path, **options)
    return lambda model: FlightRecorder(model, path, **options)
