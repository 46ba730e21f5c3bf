"""Reads what a running ``generate`` of transformers knows of the tokens that it gives its model."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator, Mapping
from types import FrameType
from typing import Any, NamedTuple

from torch import Tensor

from .running import Running

__all__ = ["Ended", "generates", "mask_of_generation"]

_FOLDER = "transformers/generation/"


def _frames() -> Iterator[FrameType]:
    """The frames of generations that run in this thread, from the innermost one on."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if _FOLDER in frame.f_code.co_filename:
            yield frame
        frame = frame.f_back


def generates() -> bool:
    """Whether a generation runs in this thread."""
    return next(_frames(), None) is not None


def mask_of_generation(rows: int, length: int) -> Tensor | None:
    """The mask [rows, columns] of a running generation, with at least `length` columns, or None.

    A generation makes masks of other forms of it for static caches.
    """
    for frame in _frames():
        found: Any = frame.f_locals.get("model_kwargs")
        mask = found.get("attention_mask") if isinstance(found, Mapping) else None
        if isinstance(mask, Tensor) and mask.dim() == 2 and mask.shape[0] == rows:
            return mask if mask.shape[1] >= length else None
    return None


class Ended:
    """Tells which tokens a generation gives its model for texts that have ended.

    The texts of a batch end at different steps. Those that have ended get padding, though the mask
    keeps it, until the last one ends.
    """

    def __init__(self) -> None:
        self._local = threading.local()

    def of_call(self, rows: int) -> Tensor | None:
        """How many tokens of the call that begins are such padding. Call it for every call.

        Returns:
            [rows], how many of the last tokens of each row; None: none, or it is unknown.
        """
        for frame in _frames():
            unfinished = frame.f_locals.get("unfinished_sequences")
            # Without such a criterion a generation goes on with all rows.
            pads = frame.f_locals.get("has_eos_stopping_criteria", True)
            if pads and isinstance(unfinished, Tensor) and unfinished.shape == (rows,):
                before: _Generation | None = getattr(self._local, "last", None)
                ended = None
                if before is not None and before.unfinished is unfinished:
                    ended = before.ended  # another call of the same step, as for guidance
                elif before is not None and before.running.is_in(frame):
                    # The last token was chosen for rows that were unfinished in the call before.
                    ended = 1 - before.unfinished
                    ended = ended if before.ended is None else ended + before.ended
                self._local.last = _Generation(Running(frame), unfinished, ended)
                return ended
        self._local.last = None
        return None


class _Generation(NamedTuple):
    running: Running  # the generation
    unfinished: Tensor
    ended: Tensor | None
