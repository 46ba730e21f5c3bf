"""The tokens whose logits some directions raise and lower the most, as those of features."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from ...errors import InvalidArgumentError
from .._model_head import ModelHead

__all__ = ["LogitEffects", "TokenEffect"]

Ints = npt.NDArray[np.int64]

_LOGITS = 1 << 24  # that are in memory together
_VOCABULARY = 4096  # tokens whose rows of the unembedding are converted together


@dataclasses.dataclass(frozen=True)
class TokenEffect:
    """The effect of a feature, a unit or a direction on the logit of a token.

    Attributes:
        token_id: the token.
        text: its text; None: no tokenizer was given.
        value: the effect: what is written, as a row of the decoder, times the unembedding, for an
            activation of 1.
    """

    token_id: int
    text: str | None
    value: float

    def __str__(self) -> str:
        """The text in quotes, or ``[7]`` for an id without text."""
        return f"[{self.token_id}]" if self.text is None else repr(self.text)


#: Gives the texts of tokens; None: there is no tokenizer.
Texts: TypeAlias = "Callable[[list[int]], list[str | None] | None]"
#: The promoted tokens of a direction, and the suppressed ones.
Effects: TypeAlias = "tuple[list[TokenEffect], list[TokenEffect]]"


class LogitEffects:
    """What directions do to the logits of tokens: direction times unembedding, in float32.

    So norms, scales and soft caps are left out. Scales keep the order of tokens, and so do caps.

    Args:
        directions: [directions, width], in the basis of the residual stream. Those of the features
            of an autoencoder are the rows of its decoder.
        unembedding: the matrix [vocabulary, width], or a model of transformers, whose output
            embeddings are taken. It runs, see `ModelHead`.
        top: tokens of each kind.

    Raises:
        InvalidArgumentError: the model has no output embeddings, or other matrices beside them; or
            the matrix has another width.
        UnsupportedError: it is not known what the model does behind its last block.
    """

    def __init__(self, directions: Tensor, unembedding: nn.Module | Tensor, top: int) -> None:
        self._directions = directions
        self._matrix = _unembedding(unembedding)
        shape, width = list(self._matrix.shape), self._directions.shape[1]
        if len(shape) != 2 or shape[1] != width:
            raise InvalidArgumentError(
                f"the unembedding has the shape {shape}, a direction of {width} values needs "
                f"[vocabulary, {width}]"
            )
        self._top = min(top, shape[0])

    def of(self, numbers: Ints, texts: Texts) -> Iterator[Effects]:
        """For each direction the tokens that it raises the most, and those that it lowers the most.

        2^24 logits are in memory, and 4,096 rows of the unembedding in float32.

        Args:
            numbers: the numbers of the directions.
            texts: gives the texts of tokens.
        """
        size = max(1, _LOGITS // len(self._matrix))
        for first in range(0, len(numbers), size):
            chosen = torch.from_numpy(numbers[first : first + size]).to(self._directions.device)
            written = self._directions[chosen].float().to(self._matrix.device)
            parts = torch.split(self._matrix, _VOCABULARY)
            logits = torch.cat([written @ part.float().T for part in parts], dim=1)
            high = _told(*logits.topk(self._top), texts)
            low = _told(*logits.topk(self._top, largest=False), texts)
            yield from zip(high, low, strict=True)


def _told(values: Tensor, ids: Tensor, texts: Texts) -> list[list[TokenEffect]]:
    """The tokens of each direction."""
    told = []
    for numbers, effects in zip(ids.tolist(), values.tolist(), strict=True):
        words = texts(numbers) or [None] * len(numbers)
        told.append([TokenEffect(*one) for one in zip(numbers, words, effects, strict=True)])
    return told


def _unembedding(given: nn.Module | Tensor) -> Tensor:
    if isinstance(given, Tensor):
        return given.detach()
    find: Any = getattr(given, "get_output_embeddings", None)
    if find is None or (layer := find()) is None:
        raise InvalidArgumentError(
            f"a {type(given).__name__} has no output embeddings: give the matrix "
            "[vocabulary, width]"
        )
    if isinstance(given, nn.Module):
        _check_directions(given, layer)
    matrix: Tensor = layer.weight.detach()
    return matrix


def _check_directions(model: nn.Module, unembedding: nn.Module) -> None:
    """
    Raises:
        InvalidArgumentError: the model multiplies vectors with other matrices too before they are
            logits, so a product with the unembedding alone would say nothing.
        UnsupportedError: it is not known what the model does with them.
    """
    names = {id(module): name for name, module in model.named_modules()}
    own = names.get(id(unembedding))
    others = [name for name in ModelHead(model).matrices if name != own]
    if others:
        raise InvalidArgumentError(
            f"{type(model).__name__} has {', '.join(map(repr, others))} between its last block and "
            "the logits, beside the unembedding: give the matrix [vocabulary, width] that its "
            "vectors meet"
        )
