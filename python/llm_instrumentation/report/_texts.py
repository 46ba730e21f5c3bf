"""The tokens of one text: their norms, the largest activations, attention, the logit lens."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from .._pages import page, units
from ..analysis.attention import AttentionWeights, weights_among, weights_of
from ..analysis.figures import canvas
from ..analysis.figures import layers as of_layers
from ..analysis.figures import tokens as of_tokens
from ..analysis.logit_lens import lens_of
from ..analysis.reader import ActivationReader
from ..analysis.rows import NoCallsError, NotTokenAlignedError, Rows
from ..analysis.token_rows.text_rows import (
    chosen_layers,
    rows_and_texts,
    rows_of_texts,
    token_labels,
)
from ..analysis.views import massive_of, norms_of
from ..errors import InvalidArgumentError
from ._drawn import drawn
from ._sample import evenly

if TYPE_CHECKING:
    from torch import nn

__all__ = [
    "TextOfStep",
    "attention_figures",
    "check_ids",
    "text_of_step",
    "token_figures",
    "written",
]

_TOKENS = 64  # of a text that are shown: those that end with the step
_LAYERS = 48  # that have a row in a heat map
_OUTLIERS = 24  # that have a row in the figure of the largest activations
_TRIED = 64  # tensors that are looked at for attention weights
_MOST_WEIGHTS = 1 << 22  # of a tensor of attention weights
_SHOWN = 3  # layers whose attention weights are drawn
_WEIGHTS_IN = 5.4  # the longer side of such a figure, at most
_PREDICTED = 20  # tokens of the logit lens; more would have no room for their texts


class TextOfStep:
    """The tokens of one text that end with a step.

    Attributes:
        rows: by layer, all with the same tokens.
        first_step, step: the steps that they are of.
        tokens: a label for each token.
        text: what the tokens say.
        of: number of layers that could have been shown.
    """

    def __init__(self, rows: Mapping[str, Rows], step: int, of: int, tokenizer: Any = None) -> None:
        self.rows = rows
        some = next(iter(rows.values()))
        self.first_step, self.step = int(some.column("step").min()), step
        self.tokens = token_labels(some)
        self.of = of
        self.text = written(some, tokenizer)


def written(rows: Rows, tokenizer: Any) -> str:
    """What the tokens of rows say; without a tokenizer, or an unknown token, their labels."""
    ids = rows.column("token_id")
    if tokenizer is None or (ids < 0).any():
        return " ".join(token_labels(rows))
    return str(tokenizer.decode(ids.tolist()))


def text_of_step(reader: ActivationReader, step: int | None, tokenizer: Any) -> TextOfStep:
    """Finds the first text of a step, with the tokens of earlier steps of its generation.

    Args:
        reader: the capture.
        step: the step; None: the last one.
        tokenizer: its `decode` gives the texts of tokens; None: they are shown as ids.

    Raises:
        NotTokenAlignedError: no layer has a vector for each token.
        InvalidArgumentError: there is no such step, or a token has an id that the tokenizer lacks.
    """
    if step is not None and step not in reader.steps:
        has = f"{reader.steps[0]} to {reader.steps[-1]}" if reader.steps else "of no known number"
        raise InvalidArgumentError(f"step = {step}: {reader.path} has the steps {has}")
    if not reader.steps:
        raise NotTokenAlignedError("the steps of its tensors are unknown")
    last = reader.steps[-1] if step is None else step
    window = slice(max(0, last - _TOKENS + 1), last + 1)
    names = [name for name in chosen_layers(reader, None) if len(reader[name].select(steps=last))]
    chosen = [names[at] for at in evenly(len(names), _LAYERS)]
    problem: Exception = NotTokenAlignedError(f"step {last} has no block of the model")
    for name in chosen:
        try:
            rows, texts = rows_and_texts(reader, name, tokenizer, window)
        except (NotTokenAlignedError, NoCallsError) as error:
            problem = error
            continue
        of_step = np.flatnonzero(rows.column("step") == last)
        if len(of_step):
            text = int(texts[of_step[0]])
            break
    else:
        raise NotTokenAlignedError(str(problem)) from problem
    found: dict[str, Rows] = {}
    for name in chosen:
        try:
            every = rows_of_texts(reader, [name], text, tokenizer, window)[name]
        except (NotTokenAlignedError, NoCallsError, InvalidArgumentError):
            continue  # as a router among blocks; the page says how many layers it shows
        of_layer = every[-_TOKENS:]
        first = next(iter(found.values()), of_layer)
        if _places(of_layer) == _places(first):
            found[name] = of_layer
    check_ids(next(iter(found.values())).column("token_id"), tokenizer)
    return TextOfStep(found, last, len(names), tokenizer)


def _places(rows: Rows) -> list[list[int]]:
    return [rows.column(name).tolist() for name in ("step", "position")]


def check_ids(ids: npt.NDArray[np.int64], tokenizer: Any) -> None:
    """
    Raises:
        InvalidArgumentError: the tokenizer is of another model.
    """
    known = getattr(tokenizer, "__len__", None)
    most = int(ids.max(initial=-1))
    if known is not None and most >= known():
        raise InvalidArgumentError(
            f"the capture has the token {most}, the tokenizer has {known():,}: give the tokenizer "
            "of the model that was captured"
        )


def token_figures(text: TextOfStep, model: nn.Module | None, tokenizer: Any) -> Iterator[str]:
    """The text, and what its tokens are at each layer.

    Raises:
        InvalidArgumentError: the model has no norm or unembedding that takes the vectors.
        CorruptError: a packet is damaged.
    """
    count, layers = len(text.tokens), len(text.rows)
    steps = f"step {text.step}"
    if text.first_step != text.step:
        steps = f"steps {text.first_step} to {text.step}"
    of = "" if layers == text.of else f"{layers} of "
    ending = "last token" if count == 1 else f"last {count} tokens"
    yield page.paragraph(
        f"The first text of step {text.step}: its {ending}, of {steps}, at {of}"
        f"{units.counted(text.of, 'layer')}."
    )
    yield page.code_block(text.text)
    norms = norms_of(text.rows)
    told = f"Heat map of the L2 norms of {count} tokens at {layers} layers."
    if np.isfinite(norms.values).any():
        sizes = np.where(np.isfinite(norms.values), norms.values, -1.0)
        layer, token = np.unravel_index(sizes.argmax(), sizes.shape)
        told += (
            f" The largest is {sizes[layer, token]:.3g}, of token {text.tokens[token]!r} at "
            f"{norms.layers[layer]}"
        )
    yield drawn(
        "token-norms", told,
        canvas.sized(norms.layers, norms.tokens),
        lambda ax: of_tokens.draw_norms(ax, norms),
    )  # fmt: skip
    names = list(text.rows)
    outliers = massive_of({names[at]: text.rows[names[at]] for at in evenly(layers, _OUTLIERS)})
    yield drawn(
        "outliers",
        f"The three largest magnitudes and the median of each layer; {len(outliers.massive)} are "
        "massive activations",
        canvas.sized(outliers.layers),
        lambda ax: of_layers.draw_outliers(ax, outliers),
        "A ring marks a massive activation: its magnitude is above 100, and at least 1,000 times "
        "the median of its layer.",
    )
    if model is not None:
        last = {name: rows[-_PREDICTED:] for name, rows in text.rows.items()}
        lens = lens_of(last, model, tokenizer=tokenizer)
        yield drawn(
            "logit-lens",
            f"The most probable next token behind the last {len(lens.tokens)} tokens, at {layers} "
            f"layers; the last layer predicts {lens.texts[-1][-1]!r}",
            of_tokens.lens_size(lens),
            lambda ax: of_tokens.draw_lens(ax, lens),
        )


def attention_figures(reader: ActivationReader, text: TextOfStep, tokenizer: Any) -> Iterator[str]:
    """The attention weights of the first, the middle and the last layer that has some.

    Raises:
        CorruptError: a packet is damaged.
    """
    candidates, large = [], 0
    for name in reader.layers:
        shape = reader[name][0].shape or ()
        if len(shape) == 4 and shape[3] >= shape[2]:
            if math.prod(shape) <= _MOST_WEIGHTS:
                candidates.append(name)
            else:
                large += 1
    tried = [candidates[at] for at in evenly(len(candidates), _TRIED)]
    found = weights_among(reader, tried)
    figures = []
    for number, at in enumerate(evenly(len(found), _SHOWN)):
        view = reader[found[at]].select(steps=slice(text.first_step, text.step + 1))
        if not len(view) or any(math.prod(one.shape or ()) > _MOST_WEIGHTS for one in view):
            continue
        weights = weights_of(reader, view, 0, tokenizer, joined=True)
        figures.append(_attention(weights, f"attention-{number}"))
    yield page.side_by_side(figures)
    if large:
        yield page.paragraph(
            f"Not looked at for attention weights: {units.counted(large, 'layer')} with tensors of "
            f"more than {_MOST_WEIGHTS:,} values."
        )


def _attention(weights: AttentionWeights, name: str) -> str:
    heads, queries, keys = weights.weights.shape
    size = of_tokens.attention_size(weights)
    scale = min(1.0, _WEIGHTS_IN / max(size))
    return drawn(
        name,
        f"Mean attention weights of {heads} heads of {weights.layer}: {queries} queries, {keys} "
        "keys",
        (max(3.4, size[0] * scale), max(2.6, size[1] * scale)),
        lambda ax: of_tokens.draw_attention(ax, weights),
    )
