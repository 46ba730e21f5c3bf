"""How much two causal graphs have in common."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import TYPE_CHECKING

import numpy as np

from ..._extras import extra
from ...errors import InvalidArgumentError
from ._pruning import check_effects
from .parts import edge_text

if TYPE_CHECKING:
    from . import CausalGraph

__all__ = ["GraphOverlap", "edge_auroc", "overlap"]


@dataclasses.dataclass(frozen=True)
class GraphOverlap:
    """The common edges and nodes of two graphs.

    Attributes:
        both: the ids of the edges that both graphs have, in the order of the first one.
        only_a, only_b: the ids of the edges that only one graph has.
        jaccard: the share of edges that are in both graphs, of those that are in at least one; 1 if
            neither graph has edges.
        nodes_jaccard: the same of nodes.
    """

    both: tuple[str, ...]
    only_a: tuple[str, ...]
    only_b: tuple[str, ...]
    jaccard: float
    nodes_jaccard: float


def overlap(a: CausalGraph, b: CausalGraph) -> GraphOverlap:
    """Compares the edges and nodes of two graphs. Effects do not count."""
    in_a, in_b = {edge.key for edge in a.edges}, {edge.key for edge in b.edges}
    return GraphOverlap(
        both=tuple(edge.id for edge in a.edges if edge.key in in_b),
        only_a=tuple(edge.id for edge in a.edges if edge.key not in in_b),
        only_b=tuple(edge.id for edge in b.edges if edge.key not in in_a),
        jaccard=_jaccard(in_a, in_b),
        nodes_jaccard=_jaccard({node.id for node in a.nodes}, {node.id for node in b.nodes}),
    )


def _jaccard(a: Collection[object], b: Collection[object]) -> float:
    either = len({*a, *b})
    return len({*a} & {*b}) / either if either else 1.0


def edge_auroc(scores: CausalGraph, truth: CausalGraph) -> float:
    """Scores how well absolute effects tell the edges of a known circuit from all others.

    It is the area under the ROC curve: the probability that an edge of the circuit has a larger
    absolute effect than an edge outside of it. Equal effects count half.

    Args:
        scores: all edges that could be in the circuit, with their effects; not pruned.
        truth: the circuit. Its effects do not count.

    Returns:
        from 0 to 1; 0.5 is chance.

    Raises:
        InvalidArgumentError: (a ValueError) an edge has no effect; an edge of the circuit has no
            score; the circuit has none of the edges, or all.
        MissingExtraError: scipy is not installed; the extra "circuits" brings it.
    """
    with extra("circuits", "edge_auroc"):
        from scipy.stats import rankdata

    check_effects(scores.edges)
    inside = {edge.key for edge in truth.edges}
    if missing := inside - {edge.key for edge in scores.edges}:
        raise InvalidArgumentError(
            f"edge {edge_text(*min(missing, key=str))!r} of the circuit has no score: give the "
            "scores of all edges, not a pruned graph"
        )
    positive = np.array([edge.key in inside for edge in scores.edges], dtype=bool)
    hits, others = int(positive.sum()), int((~positive).sum())
    if not hits or not others:
        raise InvalidArgumentError(
            f"the circuit has {hits} of {len(positive)} edges: the area needs edges of both kinds"
        )
    sizes = [abs(edge.effect or 0.0) for edge in scores.edges]
    ranks = rankdata(sizes)  # equal ones share the mean of their ranks
    return float((ranks[positive].sum() - hits * (hits + 1) / 2) / (hits * others))
