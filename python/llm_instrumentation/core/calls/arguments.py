"""Finds what a model was given: the tokens, masks and positions among a call's arguments."""

from __future__ import annotations

import inspect
import re
import weakref
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .generation import Ended, generates, mask_of_generation
from .masks import Mask, Unread, read_mask

__all__ = ["Given", "Text", "given_to", "is_main_part", "named_arguments", "new_tokens"]

# The names of arguments with text. An encoder-decoder model has the cache in its decoder, so the
# decoder's text counts.
_TEXT = ("input_ids", "inputs_embeds")
# Other arguments that may say which tokens are padding. How is unknown: those of
# torch.nn.Transformer are True for padding, others are True for tokens.
_OTHER_MASK = re.compile(r"(^|_)(padding_mask|pad_mask|key_mask|input_mask|mask)$")
_NO_PADDING_MASK = re.compile(r"special|loss|global|head|label|causal|bool_masked|tgt_|decoder_")
# How many tokens a text has, in a model's own arguments. The rest of a row may be padding.
_LENGTHS = re.compile(r"(^|_)(seq_?)?(lens|lengths)$")
_OTHER_LENGTHS = re.compile(r"target|label|decoder|packed|cu_seq")
# Models that take one id for padding if they are given no mask, and the name that it has in their
# configurations.
_PADDING_ID = {
    "dpr": "pad_token_id", "flaubert": "pad_index", "t5gemma": "pad_token_id", "xlm": "pad_index",
}  # fmt: skip
_DECODER_TEXT = ("decoder_input_ids", "decoder_inputs_embeds")
# Arguments that a Text holds, if they have one or two dimensions.
_OF_TEXT = frozenset(
    prefix + name
    for prefix in ("", "decoder_")
    for name in ("input_ids", "attention_mask", "position_ids", "token_type_ids")
)
# Arguments of models whose ids are not those of a text alone: XLNet's have places to predict among
# them, and a transducer's have blanks.
_NOT_ONLY_TEXT = ("perm_mask", "decoder_cache")
_INTEGERS = frozenset({torch.int64, torch.int32, torch.int16, torch.uint8, torch.int8})

_parameters: weakref.WeakKeyDictionary[nn.Module, tuple[str, ...]] = weakref.WeakKeyDictionary()


class Text(NamedTuple):
    """The text that a call got.

    Attributes:
        tokens: token ids, int [rows, length]; None: the model got embeddings.
        rows: sequences in the batch.
        length: tokens of each row in this call, with padding.
        mask: says which tokens are padding. Unread: one was given, and it is unknown. None: there
            is none, so no token is padding.
        positions: the given position ids, int [rows, length]; None: the model makes them.
        types: token type ids, int [rows, length], or None.
        ended: how many of the last tokens of each row are padding that a generation gives texts
            that have ended, [rows]; None: none.
    """

    tokens: Tensor | None
    rows: int
    length: int
    mask: Mask | Unread | None
    positions: Tensor | None
    types: Tensor | None
    ended: Tensor | None = None


class Given(NamedTuple):
    """What an outermost call got.

    Attributes:
        rows: sequences in the batch.
        text: its text; for an encoder-decoder model the encoder's. None: no text.
        decoder: the text of the decoder of an encoder-decoder model, or None.
        others: shape and type of the other tensors, by the names of their arguments, and of a mask
            that is unread. A dimension of unequal lengths, as nested tensors have, is a text.
        held: tokens in the cache, the decoder's of an encoder-decoder model; None: unknown.
    """

    rows: int
    text: Text | None
    decoder: Text | None
    others: dict[str, tuple[tuple[int | str, ...], object]]
    held: int | Tensor | None


def given_to(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    held: int | Tensor | None = 0,
    packed: bool = False,
    main: bool = True,
    ended: Ended | None = None,
) -> Given:
    """Reads the arguments of a call. It waits for no device.

    Args:
        module: the module that is called.
        args: its arguments.
        kwargs: its keyword arguments.
        held: tokens in the call's cache, the decoder's of an encoder-decoder model; None: unknown.
        packed: it is a packed batch. So embeddings may have two dimensions, [tokens, width], and
            position ids may be named ``positions``, as engines do.
        main: the module is a model, or its main part. So its first argument may be the token ids,
            whatever its name. A part, as the embedding of virtual tokens, may get other integers.
        ended: follows the generations whose calls are read.
    """
    named = _unpacked(named_arguments(module, args, kwargs))
    if not main and isinstance(module, nn.Embedding):  # its call is no call of the model
        named = {f"embedding of {name}": value for name, value in named.items()}
    embeds = named.get("inputs_embeds")
    if packed and isinstance(embeds, Tensor) and embeds.dim() == 2:
        named["inputs_embeds"] = embeds[None]
    if packed and "positions" in named:
        named.setdefault("position_ids", named.pop("positions"))
    decoder = _text(named, "decoder_", held)
    of_encoder = held if decoder is None else 0
    text, used = _text(named, "", of_encoder), ""
    if text is None and main and "input_ids" not in named and "inputs_embeds" not in named:
        # A model that is not of transformers: its first argument may be the token ids.
        used = next(iter(_parameters_of(module)), "")
        first = args[0] if args else named.get(used)
        text = _text({**named, "input_ids": first}, "", of_encoder)
    if text is not None and text.mask is None:
        text = text._replace(mask=_mask_of_lengths(module, named, text))
    if text is not None and text.mask is None:
        text = text._replace(mask=_unnamed_mask(module, args, text))
    if ended is not None and (last := decoder or text) is not None:
        last = last._replace(ended=ended.of_call(last.rows))
        text, decoder = (text, last) if decoder is not None else (last, None)
    of_text = frozenset() if text is None and decoder is None else _OF_TEXT
    others: dict[str, tuple[tuple[int | str, ...], object]]
    others = {
        name: (_shape(value), value.dtype)
        for name, value in named.items()
        if isinstance(value, Tensor)
        and (name not in of_text or value.dim() > 2)
        and (text is None or name != used)
    }
    for side, its in (("", text), ("decoder_", decoder)):
        if its is None:
            continue
        if isinstance(its.mask, Unread):
            others[f"{side}attention_mask"] = its.mask
        elif its.mask is not None and its.mask.may_be_square:
            others[f"{side}attention_mask"] = tuple(its.mask.values.shape), its.mask.values.dtype
    if text is not None:
        rows = text.rows
    elif decoder is not None:
        rows = decoder.rows
    else:
        shape = next((shape for shape, _ in others.values() if shape), ())
        rows = shape[0] if len(shape) > 1 and isinstance(shape[0], int) else 1
    return Given(rows, text, decoder, others, held)


