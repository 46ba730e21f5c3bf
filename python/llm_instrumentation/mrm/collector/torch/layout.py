"""Where in memory the elements of a tensor lie."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Iterator, Sequence
from typing import cast

import torch

__all__ = ["consecutive", "integers_of", "runs_of"]


def runs_of(
    shape: Sequence[int], strides: Sequence[int], itemsize: int, max_runs: int
) -> tuple[tuple[int, ...], int]:
    """The pieces of contiguous memory that a strided tensor covers.

    Broadcast dimensions count once.

    Args:
        shape: elements along each dimension.
        strides: elements from one to the next, along each dimension.
        itemsize: bytes of an element.
        max_runs: with more pieces than that, one piece stands for all, from the first byte
            to the last, with the gaps.

    Returns:
        The offset of each piece from the first element, and the length of all, in bytes.
    """
    if 0 in shape:
        return (), 0
    steps = sorted(
        (stride * itemsize, size)
        for size, stride in zip(shape, strides, strict=True)
        if size > 1 and stride != 0
    )
    run = itemsize
    while steps and steps[0][0] == run:
        run *= steps.pop(0)[1]
    pieces = 1
    span = run
    for step, size in steps:
        pieces *= size
        span += step * (size - 1)
    if pieces > max_runs or (steps and steps[0][0] < run):  # they overlap
        return (0,), span
    offsets = (sum(place) for place in itertools.product(
        *(range(0, step * size, step) for step, size in reversed(steps))
    ))  # fmt: skip
    return tuple(offsets), run


def integers_of(tensor: torch.Tensor) -> list[int] | None:
    """The elements of a contiguous tensor of integers in host memory, else None.

    Read from memory, not by an operator: another dispatch mode would see that.
    """
    kind = {torch.int64: ctypes.c_int64, torch.int32: ctypes.c_int32}.get(tensor.dtype)
    if kind is None or tensor.device.type != "cpu" or tensor.layout is not torch.strided:
        return None
    if not tensor.is_contiguous():
        return None
    count = tensor.numel()
    return cast("list[int]", (kind * count).from_address(tensor.data_ptr())[:]) if count else []


def consecutive(positions: Sequence[int], size: int) -> Iterator[tuple[int, int]]:
    """Positions, negative ones from the end, as (first, count) of those that follow another."""
    first = count = 0
    for position in positions:
        place = position + size if position < 0 else position
        if count and place == first + count:
            count += 1
            continue
        if count:
            yield first, count
        first, count = place, 1
    if count:
        yield first, count
