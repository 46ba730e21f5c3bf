"""The plan of a capture: what is captured, and to where."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from torch import nn

from ..config import InstrumentationConfig
from ..selection import select_modules
from ..tokens import TokenTracker

__all__ = ["CapturePlan", "Probes", "RingLimits", "model_label"]


def model_label(model: Any) -> str:
    """``model.config.model_type``, or the class name in lower case if there is none."""
    model = getattr(model, "_orig_mod", model)
    model_type = getattr(getattr(model, "config", None), "model_type", None)
    return str(model_type) if model_type else type(model).__name__.lower()


class Probes(Protocol):
    """Probes that watch the machine while a capture runs."""

    def run(self, counters: Callable[[], dict[str, Any]], *, append: bool) -> None:
        """Starts the probes.

        Args:
            counters: returns the capture's own counters.
            append: append to the files of an earlier capture.
        """

    def stop(self, *, wait: bool = True) -> None:
        """Stops the probes; with `wait`, returns when they have stopped."""


class RingLimits(NamedTuple):
    """What bounds the steps in memory, beside the memory, and the magnitudes of their tensors.

    Attributes:
        steps: the most steps; 0: no limit.
        seconds: the age of the oldest one; 0.0: no limit.
        outlier: a tensor beyond so many times the usual magnitude of its layer is an outlier; 0.0:
            magnitudes are not looked at.
        file: the file that the steps lie in; None: they are in memory alone.
    """

    steps: int
    seconds: float
    outlier: float
    file: Path | None = None


@dataclass(frozen=True, eq=False)
class CapturePlan:
    """What is captured, and to where. It stays the same while the capture runs.

    Attributes:
        path: the stream file; in segments the first one.
        config: the capture's configuration.
        models: the models whose modules are hooked.
        tracker: counts the tokens; None: tokens are not tracked.
        resume_offset: see :class:`Session`, as for capture_id and overwrite.
        capture_id: the id of the capture that is resumed.
        overwrite: replace any file at the path.
        replaces: files of the earlier capture at the path. They are removed when the new stream
            has taken its place.
        probes: makes the probes that watch the machine; None: no probes.
        ring: keep the last steps in memory, for dumps. Then `path` is for messages alone. None: the
            capture goes to a stream.
        begins: is told the number of each step that begins, before anything of it is captured.
            None: nobody is.
        ended: is told of each step that ends: its number, and what the outermost call returned, or
            None and what it raised. None: nobody is.
        mine: reports whether to capture a call of the models. It is called when the call begins,
            in the call's thread and context. None: all calls are captured.
    """

    path: str
    config: InstrumentationConfig
    models: list[nn.Module]
    tracker: TokenTracker | None = None
    resume_offset: int | None = None
    capture_id: str | None = None
    overwrite: bool = False
    replaces: tuple[Path, ...] = ()
    probes: Callable[[], Probes] | None = None
    mine: Callable[[], bool] | None = None
    ring: RingLimits | None = None
    begins: Callable[[int], None] | None = None
    ended: Callable[[int, Any, BaseException | None], None] | None = None

    @property
    def resumes(self) -> bool:
        """The capture goes on with the stream of an earlier one."""
        return self.resume_offset is not None

    @functools.cached_property
    def labels(self) -> list[str]:
        """The labels of the models. A label that occurs again gets a number, from 2 on."""
        labels: list[str] = []
        counts: dict[str, int] = {}
        for model in self.models:
            label = model_label(model)
            counts[label] = counts.get(label, 0) + 1
            labels.append(label if counts[label] == 1 else f"{label}#{counts[label]}")
        return labels

    @functools.cached_property
    def selected(self) -> list[list[tuple[str, nn.Module]]]:
        """The captured modules of each model, with their names.

        Raises:
            LayerSelectionError: the configuration selects no module of a model.
        """
        return [select_modules(model, self.config) for model in self.models]

    def forget_models(self) -> None:
        """Drops the models when the capture has ended. Its counters need none."""
        self.models.clear()
        self.selected.clear()
