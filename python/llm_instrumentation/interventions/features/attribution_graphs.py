"""Attribution graphs as data: edges, influences on the logits, and pruning by influence."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from ...analysis.causal_graph import CausalGraph, Edge
from ...analysis.causal_graph import Node as GraphNode
from ...errors import InvalidArgumentError
from ..running.runs import Floats, versions

__all__ = ["AttributionGraph", "influences"]

Ints = npt.NDArray[np.int64]

_AT_ONCE = 64  # targets


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class AttributionGraph:
    """The edges between the features of transcoders on one text, up to some logits.

    The sources are the features, then the errors layer by layer, [layers, tokens], then the
    embeddings of the tokens. The targets are the features, then the logits. An edge is what a
    source adds to a target. So with `bias` and `left_out` the edges into a target add up to its
    value::

        edges.sum(axis=1) + bias + left_out == values

    Attributes:
        model: the model's name.
        tokens: the ids of the text's tokens, int64 [tokens].
        texts: the texts of the tokens.
        names: the name of each MLP in causal graphs, as "m3".
        features: layer, position and number of each feature, int64 [features, 3].
        logits: the ids of the tokens whose logits are targets, int64 [logits].
        logit_texts: their texts.
        probabilities: those that the model gives to them, float64 [logits].
        edges: float32, or float64 of a model in float64, [targets, sources].
        values: the activation of each feature, which is its pre-activation; of a logit the logit
            minus the mean over the vocabulary. float64 [targets].
        bias: what biases add to each target, float64 [targets].
        left_out: what active features add that are not in the graph, float64 [targets].
    """

    model: str
    tokens: npt.NDArray[np.int64]
    texts: tuple[str, ...]
    names: tuple[str, ...]
    features: npt.NDArray[np.int64]
    logits: npt.NDArray[np.int64]
    logit_texts: tuple[str, ...]
    probabilities: Floats
    edges: npt.NDArray[np.floating[Any]]
    values: Floats
    bias: Floats
    left_out: Floats

    def __repr__(self) -> str:
        return (
            f"<AttributionGraph of {self.model}: {len(self.features):,} features, "
            f"{len(self.logits)} logits, {len(self.tokens)} tokens, "
            f"{np.count_nonzero(self.edges):,} edges>"
        )

    @property
    def sources(self) -> list[str]:
        """The names of the columns of `edges`: "m3#17@5", "m3#error@5", "input@5"."""
        places = range(len(self.tokens))
        return [
            *(f"{self.names[layer]}#{feature}@{at}" for layer, at, feature in self.features),
            *(f"{name}#error@{at}" for name in self.names for at in places),
            *(f"input@{at}" for at in places),
        ]

    @property
    def targets(self) -> list[str]:
        """The names of the rows of `edges`: "m3#17@5", "logits#262@9"."""
        last = len(self.tokens) - 1
        return [
            *self.sources[: len(self.features)],
            *(f"logits#{token}@{last}" for token in self.logits),
        ]

    def influence(self) -> Floats:
        """The influence of each source on the logits, by all paths: float64 [sources].

        The absolute edges into each target are divided by their sum. The influence is the sum over
        all paths to a logit of the products of these shares, weighted by the probability of the
        logit (Ameisen et al. 2025, "Circuit Tracing", transformer-circuits.pub).
        """
        columns = np.arange(len(self.features))
        return _influences_in(self.edges, self.features[:, 0], columns, self._weights())

    def pruned(self, *, node_threshold: float = 0.8, edge_threshold: float = 0.98) -> CausalGraph:
        """The nodes and edges with the largest influences, as a causal graph.

        The features and errors with the largest influences stay, until all sources that stay have
        a share of `node_threshold` of all influence. Embeddings and logits always stay. Then edges
        stay likewise, by the influence of their target in the smaller graph times their share of
        it. Features without an edge from or to them, and errors without one from them, go. As
        published in "Circuit Tracing".

        Args:
            node_threshold: of the influence of all sources; 1 keeps all that have one.
            edge_threshold: of the influence of all edges.

        Returns:
            a graph with an effect on each edge: what its source adds to its target. `notes` have
            activations, influences and probabilities, which `save_neuronpedia` writes.

        Raises:
            InvalidArgumentError: (a ValueError) a threshold is not above 0 and at most 1.
        """
        for name, share in (("node_threshold", node_threshold), ("edge_threshold", edge_threshold)):
            if not 0 < share <= 1:
                raise InvalidArgumentError(f"{name} = {share}: give a share above 0, at most 1")
        all_features, all_inner = len(self.features), self.edges.shape[1] - len(self.tokens)
        influence = self.influence()
        stays = _largest(influence, node_threshold)
        stays[all_inner:] = True
        # From here on the rows and columns are those that stay.
        sources = np.flatnonzero(stays)
        count, inner = np.searchsorted(sources, (all_features, all_inner))
        logits = np.arange(all_features, len(self.edges))
        targets = np.append(sources[:count], logits)
        edges = self.edges[np.ix_(targets, sources)]
        layers = self.features[sources[:count], 0]
        reached = _influences_in(edges, layers, np.arange(count), self._weights())[:count]
        reached = np.append(reached, self._weights())
        chosen = _largest(reached[:, None] * _shares(edges), edge_threshold)
        left = np.ones(len(sources), dtype=bool)
        rows = np.ones(len(targets), dtype=bool)
        while True:  # each node that goes may leave others without edges
            before = left.copy()
            left[:inner] &= chosen[:, :inner].any(0)
            left[:count] &= chosen[:count].any(1)
            rows[:count] = left[:count]
            chosen &= rows[:, None] & left
            if (left == before).all():
                break
        settings = {"node_threshold": node_threshold, "edge_threshold": edge_threshold}
        to, of = np.nonzero(chosen)
        stays[sources] = left
        return self._graph(zip(targets[to], sources[of], strict=True), stays, influence, settings)

    def _weights(self) -> Floats:
        """The weights of the logits. Their sum is 1 if some probability is above 0."""
        total = self.probabilities.sum()
        if not total:
            return np.full(len(self.logits), 1 / len(self.logits))
        weights: Floats = self.probabilities / total
        return weights

    def _graph(
        self, chosen: Iterable[tuple[int, int]], stays: npt.NDArray[np.bool_], influence: Floats,
        settings: dict[str, float],
    ) -> CausalGraph:  # fmt: skip
        sources, targets = self.sources, self.targets
        logits = targets[len(self.features) :]
        nodes = [sources[at] for at in np.flatnonzero(stays)]
        order = np.argsort(-influence, kind="stable")
        together = np.empty_like(influence)  # of a node and all that have more influence
        together[order] = np.cumsum(influence[order]) / max(influence.sum(), 1e-300)
        features = range(len(self.features))
        about = {
            "activations": {sources[at]: float(self.values[at]) for at in features if stays[at]},
            "cumulative_influences": {
                sources[at]: float(together[at]) for at in np.flatnonzero(stays)
            },
            "probabilities": dict(zip(logits, self.probabilities.tolist(), strict=True)),
            "texts": dict(zip(logits, self.logit_texts, strict=True)),
            "token_ids": self.tokens.tolist(),
            "layers": len(self.names),
            "settings": settings,
        }
        return CausalGraph(
            tuple(GraphNode(name) for name in [*nodes, *logits]),
            tuple(
                Edge(sources[source], targets[target], effect=float(self.edges[target, source]))
                for target, source in chosen
            ),
            model=self.model,
            metric="the value of the target",
            method="attribution graph",
            examples=1,
            versions=versions(),
            notes={
                "tokens": {str(at): text for at, text in enumerate(self.texts)},
                "attribution": about,
            },
        )


def influences(
    logits: npt.NDArray[Any], weights: Floats, blocks: Iterable[tuple[Ints, npt.NDArray[Any]]]
) -> Floats:
    """The influence of each source on the logits. See `AttributionGraph.influence`.

    Args:
        logits: the edges into the logits, [logits, sources].
        weights: of the logits.
        blocks: the edges into features, [features, sources], and the places of these features among
            the sources. Features of later layers come first, and those of a block are of one layer.
            So the influence of a feature is known when its turn comes.
    """
    total: Floats = weights @ _shares(logits)
    for places, edges in blocks:
        total += total[places] @ _shares(edges)
    return total


def _influences_in(edges: npt.NDArray[Any], layers: Ints, columns: Ints, weights: Floats) -> Floats:
    """As `influences`, of the edges into features and then logits.

    Args:
        edges: [features and logits, sources].
        layers: of the features.
        columns: the places of the features among the sources.
        weights: of the logits.
    """

    def blocks() -> Iterator[tuple[Ints, npt.NDArray[Any]]]:
        for layer in np.unique(layers)[::-1]:
            rows = np.flatnonzero(layers == layer)
            for first in range(0, len(rows), _AT_ONCE):  # a matrix of shares takes memory
                some = rows[first : first + _AT_ONCE]
                yield columns[some], edges[some]

    return influences(edges[len(layers) :], weights, blocks())


def _shares(edges: npt.NDArray[Any]) -> Floats:
    sizes = np.abs(edges.astype(np.float64))
    sums = sizes.sum(axis=1, keepdims=True)
    found: Floats = np.divide(sizes, sums, out=np.zeros_like(sizes), where=sums > 0)
    return found


def _largest(values: Floats, share: float) -> npt.NDArray[np.bool_]:
    """The largest values, as few as have this share of the sum of all; none that is 0."""
    falling = np.sort(values, axis=None)[::-1]
    sums = np.cumsum(falling)
    if not sums[-1]:
        return np.zeros(values.shape, dtype=bool)
    last = min(int(np.searchsorted(sums, share * sums[-1])), len(sums) - 1)
    found: npt.NDArray[np.bool_] = (values >= falling[last]) & (values > 0)
    return found
