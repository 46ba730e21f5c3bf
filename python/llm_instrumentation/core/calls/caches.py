"""Finds the caches of a model's call, their tensors, and the number of tokens in them."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterator, Mapping
from typing import Any

import torch

__all__ = [
    "cached_tokens",
    "cached_tokens_of_call",
    "caches_of_call",
    "caches_of_output",
    "tensors_of",
]

# The names of cache arguments and results in models of transformers, which since 5.24 all say
# "cache". Values are looked for by their names, not names by `get`: a ModelOutput answers to the
# old names too, with a warning.
_NAMES = frozenset(
    {
        "cache", "past_key_values", "past_key_value", "cache_params", "past", "state",
    }
)  # fmt: skip
_DEPTH = 6


def caches_of_call(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
    """The caches among the arguments of a call."""
    named = [value for name, value in kwargs.items() if name in _NAMES and _is_cache(value, True)]
    return named + [one for one in args if _is_cache(one)]


def caches_of_output(output: Any) -> list[Any]:
    """The caches among the results of a call."""
    if isinstance(output, tuple) and not isinstance(output, Mapping):
        return [one for one in output if _is_cache(one)]
    if isinstance(output, Mapping):  # ModelOutput is one
        found = [value for name, value in output.items() if name in _NAMES]
    else:
        found = [getattr(output, name, None) for name in _NAMES]
    return [one for one in found if _is_cache(one, True)]


def _is_cache(value: Any, named: bool = False) -> bool:
    """Whether a value is a cache. One with the name of a cache may be a list of tensors too."""
    if value is None or isinstance(value, torch.Tensor):
        return False
    if isinstance(value, list) and all(isinstance(one, torch.Tensor) for one in value):
        return named and len(value) > 1  # as RWKV has it
    if isinstance(value, (tuple, list)):  # older releases: a pair for each layer
        return bool(value) and all(
            isinstance(layer, (tuple, list))
            and len(layer) >= 2
            and all(one is None or isinstance(one, torch.Tensor) for one in layer)
            for layer in value
        )
    return _holds_tensors(type(value))  # type: ignore[arg-type]


@functools.cache
def _holds_tensors(kind: type) -> bool:
    """Whether objects of a class are caches of transformers, or layers of them."""
    return any(base.__name__.endswith(("Cache", "CacheLayerMixin")) for base in kind.__mro__)


def tensors_of(cache: Any, name: str = "", depth: int = _DEPTH) -> Iterator[tuple[str, Any]]:
    """Yields (name, tensor) for the tensors of a cache. A name is the same in each call.

    Tensors of fewer than two dimensions are left out: they are counters and masks.
    """
    if isinstance(cache, torch.Tensor):
        if cache.dim() >= 2:
            yield name, cache
        return
    if depth == 0:
        return
    inside: Any = ()
    if isinstance(cache, Mapping):
        inside = cache.items()
    elif isinstance(cache, (list, tuple)):
        inside = enumerate(cache)
    elif _holds_tensors(type(cache)):  # type: ignore[arg-type]
        inside = vars(cache).items()
    for key, value in list(inside):
        if not isinstance(value, (int, str, type(None))):
            yield from tensors_of(value, f"{name}.{key}" if name else str(key), depth - 1)


def cached_tokens_of_call(
    args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> int | torch.Tensor | None:
    """The number of tokens in the first cache among a call's arguments, as of `cached_tokens`."""
    caches = caches_of_call(args, kwargs)
    if not caches or not any(tensor.numel() for _, tensor in tensors_of(caches[0])):
        return 0
    return cached_tokens(caches[0])


def cached_tokens(cache: Any) -> int | torch.Tensor | None:
    """The number of tokens in a cache: a tensor if it is on a device; None if it does not say."""
    if isinstance(cache, (tuple, list)):
        first = cache[0][0]
        # States of recurrent networks look alike, but have fewer dimensions than keys.
        return int(first.shape[-2]) if first is not None and first.dim() == 4 else None
    ask = getattr(cache, "get_seq_length", None)
    if ask is None:
        return None
    try:
        length = ask()
    except (AttributeError, IndexError, NotImplementedError, TypeError, ValueError):
        return None  # a cache of another sort, as of convolution states
    if isinstance(length, torch.Tensor):
        if length.device.type != "cpu" or length.dtype is not torch.int64:
            return length if length.numel() == 1 and not length.is_floating_point() else None
        return ctypes.c_int64.from_address(length.data_ptr()).value
    return int(length)
