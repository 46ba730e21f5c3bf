"""Finds what a model was given: the tokens, masks and positions among a call's arguments."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

__all__ = ["Given", "Text", "given_to", "named_arguments", "new_tokens"]

# The names of arguments with text. An encoder-decoder model has the cache in its decoder, so the
# decoder's text counts.
_TEXT = ("input_ids", "inputs_embeds")
_DECODER_TEXT = ("decoder_input_ids", "decoder_inputs_embeds")
# Arguments that a Text holds, if they have one or two dimensions.
_OF_TEXT = frozenset(
    prefix + name
    for prefix in ("", "decoder_")
    for name in ("input_ids", "attention_mask", "position_ids", "token_type_ids")
)
_INTEGERS = frozenset({torch.int64, torch.int32, torch.int16, torch.uint8, torch.int8})

_parameters: weakref.WeakKeyDictionary[nn.Module, tuple[str, ...]] = weakref.WeakKeyDictionary()


class Text(NamedTuple):
    """The text that a call got.

    Attributes:
        tokens: token ids, int [rows, length]; None: the model got embeddings.
        rows: sequences in the batch.
        length: tokens of each row in this call, with padding.
        mask: nonzero where a token counts, [rows, columns]. It has a column for each token of this
            call, and perhaps for the tokens in the cache before them. None: all tokens count, or
            the mask has another form.
        positions: the given position ids, int [rows, length]; None: the model makes them.
        types: token type ids, int [rows, length], or None.
    """

    tokens: Tensor | None
    rows: int
    length: int
    mask: Tensor | None
    positions: Tensor | None
    types: Tensor | None


class Given(NamedTuple):
    """What an outermost call got.

    Attributes:
        rows: sequences in the batch.
        text: its text; for an encoder-decoder model the encoder's. None: no text.
        decoder: the text of the decoder of an encoder-decoder model, or None.
        others: shape and type of the other tensors, by the names of their arguments. A dimension of
            unequal lengths, as nested tensors have, is a text.
    """

    rows: int
    text: Text | None
    decoder: Text | None
    others: dict[str, tuple[tuple[int | str, ...], torch.dtype]]


def given_to(
    module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, packed: bool = False
) -> Given:
    """Reads the arguments of a call. It copies nothing.

    Args:
        module: the module that is called.
        args: its arguments.
        kwargs: its keyword arguments.
        packed: it is a packed batch. So embeddings may have two dimensions, [tokens, width], and
            position ids may be named ``positions``, as engines do.
    """
    named = named_arguments(module, args, kwargs)
    embeds = named.get("inputs_embeds")
    if packed and isinstance(embeds, Tensor) and embeds.dim() == 2:
        named["inputs_embeds"] = embeds[None]
    if packed and "positions" in named:
        named.setdefault("position_ids", named.pop("positions"))
    text, used = _text(named, ""), ""
    if text is None and "input_ids" not in named and "inputs_embeds" not in named:
        # A model that is not of transformers: its first argument may be the token ids.
        used = next(iter(_parameters_of(module)), "")
        text = _text({**named, "input_ids": args[0] if args else named.get(used)}, "")
    decoder = _text(named, "decoder_")
    held = frozenset() if text is None and decoder is None else _OF_TEXT
    others = {
        name: (_shape(value), value.dtype)
        for name, value in named.items()
        if isinstance(value, Tensor)
        and (name not in held or value.dim() > 2)
        and (text is None or name != used)
    }
    if text is not None:
        rows = text.rows
    elif decoder is not None:
        rows = decoder.rows
    else:
        shape = next((shape for shape, _ in others.values() if shape), ())
        rows = shape[0] if len(shape) > 1 and isinstance(shape[0], int) else 1
    return Given(rows, text, decoder, others)


def _shape(tensor: Tensor) -> tuple[int | str, ...]:
    return tuple(n if isinstance(n, int) else str(n) for n in tensor.shape)


def named_arguments(
    module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """The arguments of a module's call by name. Further positional ones are left out."""
    named = dict(zip(_parameters_of(module), args, strict=False)) if args else {}
    named.update(kwargs)
    return named


def _text(named: Mapping[str, Any], side: str) -> Text | None:
    ids, embeds = named.get(f"{side}input_ids"), named.get(f"{side}inputs_embeds")
    if isinstance(ids, Tensor) and ids.dtype in _INTEGERS and ids.dim() in (1, 2):
        ids = ids if ids.dim() == 2 else ids[None]
        rows, length = ids.shape
    elif isinstance(embeds, Tensor) and embeds.dim() == 3:
        ids, (rows, length) = None, embeds.shape[:2]
    else:
        return None
    mask = _of_rows(named.get(f"{side}attention_mask"), rows)
    if mask is not None and mask.shape[1] < length:
        mask = None
    positions = _of_tokens(named.get(f"{side}position_ids"), rows, length)
    types = _of_tokens(named.get(f"{side}token_type_ids"), rows, length)
    return Text(ids, rows, length, mask, positions, types)


def _of_tokens(value: Any, rows: int, length: int) -> Tensor | None:
    """Integers of [rows, length]. None: it has another form."""
    given = _of_rows(value, rows)
    if given is None or given.shape[1] != length or given.dtype not in _INTEGERS:
        return None
    return given


def _of_rows(value: Any, rows: int) -> Tensor | None:
    """A tensor of [rows, columns]; one row stands for all. None: it has another form."""
    if not isinstance(value, Tensor):
        return None
    given: Tensor = value[None] if value.dim() == 1 else value
    if given.dim() != 2 or given.shape[0] not in (1, rows):
        return None
    return given if given.shape[0] == rows else given.expand(rows, -1)


def new_tokens(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int | None:
    """The number of positions that a call adds to each sequence; None if the call has no text.

    For an encoder-decoder model these are positions of the decoder. A call without the decoder's
    text makes it from ``labels``; without ``labels`` some models make it from the encoder's text.
    For a model that is not of transformers, the shape of the first argument counts.
    """
    given = named_arguments(model, args, kwargs)
    made_of = ("labels",) if _has_decoder(model) else ()
    for name in (*_DECODER_TEXT, *made_of, *_TEXT):
        if _is_text(given.get(name)):
            return int(given[name].shape[1])
    if hasattr(model, "main_input_name"):
        return None  # a model of images or sound, for example
    return int(args[0].shape[1]) if args and _is_text(args[0]) else None


def _parameters_of(module: nn.Module) -> tuple[str, ...]:
    """The names of a module's positional arguments."""
    names = _parameters.get(module)
    if names is None:
        by_position = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        original = getattr(module, "_orig_mod", module)  # of a compiled module
        try:
            parameters = inspect.signature(original.forward).parameters.values()
        except (TypeError, ValueError):  # a function in C
            names = ()
        else:
            names = tuple(one.name for one in parameters if one.kind in by_position)
        _parameters[module] = names
    return names


def _has_decoder(model: nn.Module) -> bool:
    return bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))


def _is_text(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() > 1
