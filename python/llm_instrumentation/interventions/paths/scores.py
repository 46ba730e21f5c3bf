"""Effects of edges while they are summed up."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ...analysis.causal_graph import EdgeKey
from ...errors import InvalidArgumentError
from ..decoders import PostNorms
from .edge_space import EdgeBlock, EdgeSpace
from .residuals import Change
from .spans import Spans

__all__ = ["Scores", "add_products"]


class Scores:
    """Effects of edges on examples, or the sums of the effects over the examples.

    Args:
        examples: their number. None: sums, in float64.
        size: the number of edges.
        numbers: of the edges that are kept, in rising order; None: all.
        top_k: how many edges are wanted in the end; None: all that are kept.
    """

    def __init__(
        self, examples: int | None, size: int, numbers: Tensor | None, top_k: int | None
    ) -> None:
        kept = size if numbers is None else len(numbers)
        dtype = torch.float64 if examples is None else torch.float32
        self._values = torch.zeros(1 if examples is None else examples, kept, dtype=dtype)
        self._sums = examples is None
        self._numbers = numbers
        self._top_k = top_k
        self._examples = 0

    @classmethod
    def of(cls, space: EdgeSpace, examples: int, top_k: int | None) -> Scores:
        """Scores of all edges.

        Raises:
            InvalidArgumentError: `top_k` is below 1; there are too many edges, and no `top_k`.
        """
        if top_k is None:
            space.check_size()
            return cls(examples, space.size, None, None)
        if isinstance(top_k, bool) or not isinstance(top_k, int) or top_k < 1:
            raise InvalidArgumentError(f"top_k = {top_k!r}: give a number from 1 up, or None")
        return cls(None, space.size, None, min(top_k, space.size))

    def add(self, rows: slice, begin: int, effects: Tensor) -> None:
        """Adds effects [examples, edges] of edges that stand side by side.

        Args:
            rows: the examples.
            begin: the number of the first edge.
            effects: of the edges.
        """
        end = begin + effects.shape[1]
        if self._numbers is not None:
            first, last = torch.searchsorted(self._numbers, torch.tensor([begin, end])).tolist()
            effects = effects[:, self._numbers[first:last] - begin]
            begin, end = first, last
        if self._sums:
            self._examples = max(self._examples, rows.stop)
            self._values[0, begin:end] += effects.double().sum(0)
        else:
            self._values[rows, begin:end] += effects

    def of_largest(self, examples: int) -> Scores:
        """Scores of the examples for the edges with the largest sums."""
        return Scores(examples, 0, self._largest(), None)

    def _largest(self) -> Tensor:
        assert self._top_k is not None
        # A stable order: of equal effects the first edges.
        order = self._values[0].abs().argsort(descending=True, stable=True)
        return order[: self._top_k].sort().values

    def found(self, space: EdgeSpace) -> tuple[list[EdgeKey], npt.NDArray[np.float32]]:
        """The edges, and their effects [examples, edges]; of sums the mean effects [1, edges]."""
        numbers, values = self._numbers, self._values
        if self._sums:
            numbers = self._largest()
            values = (values[:, numbers] / self._examples).float()
        keys = space.edges() if numbers is None else map(space.key, numbers.tolist())
        return list(keys), values.numpy()


def add_products(
    scores: Scores, rows: slice, spans: Spans, blocks: Sequence[EdgeBlock], gradients: Tensor,
    difference: Change, weight: float, post_norms: PostNorms,
) -> None:  # fmt: skip
    """Adds the effects of edges: what the sources write differently, times the gradients.

    Args:
        scores: they are added to these.
        rows: the examples.
        spans: of these examples.
        blocks: the edges, which have the same targets.
        gradients: at the inputs of the targets, [targets, batch, tokens, width].
        difference: what all nodes write.
        weight: of the products.
        post_norms: how heads pass the norm behind them.
    """
    upstream = blocks[0].upstream
    batch = gradients.shape[1]
    products = []
    # One layer's heads at a time: all nodes together would take the memory of the whole model.
    for number, writers in enumerate(difference.decoder.writers):
        if writers.end <= upstream:
            sources = difference.spread(number, post_norms).to(gradients.dtype)
            products.append((weight * _by_span(sources, gradients, spans)).cpu())
    together = torch.cat(products, 2)
    for block in blocks:
        effects = together[..., list(block.sources)].reshape(batch, -1)
        scores.add(rows, block.begin, effects)


def _by_span(sources: Tensor, gradients: Tensor, spans: Spans) -> Tensor:
    """The products of sources and gradients, summed over each span and the width.

    Args:
        sources: [sources, batch, tokens, width].
        gradients: [targets, batch, tokens, width].
        spans: of the batch.

    Returns:
        [batch, targets, sources, spans].
    """
    if spans.index is None:
        return torch.einsum("sbtd,rbtd->brs", sources, gradients)[..., None]
    tokens = torch.einsum("sbtd,rbtd->brst", sources, gradients)
    index = spans.index.to(tokens.device)[:, None, None].expand(tokens.shape)
    # Padding is summed to a column of its own, which is left out.
    sums = tokens.new_zeros(*tokens.shape[:3], len(spans) + 1)
    return sums.scatter_add_(3, index, tokens)[..., : len(spans)]
