"""Effects of edges on examples, as a graph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from ...analysis.causal_graph import CausalGraph, Edge, EdgeKey
from ...analysis.significance import (
    Adjustment,
    adjusted,
    bootstrap_interval,
    permutation_test,
)
from ..metrics import Metric, widened
from ..running.runs import model_name, versions
from .edge_space import EdgeSpace

__all__ = ["effects_graph", "precise"]

_TOGETHER = 4096  # edges whose intervals take memory at the same time


def precise(values: Tensor) -> Tensor:
    """Numbers without a gradient, on the CPU, in float32 or float64."""
    return widened(values.detach().cpu())


def effects_graph(
    space: EdgeSpace,
    edges: Sequence[EdgeKey],
    effects: npt.NDArray[np.float32],
    *,
    confidence: float | None,
    p_values: Adjustment | None,
    metric: Metric,
    method: str,
    clean: Tensor,
    corrupted: Tensor,
    notes: Mapping[str, Any] | None = None,
) -> CausalGraph:
    """A graph of all nodes and of some edges with their mean effects.

    Args:
        space: all edges.
        edges: the edges.
        effects: [examples, edges], or their means, [1, edges].
        confidence: of the intervals; None: without them. One example has none.
        p_values: how they are adjusted, see `significance.adjusted`; None: without them.
        metric, method: for the graph.
        clean, corrupted: the metric of the examples, [examples].
        notes: for the graph, behind those about its spans.
    """
    means = effects.mean(axis=0, dtype=np.float64)
    ends: list[tuple[float | None, float | None]] = [(None, None)] * len(edges)
    if confidence is not None and len(effects) > 1:
        ends = []
        for first in range(0, len(edges), _TOGETHER):
            found = bootstrap_interval(effects[:, first : first + _TOGETHER], confidence)
            bounded = np.isfinite(found.low) & np.isfinite(found.high)
            ends += [
                (float(low), float(high)) if both else (None, None)
                for low, high, both in zip(found.low, found.high, bounded, strict=True)
            ]
    tested: Sequence[float | None] = [None] * len(edges)
    if p_values is not None and len(effects) > 1:
        tested = adjusted(permutation_test(effects), p_values).tolist()
    about: dict[str, Any] = {}
    if space.spans.index is not None:
        about = {"spans": list(space.spans.names), "edges of the model": space.size}
    return space.graph(
        (
            Edge(*key, effect=float(mean), low=low, high=high, p_value=p_value)
            for key, mean, (low, high), p_value in zip(edges, means, ends, tested, strict=True)
        ),
        model=model_name(space.decoder.model),
        metric=metric.name,
        method=method,
        clean=float(clean.double().mean()),
        corrupted=float(corrupted.double().mean()),
        examples=len(clean),
        versions=versions(),
        notes={**about, **(notes or {})},
    )