def _unpacked(named: dict[str, Any]) -> dict[str, Any]:
    """The arguments, and those in a mapping among them, as models that take one batch have it."""
    if not named.keys() & _TEXT:
        for value in named.values():
            if isinstance(value, Mapping) and value.keys() & _TEXT:
                return {**{str(key): one for key, one in value.items()}, **named}
    return named


def _shape(tensor: Tensor) -> tuple[int | str, ...]:
    return tuple(n if isinstance(n, int) else str(n) for n in tensor.shape)


def is_main_part(module: nn.Module, models: Collection[nn.Module]) -> bool:
    """Whether a module is one of the models, or has most of the modules of one."""
    if any(module is model for model in models):
        return True
    size = sum(1 for _ in module.modules())
    for model in models:
        modules = {id(one) for one in model.modules()}
        if id(module) in modules and 2 * size > len(modules):
            return True
    return False


def named_arguments(
    module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """The arguments of a module's call by name. Further positional ones are left out."""
    named = dict(zip(_parameters_of(module), args, strict=False)) if args else {}
    named.update(kwargs)
    return named


def _text(named: Mapping[str, Any], side: str, held: int | Tensor | None) -> Text | None:
    ids, embeds = named.get(f"{side}input_ids"), named.get(f"{side}inputs_embeds")
    if any(named.get(name) is not None for name in _NOT_ONLY_TEXT):
        return None
    if isinstance(ids, Tensor) and ids.dtype in _INTEGERS and ids.dim() in (1, 2):
        ids = ids if ids.dim() == 2 else ids[None]
        rows, length = ids.shape
    elif isinstance(embeds, Tensor) and embeds.dim() == 3:
        ids, (rows, length) = None, embeds.shape[:2]
    else:
        return None
    mask = read_mask(named.get(f"{side}attention_mask"), rows, length, held)
    if isinstance(mask, Unread) and (of_generation := mask_of_generation(rows, length)) is not None:
        mask = read_mask(of_generation, rows, length, held)
    if mask is None and not side:
        mask = _other_mask(named, rows, length)
    positions = _of_tokens(named.get(f"{side}position_ids"), rows, length)
    types = _of_tokens(named.get(f"{side}token_type_ids"), rows, length)
    return Text(ids, rows, length, mask, positions, types)


def _other_mask(named: Mapping[str, Any], rows: int, length: int) -> Unread | None:
    """A mask under another name that may tell padding."""
    for name, value in named.items():
        if (
            isinstance(value, Tensor)
            and value.shape == (rows, length)
            and _OTHER_MASK.search(name)
            and not _NO_PADDING_MASK.search(name)
        ):
            return Unread((rows, length), str(value.dtype).removeprefix("torch."))
    return None


def _mask_of_lengths(
    module: nn.Module, named: Mapping[str, Any], text: Text
) -> Mask | Unread | None:
    """What says the padding of a text that came without a mask: lengths, or an id of padding."""
    config = getattr(module, "config", None)
    kind = getattr(config, "model_type", None)
    for name, value in named.items():
        lengths = isinstance(value, Tensor) and value.shape == (text.rows,)
        if not lengths or value.dtype not in _INTEGERS or _OTHER_LENGTHS.search(name):
            continue
        if _LENGTHS.search(name) and text.length > 1:
            if kind not in ("flaubert", "xlm"):
                return Unread((text.rows,), f"{name}, {value.dtype}")
            return Mask(torch.arange(text.length, device=value.device) < value[:, None])
    padding = getattr(config, _PADDING_ID.get(str(kind), ""), None)
    if not isinstance(padding, int) or text.tokens is None or generates():
        return None  # what is generated may have that id
    return Mask(text.tokens != padding)


def _unnamed_mask(module: nn.Module, args: tuple[Any, ...], text: Text) -> Unread | None:
    """A positional argument that no name tells, and that may be a mask."""
    for value in args[max(1, len(_parameters_of(module))) :]:
        if isinstance(value, Tensor) and value.shape == (text.rows, text.length):
            return Unread((text.rows, text.length), str(value.dtype).removeprefix("torch."))
    return None


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
            several = any(one.kind is inspect.Parameter.VAR_POSITIONAL for one in parameters)
            if several and not names and (inner := _wrapped(original)) is not None:
                names = _parameters_of(inner)
        _parameters[module] = names
    return names


def _wrapped(wrapper: nn.Module) -> nn.Module | None:
    """The module that has nearly all modules of a wrapper, as of `nn.DataParallel`."""
    for child in wrapper.children():
        if is_main_part(child, [wrapper]):
            return child
    return None


def _has_decoder(model: nn.Module) -> bool:
    return bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))


def _is_text(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() > 1
