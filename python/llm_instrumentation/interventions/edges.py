"""Effects of the edges of a decoder: approximate ones of all edges, and exact ones::

graph = edge_attribution(model, prompts, logit_difference(), steps=5)
exact = edge_patching(model, prompts, logit_difference(), graph.pruned(top_k=50))
where = edge_attribution(model, prompts, logit_difference(), positions="each", top_k=10_000)
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable
from typing import cast, get_args

import numpy as np
import torch
from torch import Tensor, nn

from ..analysis.causal_graph import CausalGraph, Edge, EdgeInput, EdgeKey
from ..analysis.significance import Adjustment
from ..errors import InvalidArgumentError
from ..progress.bars import Progress, reported
from .decoders import DecoderGraph, PostNorms, decoder
from .metrics import Metric
from .paths.edge_effects import effects_graph, precise
from .paths.edge_space import EdgeSpace
from .paths.gradients import gradients
from .paths.norm_errors import NormErrors
from .paths.patched import Patched
from .paths.post_norms import check_choice
from .paths.residuals import Written, check_linear, written
from .paths.routing import RoutingChanges
from .paths.scores import Scores, add_products
from .paths.spans import check_roles_named
from .prompts import Direction, Positions, Prompts, Text
from .running.integration import points
from .running.runs import check_given, check_gradients, frozen, warn_of_flat

__all__ = ["edge_attribution", "edge_patching"]

# The position of a head stands before or behind the input: a1.h0@7<v>, a1.h0<v>@7.
_EDGE = re.compile(r"([^\s<>]+?)\s*->\s*([^\s<>]+?)(?:<([qkv])>)?(@[^\s<>]+)?")


def edge_attribution(
    model: nn.Module,
    prompts: Prompts,
    metric: Metric,
    *,
    steps: int | None = None,
    positions: Positions = None,
    top_k: int | None = None,
    post_norms: PostNorms = "recomputed",
    experts: bool = False,
    batch_size: int = 8,
    confidence: float | None = 0.95,
    progress: Progress = None,
) -> CausalGraph:
    """Approximates the effects of all edges with gradients: EAP, or EAP-IG.

    The effect of an edge is what its source writes to the residual stream in the corrupted run
    minus what it writes in the clean run, times the gradient of the metric at the input of its
    target before the norm, summed over tokens and width. So it estimates the metric with the
    corrupted value on this edge, minus the metric of the clean run. q, k and v of each head have
    gradients of their own, also where heads share keys and values.

    EAP (Nanda 2023; Syed et al. 2023) takes the gradient of the clean run. EAP-IG (Hanna et al.
    2024) takes the mean of the gradients on the way from the clean embeddings to the corrupted
    ones, by the trapezoidal rule. That helps where a gradient is flat, as in a saturated softmax.

    With `positions` each node is at a position or span: what the part writes there. An edge
    ``a0.h1@3->a1.h2@7<k>`` is what head 2 returns at token 7, because its key at token 3 reads what
    head 1 has written at token 3. An edge into q, an MLP or the logits joins equal positions. The
    effects add up to those without `positions`, if the metric reads no padding. Attention is
    differentiated once for each span, so the time grows with their number, and the number of edges
    with its square.

    Prompts with `corrupted_spans`, as texts of unequal lengths, need `positions` that are names of
    spans: roles. What the source writes differently at the first token of a role is what it writes
    at the first token of this role in the corrupted text minus that in the clean text, and so on.
    Other tokens have no counterpart, so no edge begins there. A head may read a role from there:
    ``a0.h1@subject->a1.h2@rest<k>``. So these effects do not add up to any without `positions`.
    Other prompts may have names of spans too; all of their edges exist.

    Where a norm follows the attention (a post-norm, as in Gemma 2 and 3 and OLMo 2), the heads of a
    layer share its scale. Then what one head writes differently is what the norm returns with the
    corrupted value of this head and the clean values of the others, minus what it returns in the
    clean run. `edge_patching` measures the same difference. `post_norms` chooses a linear norm
    instead, so that the effects of the heads of a layer add up. `CausalGraph.method` names the
    choice. The note "post-norm errors" of a graph with linear norms has an error for each layer:
    the size of the difference from the exact changes, divided by the size of these.

    With `experts` each expert of a mixture is a node, as ``m0.e5``, and a shared one is
    ``m0.shared``. It writes its part of what the block returns: its output, times its weight. The
    part is 0 at tokens for which the router does not choose the expert. What a source writes
    differently includes a change of the choice. An edge into an expert passes through its output
    and through its weight. The gradient knows both, but not the choice. So the effect of an edge
    into an expert is 0 at tokens for which the expert is not chosen, even if the edge would have it
    chosen: `edge_patching` measures that. The note "routing changes" of a graph has for each block
    the share of tokens at which other experts write in the corrupted run.

    Memory is bounded by the batch. Beside what a forward and backward pass takes there are about 15
    tensors of the size [batch, tokens, width] for each layer, and about 12 for each head of one
    layer. With `experts` there are 4 more for each expert of each layer. The effects take 4 bytes
    for each example and edge, or with `top_k` 8 bytes for each edge, and 4 for each example and
    edge that is kept.

    A warning says that the gradient of the metric is 0 in the clean run, and there are no `steps`.

    Args:
        model: a decoder, see `register_decoder`, in evaluation mode.
        prompts: the examples.
        metric: what the effects are effects on. It needs a gradient.
        steps: of EAP-IG; it takes a forward and backward pass more than that. None:
            EAP.
        positions: see `Positions`. None: edges sum over all tokens.
        top_k: the graph has only this many edges, those with the largest absolute effects. With
            intervals the model runs twice as often. None: all edges.
        post_norms: how a change of one head passes a norm behind the heads, see `PostNorms`. A
            warning says that a model has no such norm, so that the choice makes no difference.
        experts: each expert of a mixture is a node. False: a block with experts is one node.
        batch_size: examples that run together.
        confidence: of the intervals of the effects over the examples, by `bootstrap_interval`; an
            interval is None for one example, or where the examples do not bound it. None: without
            intervals, which is faster for a large number of edges.
        progress: shows a bar; see `Progress`.

    Returns:
        a graph of all edges, or of the largest. Prune it for a circuit.

    Raises:
        UnsupportedError: (a TypeError) the model is no decoder that is known, or its projections
            are quantised; the metric has no gradient; the prompts have `corrupted_spans`, and
            `positions` are no names, or there are `steps`: these mix embeddings column by column;
            while the model runs: the residual stream is
            not the sum that the layout says, or an input of one head acts on another one; the norm
            behind heads has no scale that could be frozen; see also `intervene`.
        InvalidArgumentError: (a ValueError) an argument is out of its range; `positions` do not fit
            the prompts, see `Positions`; there are more edges than a graph holds; `experts`, and
            the model has none.
        SpanError: (a ValueError) the prompts have no such span.
    """
    way = points(steps)
    check_given(prompts, metric, batch_size)
    check_roles_named(positions, prompts, steps)
    check_gradients(model, metric)
    warn_of_flat(metric, steps, "noising")
    if torch.is_inference_mode_enabled():
        raise InvalidArgumentError(
            "attribution needs gradients: call it outside of torch.inference_mode()"
        )
    graph = decoder(model, experts=experts)
    check_choice(post_norms, graph)
    check_linear(graph)
    prompts.check_for(model)
    space = EdgeSpace.of(graph, positions, prompts)
    scores = Scores.of(space, len(prompts), top_k)
    metrics: list[list[Tensor]] = [[], []]
    rounds = 1 if top_k is None or confidence is None else 2
    done, total = 0, len(prompts) * len(way) * rounds
    errors, routing = NormErrors(post_norms), RoutingChanges()
    with reported(progress, "edge attribution") as tell, frozen(model):
        for turn in range(rounds):
            if turn:
                scores = scores.of_largest(len(prompts))
                metrics = [[], []]
            first = 0
            for batch in prompts.batches(batch_size):
                rows = slice(first, first + len(batch))
                batch = batch.as_run_on("clean")
                clean, corrupted = _both(graph, batch, metric, metrics, check=not first)
                spans = space.spans.part(rows).on(clean.values[0].device)
                corrupted = corrupted.at_counterparts(clean, spans)
                if not turn:
                    routing.add(clean, corrupted, batch, spans)
                difference, embedded = corrupted.minus(clean), clean.values[0]
                del clean, corrupted
                if not turn:
                    errors.add(difference)
                for share, weight in way:
                    start = (embedded + share * difference.values[0]).to(embedded.dtype)
                    for blocks, found in gradients(space, spans, batch, start, metric):
                        add_products(
                            scores, rows, spans, blocks, found, difference, weight, post_norms
                        )
                    done += len(batch)
                    tell(done, total)
                first = rows.stop
    keys, effects = scores.found(space)
    method = "EAP" if steps is None else f"EAP-IG, {steps} steps"
    if graph.post_norms:
        method += f", {post_norms} post-norms"
    method += _by_role(space)
    return effects_graph(
        space, keys, effects, confidence=confidence, p_values=None, metric=metric, method=method,
        clean=torch.cat(metrics[0]), corrupted=torch.cat(metrics[1]),
        notes={**errors.notes(), **routing.notes()},
    )  # fmt: skip


def _by_role(space: EdgeSpace) -> str:
    """The end of the name of a method: how the tokens of two texts belong together."""
    return "" if space.spans.others is None else ", by role"


def _both(
    graph: DecoderGraph,
    batch: Prompts,
    metric: Metric,
    metrics: list[list[Tensor]],
    *,
    check: bool,
) -> tuple[Written, Written]:
    """The clean and the corrupted run of a batch. Their metrics are appended to the two lists."""
    found = []
    for text, inputs, values in zip(
        get_args(Text), (batch.clean, batch.corrupted), metrics, strict=True
    ):
        run, output = written(graph, inputs, check=check)
        values.append(precise(metric(output, batch.as_run_on(text))))
        found.append(run)
    return found[0], found[1]


def edge_patching(
    model: nn.Module,
    prompts: Prompts,
    metric: Metric,
    edges: CausalGraph | Iterable[Edge | EdgeKey | str] | None = None,
    *,
    direction: Direction = "noising",
    positions: Positions = None,
    experts: bool = False,
    batch_size: int = 32,
    confidence: float | None = 0.95,
    p_values: Adjustment | None = None,
    progress: Progress = None,
) -> CausalGraph:
    """Measures the effect of each edge in a separate run: path patching on a decoder.

    The target of the edge reads a sum in which what the source has written is that of the other
    run. All other readers of the source see its own value. What follows from the changed target
    flows on to the logits. The source alone is changed: a norm behind heads is calculated anew,
    with the other heads of the layer as they were. So nothing is approximated.

    With `experts` the part of one expert is calculated anew: whether the router chooses it for the
    changed input, its weight among those that are chosen, and its output. The parts of the other
    experts stay. So a change of the choice counts, in the edges into the expert that comes and into
    the one that goes.

    In prompts with `corrupted_spans`, as texts of unequal lengths, an edge begins at a role, see
    `edge_attribution`. The first token of the role gets what the source has written at the first
    token of this role in the other run, and so on. With "denoising" the corrupted text runs, so
    queries and keys stand in its order: a query reads no later role.

    It takes a forward pass of the examples for each edge. So measure the edges that
    `edge_attribution` found, or those of a small model.

    Args:
        model: a decoder, see `register_decoder`, in evaluation mode.
        prompts: the examples.
        metric: what the effects are effects on.
        edges: which; texts as "m0->a1.h0<v>". One into a head without an input enters q, k and v
            at once. None: all edges of the model.
        positions: names the positions of the edges, see `Positions`. An edge from a node without a
            position has the values of all tokens, which must have counterparts; one to a node
            without a position acts on what the node returns anywhere.
        experts: each expert of a mixture is a node, as in `edge_attribution`.
        direction: see `Direction`. The effect is the metric with the patch minus that of the run
            that it is put into. By default it is what `edge_attribution` estimates. (For nodes
            `activation_patching` puts clean values into the corrupted run by default.)
        batch_size: examples that run together, each with one edge.
        confidence: of the intervals of the effects over the examples; None: without intervals.
        p_values: how the p-values of the edges are adjusted for their number, see `adjusted`; None:
            without p-values. They are those of `permutation_test`, so none is below 0.0002 times
            the number of edges with "holm".
        progress: shows a bar; see `Progress`.

    Returns:
        a graph of all nodes, and of these edges. Its `clean` and `corrupted` are the metric of the
        two runs.

    Raises:
        UnsupportedError: (a TypeError) as for `edge_attribution`.
        InvalidArgumentError: (a ValueError) there is no such edge; an argument is out of its range;
            `positions` do not fit the prompts; there are more edges than a graph holds.
        SpanError: (a ValueError) the prompts have no such span.
    """
    if direction not in get_args(Direction):
        raise InvalidArgumentError(f'direction = {direction!r}: give "noising" or "denoising"')
    check_given(prompts, metric, batch_size)
    check_roles_named(positions, prompts)
    graph = decoder(model, experts=experts)
    check_linear(graph)
    prompts.check_for(model)
    text: Text = "clean" if direction == "noising" else "corrupted"
    space = EdgeSpace.of(graph, positions, prompts, text)
    if edges is None:
        space.check_size()
        keys = list(space.edges())
    else:
        keys = list(dict.fromkeys(map(_key, _edges(edges))))
    if not keys:
        raise InvalidArgumentError("edges is empty: give some, or None for all")
    ends = [space.ends(key) for key in keys]
    effects = np.zeros((len(prompts), len(keys)), np.float32)
    metrics: list[list[Tensor]] = [[], []]
    with reported(progress, "edge patching") as tell:
        first = 0
        for batch in prompts.batches(batch_size):
            batch = batch.as_run_on(text)
            runs = _both(graph, batch, metric, metrics, check=not first)
            base, other = runs if direction == "noising" else runs[::-1]
            inputs = batch.clean if direction == "noising" else batch.corrupted
            spans = space.spans.part(slice(first, first + len(batch))).on(base.values[0].device)
            difference = other.at_counterparts(base, spans).minus(base)
            del runs, base, other
            patched = Patched(space, spans, batch, inputs, metric, difference, ends)
            together = max(1, batch_size // len(batch))
            for begin in range(0, len(keys), together):
                some = patched.effects(ends[begin : begin + together])
                rows = slice(first, first + len(batch))
                effects[rows, begin : begin + together] = some.T.numpy()
                tell(first * len(keys) + min(begin + together, len(keys)) * len(batch),
                     len(prompts) * len(keys))  # fmt: skip
            first += len(batch)
    found = effects_graph(
        space, keys, effects, confidence=confidence, p_values=p_values, metric=metric,
        method=f"edge patching, {direction}{_by_role(space)}",
        clean=torch.cat(metrics[0]), corrupted=torch.cat(metrics[1]),
    )  # fmt: skip
    return (
        dataclasses.replace(found, nodes=edges.nodes) if isinstance(edges, CausalGraph) else found
    )


def _edges(edges: CausalGraph | Iterable[Edge | EdgeKey | str]) -> Iterable[Edge | EdgeKey | str]:
    if isinstance(edges, CausalGraph):
        return edges.edges
    return [edges] if isinstance(edges, str) else edges


def _key(edge: Edge | EdgeKey | str) -> EdgeKey:
    if isinstance(edge, Edge):
        return edge.key
    if isinstance(edge, EdgeKey):
        return edge
    found = _EDGE.fullmatch(edge) if isinstance(edge, str) else None
    if found is None:
        raise InvalidArgumentError(f'{edge!r} is no edge: give them as "m0->a1.h0<v>"')
    target = found[2] + (found[4] or "")
    return EdgeKey(found[1], target, cast("EdgeInput | None", found[3]))
