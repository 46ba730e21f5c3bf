"""Attention weights of a capture: who looks at whom::

    attention_layers("run.stream")          # ("model.layers.0.self_attn[1]", ...)
    found = attention_weights("run.stream", "model.layers.0", tokenizer=tokenizer)
    found.weights                            # [heads, query, key]

A model of transformers returns them if it is loaded with ``attn_implementation="eager"``. They are
the second output of its attention modules; ``output_attentions=True`` is not needed. They are found
by their values, whatever the layer is called: four dimensions, and rows that sum to 1.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from .._integers import integers
from ..errors import InvalidArgumentError, StrapError
from .reader import Activation, ActivationReader, ActivationView
from .reading.calls import Calls, LayerCalls
from .reading.opened import Capture, opened
from .rows import NoCallsError, NotTokenAlignedError
from .token_rows.text_rows import labels

__all__ = ["AttentionWeights", "NoAttentionError", "attention_layers", "attention_weights"]

_SUM_ERROR = 0.02  # of a row of weights; bfloat16 and dropped digits make sums inexact


class NoAttentionError(StrapError, LookupError):
    """The capture has no attention weights, or none of a layer; the message names the way out."""


@dataclasses.dataclass(frozen=True)
class AttentionWeights:
    """The attention weights of a layer for one text.

    Attributes:
        layer: the name of the tensor in the capture.
        steps: the steps that they are of; empty if unknown.
        weights: float32, [heads, query, key]. NaN: the key did not exist at the step of the query.
        queries, keys: a label for each token: its text, or else its id, or else its position. Keys
            that may be of another text, as in cross-attention, have their position.
    """

    layer: str
    steps: tuple[int, ...]
    weights: npt.NDArray[np.float32]
    queries: tuple[str, ...]
    keys: tuple[str, ...]


def attention_layers(capture: Capture) -> tuple[str, ...]:
    """The names of the tensors that are attention weights, in the order of execution.

    A tensor that several modules return is listed once, under the innermost module. The first
    tensor of each name with four dimensions is decoded.

    A model of transformers returns weights as the second output of its attention modules:
    ``model.layers.0.self_attn[1]`` in Llama, ``transformer.h.0.attn[1]`` in GPT-2,
    ``encoder.layer.0.attention.self[1]`` in BERT.

    Args:
        capture: a reader or the path of a stream.

    Raises:
        NotFoundError: (a FileNotFoundError) there is no such file.
        CorruptError: (a ValueError) the file is no stream, or a packet is damaged.
    """
    with opened(capture) as reader:
        return weights_among(reader, reader.layers)


def weights_among(reader: ActivationReader, names: Iterable[str]) -> tuple[str, ...]:
    """As `attention_layers`, of some names."""
    found: dict[tuple[int | None, bytes], str] = {}
    for name in names:
        first = reader[name][0]
        if len(first.shape or ()) == 4 and first.transform is None:
            values = first.to_numpy()
            if are_weights(values):
                found.setdefault((first.step, hashlib.sha256(values.tobytes()).digest()), name)
    return tuple(found.values())


def are_weights(values: npt.NDArray[Any]) -> bool:
    """Whether rows, [..., key], sum to 1; rows of a padded text may be 0."""
    if values.dtype.kind != "f" or not values.size or not (values >= 0).all():
        return False
    sums = values.sum(axis=-1, dtype=np.float64)
    ones = np.abs(sums - 1) < _SUM_ERROR
    return bool(ones.any() and (ones | (sums == 0)).all())


def attention_weights(
    capture: Capture,
    layer: str | int = 0,
    *,
    step: int | None = None,
    batch_row: int = 0,
    tokenizer: Any = None,
) -> AttentionWeights:
    """The attention weights of a layer for one row of a batch. Padding is left out.

    Args:
        capture: a reader or the path of a stream.
        layer: a name of `attention_layers`, the name of a module that contains it, as
            "model.layers.0", or a place in `attention_layers`.
        step: the forward step. None: the first one, and of a generation all steps that follow it,
            joined. They are joined as far as the capture knows that the row has the same text: it
            does not for a beam search, where rows change places.
        batch_row: the place of the text in its batch.
        tokenizer: its `decode` gives the texts of tokens.

    Raises:
        NoAttentionError: (a LookupError) there are no attention weights, or none of this layer.
        InvalidArgumentError: (a ValueError) there is no such batch row or step, or `layer` is
            neither a name nor a number.
    """
    with opened(capture) as reader:
        view = reader[_find(reader, layer)]
        if step is not None and not len(view := view.select(steps=step)):
            raise InvalidArgumentError(
                f"step = {step}: {reader.path} has the steps {_span(reader)}"
            )
        return weights_of(reader, view, batch_row, tokenizer, joined=step is None)


def weights_of(
    reader: ActivationReader,
    view: ActivationView,
    batch_row: int = 0,
    tokenizer: Any = None,
    *,
    joined: bool,
) -> AttentionWeights:
    """The attention weights of the first activation of a view.

    Args:
        reader: the capture.
        view: activations of one name of `attention_layers`; at least one.
        batch_row: as for `attention_weights`.
        tokenizer: as for `attention_weights`.
        joined: join it with those that follow it in a generation.
    """
    parts, used = _of_one_text(reader, view, batch_row, joined)
    queries = sum(part.shape[1] for part in parts)
    keys = parts[-1].shape[2]
    weights = np.full((parts[0].shape[0], queries, keys), np.nan, np.float32)
    at = 0
    for part in parts:
        weights[:, at : at + part.shape[1], : part.shape[2]] = part
        at += part.shape[1]
    names, kept, own = _tokens(reader, used, batch_row, tokenizer, queries, keys)
    if own:
        key_names = names
        weights = weights[:, kept][:, :, kept]
    else:
        key_names = tuple(f"#{place}" for place in range(keys))
        weights = weights[:, kept]
    steps = tuple(a.step for a in used if a.step is not None)
    return AttentionWeights(used[0].name, steps, weights, names, key_names)


def _of_one_text(
    reader: ActivationReader, view: ActivationView, batch_row: int, joined: bool
) -> tuple[list[npt.NDArray[Any]], list[Activation]]:
    """The weights of the first activation, and of those that go on with its keys and its text."""
    used = [view[0]]
    shape = used[0].shape or ()
    if not 0 <= batch_row < shape[0]:
        raise InvalidArgumentError(f"batch_row = {batch_row}: the batch has {shape[0]} rows")
    keys = shape[-1]
    for activation in itertools.islice(view, 1, None) if joined else ():
        shape = activation.shape or ()
        if len(shape) != 4 or shape[3] != keys + shape[2] or batch_row >= shape[0]:
            break
        used.append(activation)
        keys = shape[3]
    used = used[: _of_same_text(reader, used, batch_row)]
    return [activation.to_numpy()[batch_row] for activation in used], used


def _of_same_text(reader: ActivationReader, used: list[Activation], batch_row: int) -> int:
    """How many activations from the first on are known to be of one text: at least the first."""
    found = _calls_of(reader, used) if len(used) > 1 else None
    if found is None:
        return 1
    calls, chosen = found
    known = (chosen.first >= 0) & (batch_row < chosen.rows)
    rows = np.where(known, chosen.first + batch_row, 0)
    same = known & known[0]
    sequences = calls.cells("sequence", rows)
    same &= (sequences >= 0) & (sequences == sequences[0])
    requests = calls.cells("request", rows)
    same &= requests == requests[0]
    return max(1, int(np.logical_and.accumulate(same).sum()))


def _calls_of(reader: ActivationReader, used: list[Activation]) -> tuple[Calls, LayerCalls] | None:
    """The calls that activations of one layer belong to; None: they are unknown."""
    steps = np.array([-1 if a.step is None else a.step for a in used])
    ranks = np.array([a.rank for a in used])
    try:
        calls = reader._calls_of_capture()
        return calls, calls.of_layer(used[0].model, used[0].layer, steps, ranks)
    except (NoCallsError, NotTokenAlignedError):
        return None


def _find(reader: ActivationReader, layer: str | int) -> str:
    names = attention_layers(reader)
    if not names:
        raise NoAttentionError(
            f"{reader.path} has no attention weights: no tensor is [batch, heads, query, key] with "
            'rows that sum to 1. Load the model with attn_implementation="eager", and capture its '
            "attention modules"
        )
    if not isinstance(layer, str):
        number = integers("layer", layer)
        if not isinstance(number, int):
            raise InvalidArgumentError(f"layer = {layer!r}: give one name or number")
        if not -len(names) <= number < len(names):
            raise NoAttentionError(f"layer = {number}: {reader.path} has {len(names)} of them")
        return names[number]
    inside = [n for n in names if n == layer or n.startswith((f"{layer}.", f"{layer}["))]
    if len(inside) == 1:
        return inside[0]
    some = ", ".join(map(repr, (inside or names)[:3]))
    raise NoAttentionError(
        f"{layer!r} has {len(inside) or 'no'} attention weights in {reader.path}: name one of "
        f"{some}{', ...' if len(inside or names) > 3 else ''}"
    )


def _span(reader: ActivationReader) -> str:
    return f"{reader.steps[0]} to {reader.steps[-1]}" if reader.steps else "of no known number"


def _tokens(
    reader: ActivationReader,
    used: list[Activation],
    batch_row: int,
    tokenizer: Any,
    count: int,
    keys: int,
) -> tuple[tuple[str, ...], npt.NDArray[np.int64], bool]:
    """Labels of the queries that are no padding, their places, and whether the keys are the same.

    Keys of cross-attention are of another text, also if it has as many tokens.
    """
    places, own = np.arange(count), keys == count
    numbers = tuple(f"#{place}" for place in range(count))
    found = _calls_of(reader, used)
    if found is None:
        return numbers, places, own
    calls, chosen = found
    if (chosen.first < 0).any() or chosen.tokens.sum() != count:
        return numbers, places, own
    rows = np.repeat(chosen.first + batch_row, chosen.tokens)
    tokens = np.concatenate([np.arange(n) for n in chosen.tokens.tolist()])
    last = int(chosen.first[-1]) + batch_row
    own = own and not calls.may_be_crossed(used[-1].model or "", used[-1].layer, last, keys)
    side = "decoder_" if chosen.decoder else ""
    ids = calls.lists(f"{side}token_ids").at(rows, tokens, -1)
    kept = np.flatnonzero(calls.lists(f"{side}mask").at(rows, tokens, True))
    texts = [
        None if tokenizer is None or n < 0 else tokenizer.decode([n]) for n in ids[kept].tolist()
    ]
    return labels(texts, ids[kept].tolist(), kept.tolist()), kept, own
