"""Exchanges rows of a shuffle buffer: ``strap_exchange_rows``."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

from ..errors import InvalidArgumentError
from .library import Error, check, library

if TYPE_CHECKING:  # the package is imported without numpy
    import numpy as np
    import numpy.typing as npt

__all__ = ["exchange_rows"]

Rows: TypeAlias = "npt.NDArray[np.uint8]"


def exchange_rows(
    buffer: Rows, slots: npt.NDArray[np.int64], out: Rows, incoming: Rows | None = None
) -> None:
    """Copies rows of a buffer to ``out``, and puts other rows in their places, in one pass.

    numpy needs two passes for that, and reads each line of memory that it overwrites.

    Args:
        buffer: uint8 [rows, bytes of a row], C-contiguous, as the others.
        slots: int64 [n]: which rows. One that is named again gives the row that came in before.
        out: [n, bytes of a row]: receives them.
        incoming: as ``out``: takes their places; None: the rows stay.

    Raises:
        InvalidArgumentError: an array has another type or shape, or there is no such row.
    """
    width = buffer.shape[1:]
    shapes = {"buffer": (buffer, (len(buffer), *width)), "out": (out, (len(slots), *width))}
    if incoming is not None:
        shapes["incoming"] = incoming, (len(slots), *width)
    for name, (rows, shape) in shapes.items():
        if rows.dtype != "u1" or len(width) != 1 or rows.shape != shape or not _dense(rows):
            raise InvalidArgumentError(
                f"{name}: {rows.dtype} of shape {list(rows.shape)}: give C-contiguous uint8 of "
                f"shape {list(shape) if len(width) == 1 else '[rows, bytes]'}"
            )
    if slots.dtype != "i8" or slots.ndim != 1 or not _dense(slots):
        raise InvalidArgumentError(
            f"slots: {slots.dtype} of shape {list(slots.shape)}: give C-contiguous int64 of shape "
            "[n]"
        )
    error = Error()
    status = library().strap_exchange_rows(
        buffer.ctypes.data,
        len(buffer),
        width[0],
        slots.ctypes.data,
        len(slots),
        out.ctypes.data,
        None if incoming is None else incoming.ctypes.data,
        error,
    )
    check(status, error)


def _dense(values: npt.NDArray[np.generic]) -> bool:
    return values.flags.c_contiguous
