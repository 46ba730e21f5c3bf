"""Where integrated gradients take gradients, on the way from one input to another."""

from __future__ import annotations

from ...errors import InvalidArgumentError

__all__ = ["points"]


def points(steps: int | None) -> list[tuple[float, float]]:
    """Shares of the way, from 0 to 1, each with its weight in the mean: the trapezoidal rule.

    Args:
        steps: the number of equal steps; there is one point more. None: the beginning alone.

    Raises:
        InvalidArgumentError: `steps` is below 1.
    """
    if steps is None:
        return [(0.0, 1.0)]
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise InvalidArgumentError(f"steps = {steps!r}: give a number from 1 up, or None")
    return [
        (number / steps, (0.5 if number in (0, steps) else 1.0) / steps)
        for number in range(steps + 1)
    ]
