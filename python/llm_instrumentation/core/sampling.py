"""Reproducible samples of a tensor's elements, for `HookGranularity.SAMPLED_SLICES`.

A sample is stratified: the row-major positions 0 to numel - 1 are cut into
k = max(1, round(rate * numel)) strata of nearly equal length, and one position is drawn from
each. So a sample is spread evenly over the tensor, sorted and without repeats, and a rate of 1.0
gives every position. The positions depend on numel, rate and seed alone, on every machine. A reader
computes them from the JSON object that the index stores for each packet:

    k      = max(1, round(rate * numel))    product in float64, rounded half to even
    low_i  = floor(i * numel / k)           exact integers, i = 0 ... k - 1
    size_i = low_{i+1} - low_i
    z      = (seed + (i + 1) * 0x9E3779B97F4A7C15) mod 2^64
    z      = ((z xor (z >> 30)) * 0xBF58476D1CE4E5B9) mod 2^64
    z      = ((z xor (z >> 27)) * 0x94D049BB133111EB) mod 2^64
    position_i = low_i + ((z xor (z >> 31)) mod size_i)

The middle lines are the generator SplitMix64 started at `seed` (Steele, Lea and Flood, "Fast
splittable pseudorandom number generators", OOPSLA 2014). A tensor without elements has an
empty sample.
"""

from __future__ import annotations

import json
import math
import threading
from collections import OrderedDict
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from .._json import load_json
from ..memory.cuda_manager import on_cuda

if TYPE_CHECKING:
    import torch

__all__ = [
    "TRANSFORM",
    "parameters_json",
    "positions_from_parameters",
    "sample_positions",
    "sample_tensor",
]

TRANSFORM = "sample"
"""Name of this transform in the index of a stream."""

_CACHE_BYTES = 64 << 20
_MAX_SEED = 2**53 - 1

Positions = npt.NDArray[np.int64]


def sample_positions(numel: int, rate: float, seed: int = 0) -> Positions:
    """The sampled row-major positions among `numel` elements, sorted.

    Args:
        numel: number of elements, 0 or more.
        rate: share of the elements to keep, 0 < rate <= 1.
        seed: 0 to 2^53 - 1.

    Returns:
        int64, shape (max(1, round(rate * numel)),), or (0,) if numel is 0. The array is shared and
        read-only.

    Raises:
        ValueError: an argument is out of its range.
    """
    return _cache.positions(_checked(numel, rate, seed))


def sample_tensor(tensor: torch.Tensor, rate: float, seed: int = 0) -> torch.Tensor:
    """The sampled elements of `tensor` in row-major order: 1-D, same dtype and device, detached.

    Raises:
        ValueError: rate or seed is out of its range.
    """
    import torch

    index = _cache.index(_checked(tensor.numel(), rate, seed), tensor.device)
    if on_cuda(tensor):
        # The cache may drop the positions while this stream still reads them.
        index.record_stream(torch.cuda.current_stream(tensor.device))
    flat = tensor.detach().reshape(-1)
    if flat.is_floating_point() and flat.itemsize == 1:  # not all devices select float8
        return flat.view(torch.uint8).index_select(0, index).view(flat.dtype)
    return flat.index_select(0, index)


def parameters_json(source_shape: Sequence[int], rate: float, seed: int = 0) -> str:
    """The parameters of the transform for the index, as JSON: {"rate", "seed", "source_shape"}."""
    return _parameters_json(tuple(source_shape), float(rate), int(seed))


@lru_cache(maxsize=1024)
def _parameters_json(source_shape: tuple[int, ...], rate: float, seed: int) -> str:
    _checked(math.prod(source_shape), rate, seed)
    return json.dumps({"rate": rate, "seed": seed, "source_shape": source_shape})


def positions_from_parameters(parameters: str) -> tuple[Positions, tuple[int, ...]]:
    """The inverse of `parameters_json`: the positions of the elements of a sampled packet.

    Returns:
        the positions as from `sample_positions`, and the shape of the source. To put the sample at
        its place: `full = np.full(math.prod(shape), np.nan)`, then `full[positions] = payload`.

    Raises:
        ValueError: the text is no JSON object with these fields, or a value is out of its range.
    """
    try:
        fields: Any = load_json(parameters)
        rate, seed, shape = fields["rate"], fields["seed"], fields["source_shape"]
        if not isinstance(shape, list) or not all(_is_int(n) and n >= 0 for n in shape):
            raise ValueError(f"source_shape is {shape!r}")
        return sample_positions(math.prod(shape), rate, seed), tuple(shape)
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"not the parameters of a sample: {parameters!r} ({error!r})") from error


# ---- positions ----------------------------------------------------------------

_Key = tuple[int, float, int]


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _checked(numel: int, rate: float, seed: int) -> _Key:
    if not _is_int(numel) or numel < 0:
        raise ValueError(f"numel must be an integer of 0 or more, not {numel!r}")
    if isinstance(rate, bool) or not isinstance(rate, (int, float)) or not 0 < rate <= 1:
        raise ValueError(f"rate must be above 0 and at most 1, not {rate!r}")
    if not _is_int(seed) or not 0 <= seed <= _MAX_SEED:
        raise ValueError(f"seed must be an integer from 0 to {_MAX_SEED}, not {seed!r}")
    return numel, float(rate), seed


def _draw(numel: int, rate: float, seed: int) -> Positions:
    if numel == 0:
        return np.empty(0, np.int64)
    k = max(1, round(rate * numel))
    # Computes floor(i * numel / k) as i * q + floor(i * r / k), because these products fit 64 bits.
    q, r = divmod(numel, k)
    edges = np.arange(k + 1, dtype=np.uint64)
    edges = edges * np.uint64(q) + edges * np.uint64(r) // np.uint64(k)
    z = np.arange(1, k + 1, dtype=np.uint64)  # unsigned array arithmetic wraps modulo 2^64
    z = z * np.uint64(0x9E3779B97F4A7C15) + np.uint64(seed)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z ^= z >> np.uint64(31)
    positions: Positions = (edges[:-1] + z % np.diff(edges)).astype(np.int64)
    return positions


class _PositionCache:
    """Caches the positions used last, as arrays and as index tensors, up to a number of bytes."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._bytes = 0
        self._lock = threading.Lock()
        self._entries: OrderedDict[tuple[_Key, torch.device | None], Any] = OrderedDict()

    def positions(self, key: _Key) -> Positions:
        found: Positions | None = self._get((key, None))
        if found is None:
            found = _draw(*key)
            found.flags.writeable = False
            self._put((key, None), found, found.nbytes)
        return found

    def index(self, key: _Key, device: torch.device) -> torch.Tensor:
        import torch

        found: torch.Tensor | None = self._get((key, device))
        if found is None:
            # Copy the array: torch has no read-only tensors, so it must not share the memory.
            found = torch.tensor(self.positions(key), dtype=torch.int64, device=device)
            self._put((key, device), found, found.nbytes)
        return found

    def _get(self, key: tuple[_Key, torch.device | None]) -> Any:
        with self._lock:
            if key not in self._entries:
                return None
            self._entries.move_to_end(key)
            return self._entries[key][0]

    def _put(self, key: tuple[_Key, torch.device | None], value: Any, nbytes: int) -> None:
        with self._lock:
            if key in self._entries or nbytes > self._max_bytes:
                return
            self._entries[key] = (value, nbytes)
            self._bytes += nbytes
            while self._bytes > self._max_bytes:
                _, (_, freed) = self._entries.popitem(last=False)
                self._bytes -= freed


_cache = _PositionCache(_CACHE_BYTES)
