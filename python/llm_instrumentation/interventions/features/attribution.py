"""Effects of all features of autoencoders at once, by integrated gradients::

    found = feature_attribution(model, prompts, logit_difference(), load_saes("saes"), steps=10)
    found.to_pandas(top_k=50)

The nodes are the features and the error of each site (Marks et al. 2024, "Sparse Feature
Circuits").
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import torch
from torch import Tensor, nn

from ...errors import InvalidArgumentError, UnsupportedError
from ...progress.bars import Progress, reported
from ..edits import Call, Edit
from ..installed import in_turn, intervene
from ..metrics import Metric
from ..nodes import node_names
from ..prompts import Direction, Prompts
from ..running.integration import points
from ..running.runs import (
    Floats,
    check_given,
    check_gradients,
    floats,
    frozen,
    model_name,
    runs_of,
    warn_of_flat,
)
from .coders import Coder
from .effects import FeatureEffects, FeatureNode
from .ways import Way, check_lengths, read, whole_coders

__all__ = ["FeatureAblation", "feature_attribution", "feature_patching"]

FeatureAblation = Literal["corrupted", "zero"]
"""What stands in place of a feature or an error: its value in the other run, or zero."""


def feature_attribution(
    model: nn.Module,
    prompts: Prompts,
    metric: Metric,
    saes: Mapping[Any, Any],
    *,
    steps: int | None = 10,
    ablation: FeatureAblation = "corrupted",
    direction: Direction = "noising",
    positions: Literal["each"] | None = None,
    batch_size: int = 8,
    strict: bool = True,
    progress: Progress = None,
) -> FeatureEffects:
    """Estimates the effect of each feature, and of each error, as if it alone were replaced.

    The value of a site is decode(f) + e, with the features f and the error e. Each site goes from
    its value in the base run to its ablated value in equal steps, all features and errors together,
    while the rest of the model runs on the base inputs. The effect of a feature is its difference
    times the mean gradient of the metric on the way, by the trapezoidal rule: integrated gradients,
    as in Marks et al. (2024). The effects of a site add up to the effect of replacing the whole
    site, except for the error of the rule. ``steps=None`` takes the gradient of the base run alone,
    for all sites in one run.

    The decoder is that of the base run in both runs: the scale of autoencoders that normalize their
    vectors, and what a skip connection passes on. The change of both counts to the error.

    Padding has no effect if the metric reads none. The gradients of parameters are not computed.
    `requires_grad` of the parameters is False until the function returns, so no other thread may
    train the model meanwhile.

    For a batch the model runs once on each of its inputs, and forward and backward `steps` + 1
    times for each site. Memory: the vectors of all sites in two runs of a batch, the features of
    one site, and 16 bytes for each feature of each site; with `positions` for each feature at each
    position.

    Args:
        model: the model, in evaluation mode.
        prompts: pairs of inputs.
        metric: what the effects are effects on. It needs a gradient.
        saes: autoencoders by site, as for `splice`. Sites have all positions, sequences and steps.
        steps: from the base to the ablated values; None: the gradient of the base run alone.
        ablation: "corrupted": the values of the other run. "zero": features and errors of zero.
            Then the corrupted inputs do not run.
        direction: "noising": the model runs on the clean inputs. "denoising": on the corrupted
            inputs, and gets clean values.
        positions: "each": a feature at each position is a node of its own, for prompts of one
            template. None: effects add up over positions.
        batch_size: examples that run together.
        strict: as for `splice`.
        progress: as for `activation_patching`; counts runs forward and backward.

    Raises:
        InvalidArgumentError: (a ValueError) as for `splice` and `activation_patching`; `steps` is
            below 1.
        UnsupportedError: (a TypeError) as for `splice` and `attribution_patching`; a module runs
            several times in a forward call, or its tensor is not [batch, tokens, width]; with
            "corrupted", the texts of a pair have unequal lengths.
        MetricError: (a ValueError) the metric is not one finite number for each example.
    """
    check_given(prompts, metric, batch_size)
    way = points(steps)
    if positions not in ("each", None):
        raise InvalidArgumentError(f'positions = {positions!r}: give "each" or None')
    _check_ablation(prompts, ablation, direction)
    runs = runs_of(prompts, batch_size, direction)
    check_gradients(model, metric)
    warn_of_flat(metric, steps, direction)
    coders = whole_coders(model, saes, strict=strict)
    prompts.check_for(model)
    sums = [_EffectSums(positions is not None) for _ in coders]
    base, source = np.zeros(len(prompts)), np.zeros(len(prompts))
    turns = [coders] if steps is None else [[coder] for coder in coders]
    done, total = 0, len(turns) * len(way) * -(-len(prompts) // batch_size)
    with (
        reported(progress, "Feature attribution") as told,
        torch.inference_mode(False),
        frozen(model),
    ):
        for run in runs:
            here, output = read(model, coders, run.base)
            base[run.examples] = floats(metric(output, run.batch))
            there = None
            if ablation == "corrupted":
                there, output = read(model, coders, run.source)
                source[run.examples] = floats(metric(output, run.batch))
            del output
            for turn in turns:
                ways = {coder: Way.of(coder, here, there) for coder in turn}
                for alpha, weight in way:
                    _add_gradients(model, run.base, run.batch, metric, ways, alpha, weight)
                    done += 1
                    told(done, total)
                for coder, one in ways.items():
                    sums[coders.index(coder)].add(one)
    corrupted, clean = (base, source) if direction == "denoising" else (source, base)
    method = "feature attribution" if steps is None else f"integrated gradients, {steps} steps"
    found = [one.result(len(prompts)) for one in sums]
    names = node_names(model, [coder.site for coder in coders])
    return FeatureEffects(
        sites=tuple(coder.site for coder in coders),
        names=names,
        features=tuple(one.features for one in found),
        errors=tuple(one.errors for one in found),
        features_std_error=tuple(one.features_std_error for one in found),
        errors_std_error=tuple(one.errors_std_error for one in found),
        at_positions=positions is not None,
        clean=clean,
        corrupted=None if ablation == "zero" else corrupted,
        metric=metric.name,
        method=method + (", zero ablation" if ablation == "zero" else ""),
        direction=direction,
        model=model_name(model),
    )


def feature_patching(
    model: nn.Module,
    prompts: Prompts,
    metric: Metric,
    saes: Mapping[Any, Any],
    nodes: Sequence[FeatureNode],
    *,
    ablation: FeatureAblation = "corrupted",
    direction: Direction = "noising",
    batch_size: int = 8,
    strict: bool = True,
    progress: Progress = None,
) -> list[FeatureNode]:
    """Measures the effects that `feature_attribution` estimates, by a run for each node.

    In the base run one feature, or one error, gets its ablated value, and all other features and
    errors of its site keep theirs.

    Args:
        model: as for `feature_attribution`.
        prompts: likewise.
        metric: likewise; it needs no gradient.
        saes: likewise, in the same order.
        nodes: what is measured, as ``found.top(20)`` of a `FeatureEffects`.
        ablation: as for `feature_attribution`.
        direction: likewise.
        batch_size: likewise.
        strict: likewise.
        progress: shows a bar; counts runs.

    Returns:
        the nodes in their order, with the measured effects and standard errors.

    Raises:
        InvalidArgumentError: (a ValueError) as for `feature_attribution`; a node is none of these
            autoencoders.
        UnsupportedError: (a TypeError) as for `feature_attribution`, without what gradients need.
        MetricError: (a ValueError) the metric is not one finite number for each example.
    """
    check_given(prompts, metric, batch_size)
    _check_ablation(prompts, ablation, direction)
    runs = runs_of(prompts, batch_size, direction)
    coders = whole_coders(model, saes, strict=strict)
    prompts.check_for(model)
    names = node_names(model, [coder.site for coder in coders])
    for node in nodes:
        if not 0 <= node.site < len(names) or node.id.rpartition("#")[0] != names[node.site]:
            raise InvalidArgumentError(
                f"{node.id!r} is no node of these autoencoders: give saes as they were given before"
            )
    effects = np.zeros((len(nodes), len(prompts)))
    done, total = 0, len(nodes) * -(-len(prompts) // batch_size)
    with reported(progress, "Feature patching") as told, torch.no_grad():
        for run in runs:
            here, output = read(model, coders, run.base)
            base = floats(metric(output, run.batch))
            there = read(model, coders, run.source)[0] if ablation == "corrupted" else None
            for site, coder in enumerate(coders):
                of_site = {number: node for number, node in enumerate(nodes) if node.site == site}
                if not of_site:
                    continue
                way = Way.of(coder, here, there)
                edits = [_change(coder, way, node) for node in of_site.values()]
                with in_turn(model, edits) as turn:
                    for place, number in enumerate(of_site):
                        with turn(place):
                            found = floats(metric(model(**run.base), run.batch))
                        effects[number, run.examples] = found - base
                        done += 1
                        told(done, total)
                del way, edits  # before those of the next site are made
    spread = effects.std(axis=1, ddof=1) if len(prompts) > 1 else np.full(len(nodes), np.nan)
    return [
        node._replace(effect=float(own.mean()), std_error=float(one / np.sqrt(len(prompts))))
        for node, own, one in zip(nodes, effects, spread, strict=True)
    ]


def _change(coder: Coder, way: Way, node: FeatureNode) -> Edit:
    """The edit that changes one node of a site."""
    return Edit(coder.site, "feature", lambda call: way.with_node(node).to(call.values))


def _check_ablation(prompts: Prompts, ablation: FeatureAblation, direction: Direction) -> None:
    if ablation not in get_args(FeatureAblation):
        raise InvalidArgumentError(f'ablation = {ablation!r}: give "corrupted" or "zero"')
    if ablation == "zero" and direction == "denoising":
        raise InvalidArgumentError('ablation = "zero" has no values to bring back: use "noising"')
    if ablation == "corrupted":
        check_lengths(prompts)


def _add_gradients(
    model: nn.Module, inputs: Mapping[str, Tensor], batch: Prompts, metric: Metric,
    ways: dict[Coder, Way], alpha: float, weight: float,
) -> None:  # fmt: skip
    """Runs forward and backward with the sites at a point.

    Raises:
        UnsupportedError: the metric has no gradient with regard to a site.
    """
    leaves = {coder: way.leaves(alpha) for coder, way in ways.items()}
    edits = []
    for coder, way in ways.items():

        def put(call: Call, way: Way = way, own: list[Tensor] = leaves[coder]) -> Tensor:
            made = way.value(own)
            if len(ways) > 1:  # all sites are at their base values, and gradients pass through
                made = call.values + (made - made.detach()).to(call.values)
            return made.to(call.values)

        edits.append(Edit(coder.site, "features", put))
    with torch.enable_grad(), intervene(model, *edits):
        value = metric(model(**inputs), batch).sum()
    if not value.requires_grad:
        raise UnsupportedError(
            f"no gradient leads from {metric.name!r} to the features: the metric does not depend "
            "on the sites, or has no gradient"
        )
    found = torch.autograd.grad(
        value, [leaf for own in leaves.values() for leaf in own], materialize_grads=True
    )
    for number, way in enumerate(ways.values()):
        way.add(list(found[2 * number : 2 * number + 2]), weight)


class _EffectSums:
    """Sums over examples, in float64, and sums of squares."""

    def __init__(self, at_positions: bool) -> None:
        self._at_positions = at_positions
        self._sums: list[Floats] | None = None

    def add(self, way: Way) -> None:
        """Adds the effects of a batch."""
        found = []
        for effects in way.effects():
            exact = effects.double()
            of_examples = exact if self._at_positions else exact.sum(1, keepdim=True)
            found += [floats(of_examples.sum(0)), floats(of_examples.square().sum(0))]
        if self._sums is None:
            self._sums = found
        else:
            for total, one in zip(self._sums, found, strict=True):
                total += one

    def result(self, examples: int) -> _Means:
        """The means, and their standard errors."""
        assert self._sums is not None
        features, squares, errors, error_squares = (one / examples for one in self._sums)
        return _Means(
            features,
            errors,
            _std_error(features, squares, examples),
            _std_error(errors, error_squares, examples),
        )


class _Means(NamedTuple):
    """Of a site; see `FeatureEffects`."""

    features: Floats
    errors: Floats
    features_std_error: Floats
    errors_std_error: Floats


def _std_error(mean: Floats, mean_square: Floats, examples: int) -> Floats:
    """The standard error of means; NaN for one example."""
    if examples < 2:
        return np.full_like(mean, np.nan)
    found: Floats = np.sqrt(np.maximum(mean_square - mean**2, 0) / (examples - 1))
    return found
