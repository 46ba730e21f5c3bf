"""The logit lens: what a model would predict if it ended at an earlier layer.

The vectors of each layer go through what the model does with those of its last block: the final
norm, the unembedding, and the scales, biases and soft caps that some models have there. So at the
last layer the lens is the model's prediction. See nostalgebraist 2020, "interpreting GPT: the logit
lens".
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ..errors import InvalidArgumentError
from .reading.opened import Capture, opened
from .rows import Rows
from .token_rows.text_rows import of_last_calls, one_text, rows_of_texts, token_labels

if TYPE_CHECKING:
    from torch import nn

    from ._model_head import ModelHead

__all__ = ["LogitLens", "logit_lens"]

_NORMS = {
    "norm", "ln_f", "norm_f", "final_norm", "final_layer_norm", "final_layernorm", "layer_norm_f",
    "embedding_norm", "out_norm",
}  # fmt: skip
_IN_A_BLOCK = re.compile(r"(^|\.)\d+(\.|$)")
_TOKENS = 64  # whose logits are in memory at a time


@dataclasses.dataclass(frozen=True)
class LogitLens:
    """The prediction of each layer behind each token of one text.

    Attributes:
        layers: the layers, in the order of execution.
        tokens: a label for each token: its text, or else its id, or else its position.
        ids: the most probable next token, int64, [layers, tokens].
        probabilities: its probability, float64, [layers, tokens].
        texts: its text, or else its id, for each layer and token.
    """

    layers: tuple[str, ...]
    tokens: tuple[str, ...]
    ids: npt.NDArray[np.int64]
    probabilities: npt.NDArray[np.float64]
    texts: tuple[tuple[str, ...], ...]


def logit_lens(
    capture: Capture,
    model: nn.Module,
    layers: str | Iterable[str] | None = None,
    *,
    sequence: int = 0,
    tokenizer: Any = None,
    norm: nn.Module | None = None,
    unembedding: nn.Module | None = None,
) -> LogitLens:
    """Applies the logit lens to the layers of a capture.

    The model's own head makes the logits, whatever it has behind its last block. It is found by two
    forward passes of made-up tokens, and must make the model's logits of what the last block
    returned. No other thread may run the model meanwhile, and no capture of it may be open.

    Args:
        capture: a reader or the path of a stream.
        model: the model that was captured. Its mode stays as it is.
        layers: names or patterns of layers that return the residual stream; None: the blocks that
            lead to the logits, those of the decoder if there is an encoder too. Of blocks that run
            several times in a step it is the last time.
        sequence: the number of the text in the capture, from 0, through all steps of a generation.
        tokenizer: its `decode` gives the texts of tokens.
        norm: a module that is called in place of the model's head, before the unembedding.
            ``torch.nn.Identity()`` is none. With `unembedding` alone it is found by its name, as
            ``norm`` or ``ln_f``.
        unembedding: makes logits of vectors, in place of the model's head. With `norm` alone it is
            the `get_output_embeddings()` of the model. With either of the two nothing else of
            the head is applied: no scale, soft cap or projection.

    Raises:
        UnknownActivationError: (a KeyError) a name or pattern matches no layer.
        NotTokenAlignedError: (a ValueError) a layer has no vector for each token.
        InvalidArgumentError: (a ValueError) the model has no unembedding; norm or unembedding is
            not found, or has another width; `sequence` is not the number of a text.
        UnsupportedError: (a TypeError) the logits are not made of the vectors of the last block
            alone, or the model does not run on token ids alone; the message says how they
            differ. Or a layer is in another part of the model, as an encoder.
    """
    head = _head(model, norm, unembedding)
    with opened(capture) as reader:
        if layers is None:
            layers = [name for name in reader.layers if name in head.blocks] or None
        rows = rows_of_texts(reader, layers, one_text(sequence), tokenizer, last_calls=True)
        return _lens_of(rows, head, tokenizer)


def lens_of(
    rows: Mapping[str, Rows],
    model: nn.Module,
    *,
    tokenizer: Any = None,
    norm: nn.Module | None = None,
    unembedding: nn.Module | None = None,
) -> LogitLens:
    """Applies the logit lens to the rows of one text, by layer, as of `rows_of_texts`."""
    last = {layer: of_last_calls(of_layer) for layer, of_layer in rows.items()}
    return _lens_of(last, _head(model, norm, unembedding), tokenizer)


def _lens_of(rows: Mapping[str, Rows], head: ModelHead | _Given, tokenizer: Any) -> LogitLens:
    import torch

    ids, probabilities = [], []
    with torch.inference_mode():
        for layer, of_layer in rows.items():
            head.check_layer(layer)
            best = []
            for first in range(0, len(of_layer), _TOKENS):
                vectors = of_layer[first : first + _TOKENS].to_torch()
                try:
                    logits = head.logits(vectors)
                except (RuntimeError, InvalidArgumentError) as error:
                    raise InvalidArgumentError(
                        f"{layer!r} has vectors of {list(vectors.shape[1:])}, which norm and "
                        f"unembedding do not take: choose layers. {error}"
                    ) from error
                logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
                top, at = logits.max(dim=-1)
                best.append((at.cpu(), (top - logits.logsumexp(dim=-1)).exp().double().cpu()))
            ids.append(torch.cat([at for at, _ in best]).numpy())
            probabilities.append(torch.cat([share for _, share in best]).numpy())
    tokens = token_labels(next(iter(rows.values())))
    found = np.stack(ids)
    known = {n: tokenizer.decode([n]) if tokenizer else str(n) for n in np.unique(found).tolist()}
    return LogitLens(
        tuple(rows), tokens, found, np.stack(probabilities),
        tuple(tuple(known[n] for n in of_layer) for of_layer in found.tolist()),
    )  # fmt: skip


class _Given:
    """A norm and an unembedding in place of the head of a model."""

    blocks = ()

    def __init__(self, norm: nn.Module, unembedding: nn.Module) -> None:
        self._norm, self._unembedding = norm, unembedding

    def check_layer(self, layer: str) -> None:
        """All layers go."""

    def logits(self, vectors: Any) -> Any:
        """See `ModelHead.logits`."""
        return _through(self._unembedding, _through(self._norm, vectors))


def _head(
    model: nn.Module, norm: nn.Module | None, unembedding: nn.Module | None
) -> ModelHead | _Given:
    from ._model_head import ModelHead, unembedding_of

    if norm is None and unembedding is None:
        return ModelHead(model)
    return _Given(
        _norm(model) if norm is None else norm,
        unembedding_of(model) if unembedding is None else unembedding,
    )


def _through(module: nn.Module, values: Any) -> Any:
    """What a module makes of values, in its own type and on its own device."""
    weight = next(module.parameters(), None)
    return module(values if weight is None else values.to(weight.device, weight.dtype))


def _norm(model: nn.Module) -> nn.Module:
    found: dict[str, nn.Module] = {
        name: module
        for name, module in model.named_modules()
        if name.rpartition(".")[2] in _NORMS
        and not _IN_A_BLOCK.search(name)
        and not re.search(r"(^|\.)encoder\.", name)
    }
    if len(found) == 1:
        (module,) = found.values()
        return module
    raise InvalidArgumentError(
        f"{type(model).__name__} has {', '.join(found) if found else 'no norm'} outside of its "
        "blocks: pass norm=, the module before the unembedding, or torch.nn.Identity()"
    )
