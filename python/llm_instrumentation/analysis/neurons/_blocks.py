"""The vectors of a layer in blocks, so that a capture may be larger than memory."""

from __future__ import annotations

import math
import numbers
import operator
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from ...errors import InvalidArgumentError
from ..reader import ActivationReader
from ..reading.selection import Selector
from ..rows import NoCallsError, Rows

__all__ = ["as_vectors", "at_least", "rows_of_layer", "vector_blocks", "width_of"]

Vectors = npt.NDArray[np.float64]

_BLOCK_BYTES = 16 << 20  # of vectors in float64 that are in memory at a time


def rows_of_layer(
    reader: ActivationReader,
    layer: str,
    *,
    steps: Selector,
    without_tokens: Iterable[int],
    without_calls: bool,
) -> Rows:
    """The rows of a layer, in the order of capture, without padding.

    Raises:
        NoCallsError: the capture does not have what the model was given.
        InvalidArgumentError: the layer has complex values, or no rows.
        UnknownActivationError, NotTokenAlignedError: see `ActivationReader.rows`.
    """
    if without_calls and (without_tokens := tuple(without_tokens)):
        raise InvalidArgumentError("without_tokens needs the calls, which have the ids of tokens")
    try:
        rows = reader.rows(
            layer, steps=steps, without_tokens=without_tokens, without_calls=without_calls
        )
    except NoCallsError as error:
        raise NoCallsError(
            f"{reader.path} does not have what the model was given, so the tokens of {layer!r} are "
            "unknown: capture the model again with the calls, or pass without_calls=True, which "
            f"knows places in the tensors but no token ids. {error}"
        ) from error
    if rows.dtype.startswith("complex"):
        raise InvalidArgumentError(
            f"{layer!r} has complex values, which have no order: choose a layer of real ones"
        )
    if not len(rows):
        raise InvalidArgumentError(f"{layer!r} has no rows: each token is padding or left out")
    return rows


def width_of(rows: Rows) -> int:
    """The values of a vector. The vectors of heads are joined."""
    return math.prod(rows.shape)


def vector_blocks(rows: Rows, told: Callable[[int], Any]) -> Iterator[tuple[int, Vectors]]:
    """The vectors of rows, some rows after the others, of 16 MiB each.

    Args:
        rows: the rows.
        told: called with the number of rows that are done.

    Yields:
        the place of the first row, and the vectors [rows, width] in float64.

    Raises:
        CorruptError: bytes of the capture differ from the written ones.
    """
    width = width_of(rows)
    size = max(1, _BLOCK_BYTES // (8 * max(1, width)))
    for first in range(0, len(rows), size):
        some = rows[first : first + size]
        yield first, some.to_numpy().reshape(len(some), width).astype(np.float64)
        told(first + len(some))


def as_vectors(given: Any, width: int, what: str) -> Vectors:
    """Vectors that a caller gave, as float64 [vectors, width].

    Args:
        given: a vector or several: tensors, arrays or lists. Those of heads are joined.
        width: the values of a vector.
        what: the name of the argument, for messages.

    Raises:
        InvalidArgumentError: another width, no numbers, or NaN or infinite values.
    """
    if hasattr(given, "detach"):  # a tensor, maybe of bfloat16 and on a GPU
        given = given.detach().cpu().double().numpy()
    try:
        found = np.asarray(given, np.float64)
    except (TypeError, ValueError) as error:
        raise InvalidArgumentError(f"{what}: give a vector of real numbers. {error}") from error
    shape = list(found.shape)
    if found.ndim and found.size == width:
        found = found.reshape(1, width)
    if found.ndim < 2 or not len(found) or math.prod(found.shape[1:]) != width:
        raise InvalidArgumentError(
            f"{what} has the shape {shape}, and the vectors of the layer have {width} values"
        )
    if not np.isfinite(found).all():
        raise InvalidArgumentError(f"{what} has NaN or infinite values")
    return found.reshape(len(found), width)


def at_least(name: str, value: Any, least: int) -> int:
    """
    Raises:
        InvalidArgumentError: the value is no integer, or below the least one.
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < least:
        raise InvalidArgumentError(f"{name} = {value!r}: give an integer from {least} on")
    return operator.index(value)
