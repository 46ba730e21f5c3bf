"""The key and value tensors of a model call, and the length of its context."""

from __future__ import annotations

import ctypes
import functools
import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

__all__ = ["cached_tokens", "caches_of_call", "caches_of_output", "new_tokens", "tensors_of"]

# The names under which models of transformers take and give their caches.
_NAMES = ("past_key_values", "past_key_value", "cache_params", "past")
# Under these they take their text. The cache of an encoder-decoder model is its decoder's.
_TEXT = ("input_ids", "inputs_embeds")
_DECODER_TEXT = ("decoder_input_ids", "decoder_inputs_embeds")
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


def new_tokens(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int | None:
    """How many positions a call adds for each sequence; None where it takes no text.

    Of an encoder-decoder model these are the decoder's. From ``labels`` it makes its decoder's text
    where none is given; without either some make it of the encoder's. Of a model that is not of
    transformers the first tensor counts.
    """
    given = dict(zip(_arguments_of(model), args, strict=False)) if args else {}
    given.update(kwargs)
    made_of = ("labels",) if _has_decoder(model) else ()
    for name in (*_DECODER_TEXT, *made_of, *_TEXT):
        if _is_text(given.get(name)):
            return int(given[name].shape[1])
    if hasattr(model, "main_input_name"):
        return None  # pictures or sound, say
    return int(args[0].shape[1]) if args and _is_text(args[0]) else None


def _arguments_of(model: nn.Module) -> list[str]:
    """The names of what a model takes by position."""
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
