"""Where in memory the elements of a tensor lie."""

from __future__ import annotations

import ctypes
import functools
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch

__all__ = [
    "MANY",
    "MOST",
    "Pieces",
    "UntoldError",
    "block_of",
    "chosen_of",
    "integers_of",
    "pieces_of",
    "rows_of",
    "values_of",
]

#: The pieces of contiguous memory that hold some elements of a tensor. Each is the offset from the
#: tensor's first element and the length, both in bytes.
Pieces = tuple[tuple[int, int], ...]

MANY = 1 << 16  #: With more pieces, one piece stands for all.
MOST = 1 << 20  #: The most elements of an index or mask that are looked at.

# pieces_of keeps its results: each layer of a model has the same layouts, and so has each token.
_layouts: dict[tuple[tuple[int, ...], tuple[int, ...], int, int], Pieces] = {}
_MANY_LAYOUTS, _FEW = 1 << 12, 64

# Up to this many positions Python is faster than numpy.
_FEW_POSITIONS = 1 << 10

_NUMPY = {
    torch.bool: np.bool_,
    torch.int16: np.int16,
    torch.int32: np.int32,
    torch.int64: np.int64,
    torch.int8: np.int8,
    torch.uint8: np.uint8,
}
_CTYPES: dict[torch.dtype, Any] = {torch.int32: ctypes.c_int32, torch.int64: ctypes.c_int64}


class UntoldError(Exception):
    """It cannot be found out which elements an operator chooses."""


def pieces_of(
    shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int, max_runs: int
) -> Pieces:
    """The pieces of contiguous memory that a strided tensor covers.

    Elements that share memory, such as those of a broadcast dimension, count once.

    Args:
        shape: elements along each dimension.
        strides: elements from one to the next, along each dimension.
        itemsize: bytes of an element.
        max_runs: with more pieces, one piece stands for all: from the first byte to the last,
            gaps included.
    """
    key = (shape, strides, itemsize, max_runs)
    found = _layouts.get(key)
    if found is None:
        found = _pieces_of(*key)
        if len(found) <= _FEW:
            if len(_layouts) >= _MANY_LAYOUTS:
                _layouts.clear()
            _layouts[key] = found
    return found


def _pieces_of(
    shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int, max_runs: int
) -> Pieces:
    if 0 in shape:
        return ()
    steps = sorted(
        (stride * itemsize, size)
        for size, stride in zip(shape, strides, strict=True)
        if size > 1 and stride != 0
    )
    run = itemsize
    while steps and steps[0][0] == run:
        run *= steps.pop(0)[1]
    if math.prod(size for _, size in steps) > max_runs:
        return ((0, run + sum(step * (size - 1) for step, size in steps)),)
    offsets = (
        sum(place)
        for place in itertools.product(
            *(range(0, step * size, step) for step, size in reversed(steps))
        )
    )
    extent = run
    for step, size in steps:
        if step < extent:  # overlapping windows
            return _merged((offset, run) for offset in sorted(offsets))
        extent += step * (size - 1)
    return tuple((offset, run) for offset in offsets)


def _merged(pieces: Iterable[tuple[int, int]]) -> Pieces:
    merged: list[tuple[int, int]] = []
    for offset, length in pieces:
        if merged and offset <= sum(merged[-1]):
            first = merged[-1][0]
            merged[-1] = (first, max(sum(merged[-1]), offset + length) - first)
        else:
            merged.append((offset, length))
    return tuple(merged)


def block_of(tensor: torch.Tensor, shape: Sequence[int]) -> Pieces:
    """The pieces of ``tensor[:shape[0], :shape[1], ...]``."""
    count = tuple(min(most, size) for most, size in zip(shape, tensor.shape, strict=True))
    return pieces_of(count, tensor.stride(), tensor.itemsize, MANY)


def rows_of(tensor: torch.Tensor, dim: int, positions: Sequence[int]) -> Pieces:
    """The pieces of a tensor at positions along one dimension; negative ones count from the end.

    The result is that of :func:`chosen_of`. For few positions, as one token has, this is faster.
    """
    shape, strides, itemsize = tensor.shape, tensor.stride(), tensor.itemsize
    if len(positions) > _FEW_POSITIONS or not shape or _overlaps(shape, strides):
        return chosen_of(tensor, {dim: np.asarray(positions, np.int64)})
    size, step = shape[dim], strides[dim] * itemsize
    chosen = sorted({one + size if one < 0 else one for one in positions})
    pieces: list[tuple[int, int]] = []
    at = 0
    while at < len(chosen):
        first, count = chosen[at], 1
        while at + count < len(chosen) and chosen[at + count] == first + count:
            count += 1
        start = first * step
        within = pieces_of((*shape[:dim], count, *shape[dim + 1 :]), strides, itemsize, MANY)
        pieces += [(start + offset, length) for offset, length in within]
        at += count
        if len(pieces) > MANY or (
            len(within) == 1 and at < len(chosen) and within[0][1] > count * step
        ):
            return chosen_of(tensor, {dim: np.array(chosen)})
    return tuple(pieces)


