"""The key and value tensors of a model call, and the length of its context."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterator, Mapping
from typing import Any

import torch

__all__ = ["cached_tokens", "caches_of_call", "caches_of_output", "new_tokens", "tensors_of"]

# The names under which models of transformers take and give their caches.
_NAMES = ("past_key_values", "past_key_value", "cache_params", "past")
_INPUTS = ("input_ids", "inputs_embeds", "decoder_input_ids", "decoder_inputs_embeds")
_DEPTH = 6


def caches_of_call(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
    """The caches that a call of the model gets."""
    named = [kwargs.get(name) for name in _NAMES]
    return [one for one in (*named, *args) if one is not None and _is_cache(one)]


def caches_of_output(output: Any) -> list[Any]:
    """The caches that a call gives back."""
    if isinstance(output, Mapping):  # ModelOutput is one
        found = [output.get(name) for name in _NAMES]
    elif isinstance(output, tuple):
        found = list(output)
    else:
        found = [getattr(output, name, None) for name in _NAMES]
    return [one for one in found if one is not None and _is_cache(one)]


def _is_cache(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return False
    if isinstance(value, (tuple, list)):  # before Cache classes: a pair of tensors a layer
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
    """The tensors that a cache holds, with a name each that stays from call to call.

    Counters and masks, tensors of fewer than two dimensions, are left out.
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


def cached_tokens(cache: Any) -> int | None:
    """How many tokens a cache holds; None where it does not say, or says it on a device."""
    if isinstance(cache, (tuple, list)):
        first = cache[0][0]
        return int(first.shape[-2]) if first is not None and first.dim() > 1 else None
    ask = getattr(cache, "get_seq_length", None)
    if ask is None:
        return None
    try:
        length = ask()
    except (AttributeError, IndexError, NotImplementedError, TypeError, ValueError):
        return None  # a cache of another sort: convolution states, say
    if isinstance(length, torch.Tensor):
        if length.device.type != "cpu" or length.dtype is not torch.int64:
            return None
        return ctypes.c_int64.from_address(length.data_ptr()).value
    return int(length)


def new_tokens(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int | None:
    """How many positions a call adds for each sequence; None where it takes none."""
    for name in _INPUTS:
        if isinstance(kwargs.get(name), torch.Tensor):
            return int(kwargs[name].shape[1]) if kwargs[name].dim() > 1 else None
    for value in args[:1]:
        if isinstance(value, torch.Tensor) and value.dim() > 1:
            return int(value.shape[1])
    return None
