"""The logit lens: what a model would predict if it ended at an earlier layer.

The vectors of each layer go through the final norm and the unembedding of the model. See
nostalgebraist 2020, "interpreting GPT: the logit lens".
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ..errors import InvalidArgumentError
from ._opened import Capture, opened
from ._text_rows import rows_of_texts, token_labels
from .rows import Rows

if TYPE_CHECKING:
    from torch import nn

__all__ = ["LogitLens", "logit_lens"]

_NORMS = {
    "norm", "ln_f", "norm_f", "final_norm", "final_layer_norm", "final_layernorm", "layer_norm_f",
    "embedding_norm", "out_norm",
}  # fmt: skip
_IN_A_BLOCK = re.compile(r"(^|\.)\d+(\.|$)")
_TOKENS = 64  # whose logits are in memory at a time


@dataclasses.dataclass(frozen=True)
class LogitLens:
    """What each layer predicts behind each token of one text.

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

    Args:
        capture: a reader or the path of a stream.
        model: the model that was captured; only its norm and unembedding are called.
        layers: names or patterns of layers that return the residual stream; None: the blocks.
        sequence: the number of the text in the capture, from 0, through all steps of a generation.
        tokenizer: its `decode` gives the texts of tokens.
        norm: the module before the unembedding; None: it is found by its name, as ``norm`` or
            ``ln_f``. ``torch.nn.Identity()`` is none.
        unembedding: makes logits of vectors; None: the `get_output_embeddings()` of the model.

    Raises:
        UnknownActivationError: (a KeyError) a name or pattern matches no layer.
        NotTokenAlignedError: (a ValueError) a layer has no vector for each token.
        InvalidArgumentError: (a ValueError) norm or unembedding is not found, or has another width;
            there is no such text.
    """
    with opened(capture) as reader:
        rows = rows_of_texts(reader, layers, sequence, tokenizer)
        return lens_of(rows, model, tokenizer=tokenizer, norm=norm, unembedding=unembedding)


def lens_of(
    rows: Mapping[str, Rows],
    model: nn.Module,
    *,
    tokenizer: Any = None,
    norm: nn.Module | None = None,
    unembedding: nn.Module | None = None,
) -> LogitLens:
    """Applies the logit lens to the rows of one text, by layer, as of `rows_of_texts`."""
    import torch

    unembed = _unembedding(model) if unembedding is None else unembedding
    normalize = _norm(model) if norm is None else norm
    ids, probabilities = [], []
    with torch.inference_mode():
        for layer, of_layer in rows.items():
            best = []
            for first in range(0, len(of_layer), _TOKENS):
                vectors = of_layer[first : first + _TOKENS].to_torch()
                try:
                    logits = _through(unembed, _through(normalize, vectors)).float()
                except RuntimeError as error:
                    raise InvalidArgumentError(
                        f"{layer!r} has vectors of {list(vectors.shape[1:])}, which norm and "
                        f"unembedding do not take: choose layers. {error}"
                    ) from error
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


def _through(module: nn.Module, values: Any) -> Any:
    """What a module makes of values, in its own type and on its own device."""
    weight = next(module.parameters(), None)
    return module(values if weight is None else values.to(weight.device, weight.dtype))


def _unembedding(model: nn.Module) -> nn.Module:
    find = getattr(model, "get_output_embeddings", None)
    if find is None or (found := find()) is None:
        raise InvalidArgumentError(
            f"{type(model).__name__} has no output embeddings: pass unembedding=, the module that "
            "makes logits of vectors"
        )
    module: nn.Module = found
    return module


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
