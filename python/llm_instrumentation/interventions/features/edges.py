"""Edges between features: a sparse feature circuit as a causal graph::

found = feature_attribution(model, prompts, metric, saes, positions="each")
graph = feature_edges(model, prompts, metric, saes, found, top_k=60)
graph.pruned(top_k=100)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ...analysis.causal_graph import CausalGraph, Edge
from ...analysis.causal_graph import Node as GraphNode
from ...errors import InvalidArgumentError
from ...progress.bars import Progress, reported
from ..edits import Call, Edit
from ..installed import intervene
from ..metrics import Metric, widened
from ..nodes import node_names
from ..prompts import Prompts
from ..running.runs import Floats, Run, check_given, check_gradients, frozen, runs_of, versions
from .coders import Coder
from .effects import FeatureEffects, FeatureNode
from .ways import Way, check_lengths, read, whole_coders

__all__ = ["feature_edges"]


def feature_edges(
    model: nn.Module,
    prompts: Prompts,
    metric: Metric,
    saes: Mapping[Any, Any],
    found: FeatureEffects,
    *,
    top_k: int = 50,
    batch_size: int = 8,
    strict: bool = True,
    progress: Progress = None,
) -> CausalGraph:
    """Estimates what the strongest features and errors pass on to each other, and to the metric.

    An edge is the change of its source times the gradient of its target with regard to the source,
    times the gradient of the metric with regard to the target (Marks et al. 2024). So it estimates
    the part of the effect of the source that goes through this target. Paths through the features
    and errors of other autoencoders do not count: each is an edge of its own. An edge to ``logits``
    goes to the metric by no further autoencoder.

    All gradients are those of the base run. To all targets together, also those that are not
    chosen, the edges of a node add up to its effect by ``feature_attribution(steps=None)``, except
    for rounding. Attention and norms are differentiated with the rest of the model.

    For a batch the model runs on both inputs and twice with gradients, and there is a backward pass
    for each node. Memory: the features of all sites for a batch, several times.

    Args:
        model: the model, as for `feature_attribution`.
        prompts: those of `found`.
        metric: that of `found`.
        saes: those of `found`, in the same order.
        found: effects that choose the nodes. Direction, ablation and positions are its own.
        top_k: the nodes with the largest absolute effects are chosen.
        batch_size: examples that run together.
        strict: as for `splice`.
        progress: shows a bar; counts backward passes.

    Returns:
        the nodes with their effects in `found`, "logits", and the edges that are not 0. Prune it
        for a circuit.

    Raises:
        InvalidArgumentError: (a ValueError) `found` is of other autoencoders; no node has an
            effect; as for `feature_attribution`.
        UnsupportedError, MetricError: as for `feature_attribution`.
    """
    check_given(prompts, metric, batch_size)
    check_gradients(model, metric)
    if found.corrupted is not None:
        check_lengths(prompts)
    runs = runs_of(prompts, batch_size, found.direction)
    coders = whole_coders(model, saes, strict=strict)
    prompts.check_for(model)
    if node_names(model, [coder.site for coder in coders]) != found.names:
        raise InvalidArgumentError(
            f"found has the sites {', '.join(found.names)}: give saes as they were given before"
        )
    nodes = found.top(top_k)
    if not nodes:
        raise InvalidArgumentError("no feature and no error has an effect: there are no edges")
    weights = np.zeros((len(nodes), len(nodes) + 1))  # by source and target; last: the metric
    done, total = 0, (len(nodes) + 1) * -(-len(prompts) // batch_size)
    with reported(progress, "Feature edges") as told, torch.inference_mode(False), frozen(model):
        for run in runs:
            here, _ = read(model, coders, run.base)
            there = None if found.corrupted is None else read(model, coders, run.source)[0]
            ways = [Way.of(coder, here, there) for coder in coders]
            cut = _Cut(model, coders, ways, run, metric)
            for number, target in enumerate([*nodes, None]):
                weights[:, number] += cut.edges(nodes, target)
                done += 1
                told(done, total)
    weights /= len(prompts)
    names = [*(node.id for node in nodes), "logits"]
    return CausalGraph(
        (*(GraphNode(node.id, effect=node.effect) for node in nodes), GraphNode("logits")),
        tuple(
            Edge(names[source], names[target], effect=weights[source, target])
            for source, target in zip(*np.nonzero(weights), strict=True)
        ),
        model=found.model,
        metric=found.metric,
        method=f"feature edges, nodes by {found.method}, {found.direction}",
        clean=float(found.clean.mean()),
        corrupted=None if found.corrupted is None else float(found.corrupted.mean()),
        examples=len(prompts),
        versions=versions(),
    )


class _Cut:
    """A base run in which each site begins anew: its features and its error are leaves.

    Args:
        model: the model.
        coders: the autoencoders.
        ways: of each, from the base to the ablated values.
        run: the batch.
        metric: the metric.
    """

    def __init__(
        self, model: nn.Module, coders: list[Coder], ways: list[Way], run: Run, metric: Metric
    ) -> None:
        self._ways = ways
        self._leaves = [way.leaves(0) for way in ways]
        self._arriving: list[list[Tensor]] = [[] for _ in coders]
        # What the metric does with each of them, through all of the model behind it.
        self._gradients = self._run(model, coders, run, metric, cut=False)
        self._value = self._run(model, coders, run, metric, cut=True)[0]

    def _run(
        self, model: nn.Module, coders: list[Coder], run: Run, metric: Metric, *, cut: bool
    ) -> list[Tensor]:
        """Without `cut` the gradients of all leaves; with it the metric of the cut run."""
        edits = []
        for number, coder in enumerate(coders):
            given: list[Tensor] = []

            def put(
                call: Call, coder: Coder = coder, number: int = number, given: list[Tensor] = given
            ) -> Tensor:
                way = self._ways[number]
                reads = given.pop() if coder.source is not None else None
                made = way.value(self._leaves[number])
                if not cut:
                    return call.values + (made - made.detach()).to(call.values)
                split = coder.split(call.values, reads)
                rebuilt = coder.rebuilt(split.features, way.given)
                error = widened(call.values) - rebuilt.to(widened(call.values))
                self._arriving[number] = [split.features, error]
                return made.to(call.values)

            edits += [*coder.reading(given), Edit(coder.site, "features", put)]
        with torch.enable_grad(), intervene(model, *edits):
            value = metric(model(**run.base), run.batch).sum()
        if cut:
            return [value]
        leaves = [leaf for own in self._leaves for leaf in own]
        return list(torch.autograd.grad(value, leaves, materialize_grads=True))

    def edges(self, nodes: Sequence[FeatureNode], target: FeatureNode | None) -> Floats:
        """The sums over the examples of the edges from nodes to a target; None: the metric."""
        value = self._value
        if target is not None:
            kind = int(target.feature is None)
            arriving = self._arriving[target.site][kind]
            gradient = self._gradients[2 * target.site + kind]
            value = _part(arriving * gradient, target).sum()
        found = np.zeros(len(nodes))
        if not value.requires_grad:  # nothing leads to the first site
            return found
        leaves = [leaf for own in self._leaves for leaf in own]
        gradients = torch.autograd.grad(
            value, leaves, retain_graph=True, allow_unused=True, materialize_grads=False
        )
        for number, node in enumerate(nodes):
            kind, way = int(node.feature is None), self._ways[node.site]
            gradient_here = gradients[2 * node.site + kind]
            if gradient_here is None or (target is not None and node.site == target.site):
                continue
            change = way.error_change if kind else way.feature_change
            found[number] = float(_part(gradient_here * change, node).double().sum())
        return found


def _part(tensor: Tensor, node: FeatureNode) -> Tensor:
    """The elements of a node in features or errors, [batch, tokens, ...]."""
    here = tensor if node.position is None else tensor[:, node.position]
    return here if node.feature is None else here[..., node.feature]
