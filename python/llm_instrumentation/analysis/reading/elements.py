"""The element types of a capture in numpy and torch."""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ..._native import DTYPE_SIZES
from ...errors import InvalidArgumentError, UnsupportedError

if TYPE_CHECKING:
    import torch

# (mantissa bits, exponent bias). Sources: https://arxiv.org/abs/2209.05433, and for "fnuz"
# https://arxiv.org/abs/2206.02915. "fn" types have no infinities; "fnuz" types have no infinities
# and no -0.
_FLOAT8 = {
    "float8_e4m3fn": (3, 7),
    "float8_e5m2": (2, 15),
    "float8_e4m3fnuz": (3, 8),
    "float8_e5m2fnuz": (2, 16),
}

# The types that numpy has too. This looks up no attributes, because numpy 1 warns of `np.bool`.
_OF_NUMPY = {name for name in DTYPE_SIZES if name in np.sctypeDict}


def dtype_name(dtype: Any) -> str:
    """The name of a type in captures.

    Args:
        dtype: a torch dtype, anything that numpy accepts as a dtype, or a name.

    Raises:
        InvalidArgumentError: captures have no such type.
    """
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPE_SIZES:
        try:
            name = np.dtype(dtype).name
        except TypeError:
            name = ""
    if name not in DTYPE_SIZES:
        raise InvalidArgumentError(f"dtype {dtype!r}: choose one of {', '.join(DTYPE_SIZES)}")
    return name


def element_size(name: str) -> int:
    """Bytes of one element of the stored type `name`.

    Raises:
        UnsupportedError: this version does not know the type; a later version wrote it.
    """
    try:
        return DTYPE_SIZES[name]
    except KeyError:
        raise UnsupportedError(
            f"stored as {name!r}, a type that this version does not know: install a newer one"
        ) from None


def torch_dtype(name: str) -> torch.dtype:
    """The torch type of that name.

    Raises:
        UnsupportedError: this release of torch has no such type.
    """
    import torch

    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise UnsupportedError(
            f"torch {torch.__version__} has no {name}: use to_numpy(), or a newer torch"
        )
    return dtype


def numpy_dtype(name: str) -> np.dtype[Any]:
    """The numpy type to convert to.

    Raises:
        InvalidArgumentError: numpy has no such type.
    """
    try:
        return np.dtype(name)
    except TypeError:
        raise InvalidArgumentError(
            f"numpy has no {name}: convert to float32 or complex64, or use to_torch()"
        ) from None


@functools.cache
def storage_dtype(name: str) -> np.dtype[Any]:
    """The numpy type whose elements have the bytes of the stored type `name`."""
    try:
        return np.dtype(name)
    except TypeError:
        return np.dtype(f"uint{8 * element_size(name)}")


def from_storage(stored: npt.NDArray[Any], name: str) -> npt.NDArray[Any]:
    """The values of a flat array of `storage_dtype(name)`.

    bfloat16 and float8 become float32, complex32 becomes complex64: all exactly equal.
    """
    values = stored
    if name == "bfloat16":
        values = (stored.astype(np.uint32) << np.uint32(16)).view(np.float32)
    elif name == "complex32":
        values = stored.view(np.float16).astype(np.float32).view(np.complex64)
    elif name.startswith("float8"):
        values = _float8_values(name)[stored]
    return values


def refuse_view(copy: bool | None, what: str) -> None:
    """Refuses numpy's `copy=False` for values that are decoded on each call.

    Raises:
        InvalidArgumentError: `copy` is False.
    """
    if copy is False:
        raise InvalidArgumentError(f"{what} is decoded anew each time: pass copy=None")


def array_of(
    data: npt.NDArray[np.uint8], start: int, name: str, shape: tuple[int, ...]
) -> npt.NDArray[Any]:
    """Copies the values of an array of the stored type `name` out of `data`, from `start` on."""
    stored = np.ndarray(shape, storage_dtype(name), data, start).copy()
    return stored if name in _OF_NUMPY else from_storage(stored.reshape(-1), name).reshape(shape)


def tensor_of(
    data: npt.NDArray[np.uint8], start: int, name: str, shape: tuple[int, ...]
) -> torch.Tensor:
    """Like `array_of`, as a tensor of the stored type."""
    import torch

    dtype = torch_dtype(name)
    if 0 in shape:
        return torch.empty(shape, dtype=dtype, device="cpu")
    if name in _OF_NUMPY:
        return torch.from_numpy(np.ndarray(shape, name, data, start).copy())
    size = math.prod(shape) * element_size(name)
    return torch.from_numpy(data[start : start + size].copy()).view(dtype).reshape(shape)


@functools.cache
def _float8_values(name: str) -> npt.NDArray[np.float32]:
    """The 256 values of a float8 type, indexed by their bits."""
    bits = np.arange(256)
    if name == "float8_e8m0fnu":  # powers of two, from the OCP Microscaling specification
        values = np.ldexp(1.0, bits - 127)
        values[0xFF] = np.nan
        return np.asarray(values, np.float32)
    mantissa_bits, bias = _FLOAT8[name]
    exponent = (bits & 0x7F) >> mantissa_bits
    fraction = (bits & ((1 << mantissa_bits) - 1)) / (1 << mantissa_bits)
    normal = exponent > 0
    magnitude = np.ldexp(fraction + normal, np.maximum(exponent, 1) - bias)
    if name.endswith("fn"):
        magnitude[[0x7F, 0xFF]] = np.nan
    elif name == "float8_e5m2":  # as in IEEE 754, the largest exponent is for infinities and NaN
        magnitude[exponent == 31] = np.where(fraction[exponent == 31] > 0, np.nan, np.inf)
    values = np.copysign(magnitude, np.where(bits & 0x80, -1.0, 1.0))
    if name.endswith("fnuz"):
        values[0x80] = np.nan
    return np.asarray(values, np.float32)
