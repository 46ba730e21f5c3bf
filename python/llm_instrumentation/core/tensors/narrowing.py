"""Converts float32 tensors to float16 on their device, so that half the bytes are transferred.

For a tensor in host memory the library converts float32 to float16 while it copies. A large tensor
on a GPU is converted there, before the transfer, and the library gets the measured error
(``strap_conversion`` in strap.h). Without an error bound the stored values are the same, and the
sums of squares agree to 0.02 %.

When it pays, calculated and not measured: a transfer that narrows starts about 20 kernels and
copies. At 5 to 10 us each they take 100 to 200 us of the model's thread. Half the bytes of a tensor
of `NARROW_BYTES` take 340 us on a link of 25 GB/s (PCIe 4.0 x16) and 170 us at 50 GB/s (5.0). Below
that size the launches cost as much as the link saves.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..._native import Conversion
from .enqueue import PLAIN

__all__ = ["NARROW_BYTES", "conversion_of", "holds", "narrow", "worth_narrowing"]

#: The smallest size of a float32 tensor that is converted on its device, in bytes.
NARROW_BYTES = 16 * 2**20

_ROW = 1024  # number of squares that are added in float32
# The largest relative loss of a sum of _ROW squares in float32. Each addition rounds by half a unit
# in the last place, in any order, and the norm rounds too. Each square may also lose _LEAST, the
# smallest number of float32.
_SHARE_LOST = 2.0**-13
_LEAST = 2.0**-149

_norm = torch.linalg.vector_norm


def worth_narrowing(tensor: Tensor) -> bool:
    """Whether to convert a tensor on its device: True for a plain, large float32 tensor."""
    return (
        tensor.dtype is torch.float32
        and tensor.nbytes >= NARROW_BYTES
        and type(tensor) in PLAIN
        and not tensor.is_neg()
    )


def narrow(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """Converts float32 to float16 and measures the loss, without waiting for the device.

    Rounding is to nearest, ties to even. A value of 65,520 or more becomes infinite. A NaN stays a
    NaN; the device decides its bits.

    Besides its results it takes 4 bytes for each element on the device, 8 if the tensor is not
    contiguous. Squares are added in float32 over 1,024 values, and then in float64.

    Args:
        tensor: float32, any shape, on any device.

    Returns:
        The float16 tensor, contiguous, of the same shape, and a float64 tensor of four numbers
        for `holds` and `conversion_of`: the number of values that are not finite, the norm of the
        error, the norm of the finite values, the largest error. If a finite value became infinite,
        the largest error and the norm of the error are infinite.
    """
    flat = tensor.detach().contiguous().view(-1)
    half, n = flat.to(torch.float16), flat.numel()
    # One work tensor of the source's size, rounded up to whole rows, for all steps below.
    rows = flat.new_empty(max(1, -(-n // _ROW)), _ROW)
    work, rest = rows.view(-1)[:n], rows.view(-1)[n:]
    if rest.numel() > 0:
        rest.zero_()
    # Exact in float32. NaN if the value is not finite, infinite if only the float16 value is.
    torch.sub(flat, half, out=work)
    work.nan_to_num_(nan=0.0, posinf=math.inf, neginf=-math.inf)
    error, largest = _norm(rows, dim=-1), _norm(rows, math.inf, dim=-1)
    torch.nan_to_num(flat, nan=0.0, posinf=0.0, neginf=0.0, out=work)
    finite = _norm(rows, dim=-1)
    torch.mul(flat, 0.0, out=work)  # NaN if the value is not finite, otherwise 0
    others = _norm(rows, 0, dim=-1)  # counts the values that are not zero, so the NaNs
    return half.view(tensor.shape), torch.stack(
        [
            others.sum(dtype=torch.float64),
            _norm(error, dtype=torch.float64),
            _norm(finite, dtype=torch.float64),
            _norm(largest, math.inf, dtype=torch.float64),
        ]
    )


def holds(numbers: Tensor, bound: float = math.inf) -> bool:
    """Whether float16 can hold all finite values, judged by `narrow`'s numbers on the host.

    Args:
        bound: largest normalised squared error.
    """
    _, error, finite, largest = numbers.tolist()
    if error**2 * (1 + 2 * _SHARE_LOST) > bound * finite**2:
        return False
    return math.isfinite(largest)


def conversion_of(numbers: Tensor, elements: int) -> Conversion:
    """The report for the library, from `narrow`'s numbers on the host, if `holds` is True.

    The squared error is never below the true one, and less than 0.02 % above. The squares of the
    values are within 0.01 % of the true ones, above or below. If float32 has no room for the
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
