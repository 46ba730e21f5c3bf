"""Numbers the steps of a capture, and decides which of them are left out."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

__all__ = ["StepNumbers"]


class StepNumbers:
    """The numbers of steps.

    Args:
        first: the number of the first step.
        every: steps whose number is a multiple of this are captured, others are skipped.

    Attributes:
        count: steps begun so far, including those before `first`.
        skipped: steps left out so far.
        paused: leave out the steps that begin while it is True.
    """

    def __init__(self, first: int, every: int) -> None:
        self.count = first
        self.skipped = 0
        self.paused = False
        self._every = every
        self._blocks = 0  # open blocks of `left_out`
        self._skips = False  # whether the step that began last is left out
        self._lock = threading.Lock()

    def next(self) -> tuple[int, bool]:
        """The number of a step that begins, and whether it is left out."""
        with self._lock:
            number = self.count
            self.count += 1
            self._skips = self._pauses or number % self._every != 0
            self.skipped += self._skips
            return number, self._skips

    @property
    def leaves_out(self) -> bool:
        """Whether to leave out tensors without a step: in a pause, and after a skipped step.

        Recomputed outputs and gradients of leaves do not tell their step. Most come soon after it.
        """
        return self._pauses or self._skips

    @contextlib.contextmanager
    def left_out(self) -> Iterator[None]:
        """Leaves out the steps that begin in the block. Blocks may overlap."""
        with self._lock:
            self._blocks += 1
        try:
            yield
        finally:
            with self._lock:
                self._blocks -= 1

    @property
    def _pauses(self) -> bool:
        return self.paused or self._blocks > 0
