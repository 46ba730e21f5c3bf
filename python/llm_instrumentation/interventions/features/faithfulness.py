"""What a model does with the strongest features alone: the faithfulness of feature circuits."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor, nn

from ...errors import InvalidArgumentError
from ...progress.bars import Progress, reported
from ..edits import Edit
from ..installed import intervene
from ..metrics import Metric, widened
from ..nodes import node_names
from ..prompts import Prompts
from ..running.runs import check_given, floats
from .coders import Coder, Split, splicing_edits
from .effects import FeatureEffects
from .means import Over, means_of
from .ways import Mean, Read, Way, check_lengths, read, whole_coders

__all__ = ["CircuitAblation", "CircuitErrors", "FeatureFaithfulness", "feature_faithfulness"]

CircuitAblation = Literal["corrupted", "mean", "zero"]
"""The values of features outside of a circuit: those of the corrupted text, their mean over the
clean texts, or zero. Of errors too, if these are nodes.
"""
CircuitErrors = Literal["keep", "ablate"]
"""The errors of reconstructions: all are kept, or they are nodes as features are."""

_AS_GOOD_AS_EQUAL = 1e-4  # of the metric: a difference of rounding


@dataclasses.dataclass(frozen=True)
class FeatureFaithfulness:
    """The faithfulness of circuits of features, of several sizes.

    A faithfulness is (metric of the circuit - metric of the empty circuit) / (metric of the model -
    metric of the empty circuit).

    Attributes:
        sizes: the nodes that were asked for.
        nodes: the nodes of each circuit: fewer if fewer have an effect.
        values: the metric of each circuit, the mean over the examples.
        faithfulness: of each circuit: 1 is the model.
        without: the faithfulness of the model without the circuit: completeness. 0 if the circuit
            has all that matters.
        clean, empty: the metric of the model, and of the empty circuit.
        ablation, errors: as given.
        over: of "mean", as given.
    """

    sizes: tuple[int, ...]
    nodes: tuple[int, ...]
    values: tuple[float, ...]
    faithfulness: tuple[float, ...]
    without: tuple[float, ...]
    clean: float
    empty: float
    ablation: CircuitAblation
    errors: CircuitErrors
    over: Over = "tokens"


def feature_faithfulness(
    model: nn.Module,
    prompts: Prompts,
    metric: Metric,
    saes: Mapping[Any, Any],
    found: FeatureEffects,
    *,
    sizes: Sequence[int] = (10, 30, 100, 300),
    ablation: CircuitAblation = "corrupted",
    over: Over = "tokens",
    errors: CircuitErrors = "keep",
    batch_size: int = 8,
    strict: bool = True,
    progress: Progress = None,
) -> FeatureFaithfulness:
    """Runs the clean inputs with the strongest features alone, and without them.

    At each site the features of the circuit have the values that the autoencoder makes in this run.
    All other features have their ablated values. The decoder is that of the clean run, as for
    `feature_attribution`.

    Marks et al. (2024) take means over the examples at each position, of features and of errors:
    ``ablation="mean", over="sequences", errors="ablate"``, for prompts of one template. The model
    then runs once more on all clean texts, before the circuits. Padding is in no mean.

    Args:
        model: the model, as for `feature_attribution`.
        prompts: the examples.
        metric: what is measured; it needs no gradient.
        saes: those of `found`, in the same order.
        found: effects that choose the nodes of the circuits, by their absolute size.
        sizes: how many nodes the circuits have, rising.
        ablation: the values of the other features, see `CircuitAblation`. Only "corrupted" runs the
            corrupted texts.
        over: of "mean", as for the edit `mean`: "tokens", one mean over all tokens of all clean
            texts. "sequences", a mean for each position over the clean texts; it needs two texts.
        errors: "keep": all errors are as in this run, and circuits have features alone. "ablate":
            errors are nodes, and have ablated values outside of the circuit.
        batch_size: examples that run together.
        strict: as for `splice`.
        progress: shows a bar; counts runs.

    Raises:
        InvalidArgumentError: (a ValueError) `found` is of other autoencoders or positions; the
            sizes do not rise from 1; the metric of the empty circuit is that of the model; `over`
            without "mean"; as for `feature_attribution`.
        UnsupportedError: (a TypeError) as for `feature_patching`; with "mean", it is not known
            which tokens of a site are padding.
        MetricError: as for `feature_patching`.
    """
    check_given(prompts, metric, batch_size)
    if not sizes or sizes[0] < 1 or any(a >= b for a, b in itertools.pairwise(sizes)):
        raise InvalidArgumentError(f"sizes = {tuple(sizes)}: give rising numbers from 1 up")
    for name, value, kind in (
        ("ablation", ablation, CircuitAblation), ("errors", errors, CircuitErrors),
        ("over", over, Over),
    ):  # fmt: skip
        if value not in get_args(kind):
            raise InvalidArgumentError(f"{name} = {value!r}: choose one of {get_args(kind)}")
    if over == "sequences" and (ablation != "mean" or len(prompts) < 2):
        raise InvalidArgumentError(
            'over = "sequences" is of ablation = "mean", and needs two texts: there are '
            f"ablation = {ablation!r} and {len(prompts)}"
        )
    if ablation == "corrupted":
        check_lengths(prompts)
    coders = whole_coders(model, saes, strict=strict)
    prompts.check_for(model)
    if node_names(model, [coder.site for coder in coders]) != found.names:
        raise InvalidArgumentError(
            f"found has the sites {', '.join(found.names)}: give saes as they were given before"
        )
    chosen = [found.top(size, errors=errors == "ablate") for size in sizes]
    masks = [_Mask(found, [])]
    masks += [_Mask(found, nodes) for nodes in chosen]
    masks += [_Mask(found, nodes).inverted() for nodes in chosen]
    values = np.zeros((1 + len(masks), len(prompts)))
    done, total, first = 0, len(masks) * -(-len(prompts) // batch_size), 0
    with reported(progress, "Feature faithfulness") as told, torch.no_grad():
        there: Mapping[Coder, Read | Mean] | None = None
        if ablation == "mean":
            there = means_of(model, coders, prompts.batches(batch_size), over)
        for batch in prompts.batches(batch_size):
            rows = slice(first, first := first + len(batch))
            here, output = read(model, coders, batch.clean)
            values[0, rows] = floats(metric(output, batch))
            if ablation == "corrupted":
                there = read(model, coders, batch.corrupted)[0]
            ways = [Way.of(coder, here, there) for coder in coders]
            for number, mask in enumerate(masks):
                edits = _edits(coders, ways, mask, keep=errors == "keep")
                with intervene(model, *edits):
                    found_now = floats(metric(model(**batch.clean), batch))
                values[1 + number, rows] = found_now
                done += 1
                told(done, total)
    clean, empty, *means = values.mean(axis=1).tolist()
    if abs(clean - empty) <= _AS_GOOD_AS_EQUAL * float(np.abs(values[:2]).mean()):
        raise InvalidArgumentError(
            f"{metric.name!r} is {clean:.6g} of the model and {empty:.6g} of the empty circuit, so "
            "there is nothing that a circuit could do: choose other texts or sites"
        )
    shares = [(one - empty) / (clean - empty) for one in means]
    count = len(sizes)
    return FeatureFaithfulness(
        tuple(sizes), tuple(len(nodes) for nodes in chosen), tuple(means[:count]),
        tuple(shares[:count]), tuple(shares[count:]), clean, empty, ablation, errors, over,
    )  # fmt: skip


class _Mask:
    """Which features and errors are in a circuit, of each site [positions, features or 1].

    Args:
        found: says how many there are.
        nodes: the circuit.
    """

    def __init__(self, found: FeatureEffects, nodes: Sequence[Any]) -> None:
        self.at_positions = found.at_positions
        self.features = [torch.zeros(one.shape, dtype=torch.bool) for one in found.features]
        self.errors = [torch.zeros(len(one), 1, dtype=torch.bool) for one in found.errors]
        for node in nodes:
            row = 0 if node.position is None else node.position
            if node.feature is None:
                self.errors[node.site][row] = True
            else:
                self.features[node.site][row, node.feature] = True

    def inverted(self) -> _Mask:
        """All others."""
        self.features = [~one for one in self.features]
        self.errors = [~one for one in self.errors]
        return self

    def check(self, number: int, features: Tensor) -> None:
        """
        Raises:
            InvalidArgumentError: the run has other positions or features than the effects.
        """
        rows, width = self.features[number].shape
        if width != features.shape[-1] or (self.at_positions and rows != features.shape[1]):
            raise InvalidArgumentError(
                f"found has {rows} positions and {width} features, the run {list(features.shape)}: "
                "give the prompts and autoencoders of found"
            )


def _edits(coders: list[Coder], ways: list[Way], mask: _Mask, *, keep: bool) -> list[Edit]:
    """Edits that put ablated values outside of a circuit.

    The decoder is that of the clean run, as in attribution: else what a skip connection passes on
    in this run would count twice, in the reconstruction and in the ablated error.
    """

    def value(coder: Coder, split: Split) -> Tensor:
        number = coders.index(coder)
        way = ways[number]
        mask.check(number, split.features)
        ablated = (way.features + way.feature_change).to(split.features)
        features = torch.where(mask.features[number].to(ablated.device), split.features, ablated)
        made, before = (coder.rebuilt(one, way.given) for one in (features, split.features))
        error = widened(split.value) - before.to(widened(split.value))
        if not keep:
            other = (way.error + way.error_change).to(error)
            error = torch.where(mask.errors[number].to(error.device), error, other)
        return (made.to(error) + error).to(split.value)

    return splicing_edits(coders, value)