@functools.lru_cache(1 << 12)
def _overlaps(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Whether elements may share memory, judged by strides alone."""
    extent = 1
    for step, size in sorted(zip(strides, shape, strict=True)):
        if size > 1:
            if step < extent:
                return True
            extent += step * (size - 1)
    return False


def chosen_of(tensor: torch.Tensor, places: Mapping[int, npt.NDArray[Any]]) -> Pieces:
    """The pieces of a tensor at chosen positions of some dimensions, and all of the others.

    With more than :data:`MANY` pieces, one piece stands for all: from the first byte to the last,
    gaps included.

    Args:
        tensor: the tensor. A scalar tensor counts as one dimension of size 1.
        places: by dimension, an array of positions; the arrays are broadcast to each other.
            Negative positions count from the end.
    """
    shape, strides = list(tensor.shape) or [1], list(tensor.stride()) or [0]
    first: Any = np.zeros((), np.int64)
    for dim, place in places.items():
        first = first + np.where(place < 0, place + shape[dim], place) * (
            strides[dim] * tensor.itemsize
        )
    rest = [dim for dim in range(len(shape)) if dim not in places]
    within = pieces_of(
        tuple(shape[dim] for dim in rest),
        tuple(strides[dim] for dim in rest),
        tensor.itemsize,
        MANY,
    )
    starts = np.unique(first)
    if not len(starts) or not within:
        return ()
    if len(starts) * len(within) > MANY:
        start, end = within[0][0], max(map(sum, within))
        return ((int(starts[0]) + start, int(starts[-1] - starts[0]) + end - start),)
    offset, length = np.array(within, np.int64).T
    starts = (starts[:, None] + offset).ravel()
    order = np.argsort(starts, kind="stable")
    starts = starts[order]
    ends = np.maximum.accumulate(starts + np.resize(length, len(starts))[order])
    gaps = np.flatnonzero(starts[1:] > ends[:-1])
    starts, ends = starts[np.r_[0, gaps + 1]], ends[np.r_[gaps, len(ends) - 1]]
    return tuple(zip(starts.tolist(), (ends - starts).tolist(), strict=True))


def integers_of(tensor: torch.Tensor) -> Sequence[int]:
    """The elements of a tensor of integers, flattened in row-major order.

    Raises:
        UntoldError: see :func:`values_of`; here the number of elements does not matter.
    """
    tensor = _on_host(tensor)
    kind, count = _CTYPES.get(tensor.dtype), tensor.numel()
    plain = tensor.layout is torch.strided and tensor.is_contiguous()
    if kind is None or not plain or count > _FEW_POSITIONS:
        return cast("Sequence[int]", _view(tensor).ravel())
    return cast("list[int]", (kind * count).from_address(tensor.data_ptr())[:]) if count else []


def values_of(tensor: torch.Tensor) -> npt.NDArray[Any]:
    """The elements of a tensor: integers as int64, or booleans; in its shape.

    They are read from memory, not by an operator, which another dispatch mode would see. If they
    are on a device, this waits for them.

    Raises:
        UntoldError: the tensor has more than :data:`MOST` elements, another type or layout, or no
            memory, or a CUDA graph is being recorded.
    """
    if tensor.numel() > MOST:
        raise UntoldError
    return _view(_on_host(tensor))


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_cpu:
        return tensor
    if tensor.is_meta or (tensor.is_cuda and torch.cuda.is_current_stream_capturing()):
        raise UntoldError
    with torch._C._DisableTorchDispatch():
        return tensor.cpu()


def _view(tensor: torch.Tensor) -> npt.NDArray[Any]:
    """A numpy copy of the elements of a tensor in host memory, made without operators."""
    kind = _NUMPY.get(tensor.dtype)
    if kind is None or tensor.layout is not torch.strided:
        raise UntoldError
    if not tensor.numel():
        return np.empty(tuple(tensor.shape), kind)
    steps = [stride * tensor.itemsize for stride in tensor.stride()]
    span = tensor.itemsize + sum(
        step * (size - 1) for step, size in zip(steps, tensor.shape, strict=True)
    )
    memory: Any = (ctypes.c_char * span).from_address(tensor.data_ptr())
    values: npt.NDArray[Any] = np.ndarray(tuple(tensor.shape), kind, memory, 0, steps)
    return values.astype(np.int64) if kind is not np.bool_ else values.copy()
