"""Finds the key and value tensors of a model's call, and the length of its context."""

from __future__ import annotations

import ctypes
import functools
import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

__all__ = ["cached_tokens", "caches_of_call", "caches_of_output", "new_tokens", "tensors_of"]

# The names of cache arguments and results in models of transformers, which since 5.24 all say
# "cache". Values are looked for by their names, not names by `get`: a ModelOutput answers to the
# old names too, with a warning.
_NAMES = frozenset({"cache", "past_key_values", "past_key_value", "cache_params", "past"})
# The names of arguments with text. An encoder-decoder model has the cache in its decoder, so the
# decoder's text counts.
_TEXT = ("input_ids", "inputs_embeds")
_DECODER_TEXT = ("decoder_input_ids", "decoder_inputs_embeds")
_DEPTH = 6


def caches_of_call(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
    """The caches among the arguments of a call."""
    named = [value for name, value in kwargs.items() if name in _NAMES]
    return [one for one in (*named, *args) if one is not None and _is_cache(one)]


def caches_of_output(output: Any) -> list[Any]:
    """The caches among the results of a call."""
    if isinstance(output, Mapping):  # ModelOutput is one
        found = [value for name, value in output.items() if name in _NAMES]
    elif isinstance(output, tuple):
        found = list(output)
    else:
        found = [getattr(output, name, None) for name in _NAMES]
    return [one for one in found if one is not None and _is_cache(one)]


def _is_cache(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return False
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


def cached_tokens(cache: Any) -> int | None:
    """The number of tokens in a cache; None if it does not say, or the number is on a device."""
    if isinstance(cache, (tuple, list)):
        first = cache[0][0]
        return int(first.shape[-2]) if first is not None and first.dim() > 1 else None
    ask = getattr(cache, "get_seq_length", None)
    if ask is None:
        return None
    try:
        length = ask()
    except (AttributeError, IndexError, NotImplementedError, TypeError, ValueError):
        return None  # a cache of another sort, as of convolution states
    if isinstance(length, torch.Tensor):
        if length.device.type != "cpu" or length.dtype is not torch.int64:
            return None
        return ctypes.c_int64.from_address(length.data_ptr()).value
    return int(length)


def new_tokens(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int | None:
    """The number of positions that a call adds to each sequence; None if the call has no text.

    For an encoder-decoder model these are positions of the decoder. A call without the decoder's
    text makes it from ``labels``; without ``labels`` some models make it from the encoder's text.
    For a model that is not of transformers, the shape of the first argument counts.
    """
    given = dict(zip(_arguments_of(model), args, strict=False)) if args else {}
    given.update(kwargs)
    made_of = ("labels",) if _has_decoder(model) else ()
    for name in (*_DECODER_TEXT, *made_of, *_TEXT):
        if _is_text(given.get(name)):
            return int(given[name].shape[1])
    if hasattr(model, "main_input_name"):
        return None  # a model of images or sound, for example
    return int(args[0].shape[1]) if args and _is_text(args[0]) else None


def _arguments_of(model: nn.Module) -> list[str]:
    """The names of a model's positional arguments."""
    by_position = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    try:
        parameters = inspect.signature(model.forward).parameters.values()
    except (TypeError, ValueError):  # a function in C
        return []
    return [one.name for one in parameters if one.kind in by_position]


def _has_decoder(model: nn.Module) -> bool:
    return bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))


def _is_text(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 1
