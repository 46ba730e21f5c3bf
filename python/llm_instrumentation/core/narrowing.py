"""Float16 of float32 tensors, made on the device that has them: half the bytes leave it.

The library makes float16 of float32 while it copies a tensor that is in host memory already. A
large tensor on a GPU is converted there instead, before the copy; the library is told what that
lost (``strap_conversion`` in strap.h). Without an error bound the stored values are the same, and
the sums of squares agree to 0.02 %.

When it pays, by arithmetic and not by a measurement: a transfer that narrows starts about 20
kernels and copies. At 5 to 10 us each that takes the model's thread 100 to 200 us. Half the bytes
of a tensor of `NARROW_BYTES` take 340 us of a link of 25 GB/s (PCIe 4.0 x16) and 170 us at 50 GB/s
(5.0). Below that size the launches cost what the link saves.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .._native import Conversion
from .tensors import PLAIN

__all__ = ["NARROW_BYTES", "conversion_of", "holds", "narrow", "worth_narrowing"]

#: The least bytes of a float32 tensor that is converted on its device.
NARROW_BYTES = 16 * 2**20

_ROW = 1024  # values of which float32 may add up the squares
# What their sum may lose: as many roundings by half a unit in the last place, whatever the order,
# and those of the norm; and of each square the smallest number that float32 has.
_SHARE_LOST = 2.0**-13
_LEAST = 2.0**-149

_norm = torch.linalg.vector_norm


def worth_narrowing(tensor: Tensor) -> bool:
    """Whether to convert a tensor where it is: a plain, large one of float32."""
    return (
        tensor.dtype is torch.float32
        and tensor.nbytes >= NARROW_BYTES
        and type(tensor) in PLAIN
        and not tensor.is_neg()
    )


def narrow(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """Float16 of float32, and what is lost, with no wait for the device.

    Rounding is to nearest, ties to even. A value of 65,520 or more becomes infinite, a NaN stays
    one (of which bits, the device decides).

    Beside what it returns it takes 4 bytes an element on the device, 8 where the tensor is not
    contiguous. Squares are added up in float32 over 1,024 values, and then in float64.

    Args:
        tensor: float32, any shape, on any device.

    Returns:
        The float16 tensor, contiguous, of the same shape, and a float64 tensor of four numbers
        for `holds` and `conversion_of`: how many values are not finite, the norm of the error,
        the norm of the finite values, the largest error. Where a finite value became infinite
        the largest error is infinite, and the norm of the error.
    """
    flat = tensor.detach().contiguous().view(-1)
    half, n = flat.to(torch.float16), flat.numel()
    # One tensor for all that is of the size of the source, in whole rows.
    rows = flat.new_empty(max(1, -(-n // _ROW)), _ROW)
    work, rest = rows.view(-1)[:n], rows.view(-1)[n:]
    if rest.numel() > 0:
        rest.zero_()
    # Exact in float32. NaN where the value is not finite, infinite where only float16's is not.
    torch.sub(flat, half, out=work)
    work.nan_to_num_(nan=0.0, posinf=math.inf, neginf=-math.inf)
    error, largest = _norm(rows, dim=-1), _norm(rows, math.inf, dim=-1)
    torch.nan_to_num(flat, nan=0.0, posinf=0.0, neginf=0.0, out=work)
    finite = _norm(rows, dim=-1)
    torch.mul(flat, 0.0, out=work)  # NaN where the value is not finite
    others = _norm(rows, 0, dim=-1)  # how many are not zero; NaN is not
    return half.view(tensor.shape), torch.stack(
        [
            others.sum(dtype=torch.float64),
            _norm(error, dtype=torch.float64),
            _norm(finite, dtype=torch.float64),
            _norm(largest, math.inf, dtype=torch.float64),
        ]
    )


def holds(numbers: Tensor, bound: float | None = None) -> bool:
    """Whether float16 holds all finite values, by `narrow`'s numbers on the host.

    Args:
        bound: of the normalised squared error, which has to be within it; None: there is none.
    """
    _, error, finite, largest = numbers.tolist()
    if bound is not None and error**2 * (1 + 2 * _SHARE_LOST) > bound * finite**2:
        return False
    return math.isfinite(largest)


def conversion_of(numbers: Tensor, elements: int) -> Conversion:
    """What the library is told, by `narrow`'s numbers on the host, of a tensor that `holds`.

    The squared error is never below the true one, and less than 0.02 % above. The squares of the
    values are within 0.01 % of the true ones, above or below. Where float32 has no room for the
    squares, the squared error is at most that of all values with the largest error, and the squares
    of the values may be lost.
    """
    others, error, finite, largest = numbers.tolist()
    values = elements - int(others)
    squares = error * error * (1 + _SHARE_LOST) + elements * _LEAST
    return Conversion(
        values=values,
        square_error=min(squares, values * largest**2),
        square_sum=finite * finite,
        max_error=largest,
    )
