"""Gradients of a metric at the inputs of the nodes of a decoder."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from ...analysis.causal_graph.parts import INPUTS
from ...errors import UnsupportedError
from ..decoders import DecoderBlock, DecoderGraph
from ..edits import apply
from ..experts import Experts
from ..installed import intervene
from ..metrics import Metric, widened
from ..prompts import Prompts
from .edge_space import EdgeBlock, EdgeSpace
from .residuals import before_norm, linear
from .spans import Spans

__all__ = ["gradients"]


def gradients(
    space: EdgeSpace, spans: Spans, batch: Prompts, start: Tensor, metric: Metric
) -> Iterator[tuple[list[EdgeBlock], Tensor]]:
    """The gradients of the metric at what each of the readers reads, before its norm.

    Args:
        space: the edges.
        spans: of these examples.
        batch: the examples; their clean inputs run.
        start: replaces the residual stream before the first layer.
        metric: of each example.

    Yields:
        blocks of edges into the same nodes, and the gradients at the inputs of these [targets,
        batch, tokens, width] in float32 or float64. Those of heads are gradients of what the heads
        return in the span of the block. So a block has the products in the spans of its sources.
    """
    graph = space.decoder
    leaf = start.detach().clone().requires_grad_()
    residuals: dict[int, Tensor] = {}
    ends: dict[int, Tensor] = {}
    returned: dict[str, Tensor] = {}
    received: dict[int, Tensor] = {}  # by blocks with experts

    def keep(into: dict[Any, Tensor], key: Any) -> Callable[[Tensor], Tensor]:
        def kept(value: Tensor) -> Tensor:
            into[key] = value
            return value

        return kept

    def keep_own(number: int) -> Callable[[Tensor], Tensor]:
        def kept(value: Tensor) -> Tensor:
            # A copy, because attention may read the same tensor.
            ends[number] = value.clone()
            return ends[number]

        return kept

    edits = [apply(graph.blocks[0].layer, lambda _: leaf, side="input")]
    for number, readers in enumerate(graph.readers):
        edits.append(apply(readers.at, keep(residuals, number), side="input"))
        if readers.kind == "logits":
            edits.append(apply(readers.norm, keep_own(number)))
            continue
        block = graph.blocks[readers.layer]
        if readers.kind == "mlp":
            edits.append(apply(block.mlp, keep_own(number), side="input"))
        elif readers.kind == "experts":
            edits.append(apply(block.mlp, keep(received, number), side="input"))
            edits.append(apply(block.mlp, keep_own(number)))
        else:
            edits.append(apply(block.out, keep(ends, number), side="input"))
            edits.extend(apply(name, keep(returned, name)) for name in block.projections())
    with torch.enable_grad(), intervene(graph.model, *edits):
        values = metric(graph.model(**batch.clean), batch)
        total = values.sum()
    if not values.requires_grad:
        raise UnsupportedError(f"{metric.name!r} has no gradient: use edge_patching")
    wanted = [ends[number] for number in range(len(graph.readers))]
    found = torch.autograd.grad(
        total, wanted, retain_graph=True, allow_unused=True, materialize_grads=True
    )
    for number, readers in enumerate(graph.readers):
        residual = residuals[number].detach().reshape(start.shape)
        blocks = space.of_readers(number)
        if readers.kind != "heads":
            behind = found[number].reshape(1, *start.shape)
            if readers.kind == "experts":
                experts = graph.blocks[readers.layer].experts
                assert experts is not None
                behind = _into_experts(experts, received[number].reshape(start.shape), behind[0])
            yield [*blocks.values()], widened(before_norm(graph, readers.norm, residual, behind))
            continue
        block = graph.blocks[readers.layer]
        for span in range(len(spans)):
            inside = spans.columns(span)
            gradient = found[number] if inside is None else found[number] * inside[..., None]
            behind = _into_heads(graph, block, ends[number], gradient, returned)
            before = widened(before_norm(graph, readers.norm, residual, behind))
            for at, kind in enumerate(INPUTS):
                yield [blocks[span, kind]], before[at :: len(INPUTS)]


def _into_experts(experts: Experts, received: Tensor, gradient: Tensor) -> Tensor:
    """The gradients at what each expert receives, through its output and its weight.

    Args:
        experts: of a block.
        received: by the block, [batch, tokens, width].
        gradient: at what the block returns.

    Returns:
        [experts, batch, tokens, width]. It is 0 where the expert is not chosen.
    """
    with torch.enable_grad():
        leaf = received.detach().clone().requires_grad_()
        parts = experts.parts(leaf)
    found = [
        torch.autograd.grad(
            part, leaf, gradient, retain_graph=True, allow_unused=True, materialize_grads=True
        )[0]
        for part in parts
    ]
    return torch.stack(found)


def _into_heads(
    graph: DecoderGraph,
    block: DecoderBlock,
    results: Tensor,
    gradient: Tensor,
    returned: dict[str, Tensor],
) -> Tensor:
    """The gradients at what q, k and v of each head are projections of.

    Args:
        graph: the decoder.
        block: its layer.
        results: of the heads, [batch, tokens, heads * head_dim].
        gradient: at the results.
        returned: what each projection returned.

    Returns:
        [heads * 3, batch, tokens, width].
    """
    names = list(block.projections())
    heads = block.heads.heads
    by_head = gradient.reshape(*gradient.shape[:2], heads, -1)
    number = torch.arange(heads, device=gradient.device)
    found: list[Tensor] = [gradient] * (3 * heads)
    # Heads that share columns have their gradient together. So one head of each group has its turn.
    for turn in range(block.group):
        alone = (by_head * (number % block.group == turn)[:, None]).reshape(gradient.shape)
        gradients = torch.autograd.grad(
            results, [returned[name] for name in names], alone,
            retain_graph=True, allow_unused=True, materialize_grads=True,
        )  # fmt: skip
        of = dict(zip(names, gradients, strict=True))
        for head in range(turn, heads, block.group):
            for at, kind in enumerate(INPUTS):
                place = block.reads(head, kind)
                weight, _ = linear(graph.module(place.module), place.module)
                found[3 * head + at] = of[place.module][..., place.columns] @ weight[place.columns]
    return torch.stack(found)
