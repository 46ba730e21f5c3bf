"""Effects of the features of autoencoders on a metric: a table, and a graph."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..._extras import extra
from ..._html import block, table
from ...analysis.causal_graph import CausalGraph
from ...analysis.causal_graph import Node as GraphNode
from ...errors import InvalidArgumentError
from ..prompts import Direction
from ..running.runs import Floats, versions
from ..sites import Site

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["FeatureEffects", "FeatureNode"]

_SHOWN = 20  # rows in a notebook


class FeatureNode(NamedTuple):
    """A feature of a site, or the error of its reconstruction.

    Attributes:
        id: its name in a `CausalGraph`: "m3#17@5" is feature 17 of the MLP of layer 3 at position
            5, "m3#error" the error at all positions.
        site: the number of the site in `FeatureEffects.sites`.
        feature: the number of the feature; None: the error.
        position: the column of the batch; None: all.
        effect: the mean effect over the examples.
        std_error: the standard error of this mean; NaN for one example.
    """

    id: str
    site: int
    feature: int | None
    position: int | None
    effect: float
    std_error: float


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class FeatureEffects:
    """The effects of features and errors on a metric, means over examples.

    An effect estimates the metric with the ablated value of a feature in the base run, minus the
    metric of the base run.

    Attributes:
        sites: the sites of the autoencoders.
        names: the names of the sites in causal graphs, as "m3" or "transformer.h.3".
        features: for each site the mean effects, float64 [positions, features]. One row stands for
            all positions, if they were not told apart.
        errors: for each site the mean effects of the errors, float64 [positions].
        features_std_error, errors_std_error: the standard errors of these means.
        at_positions: whether positions were told apart.
        clean: the metric of the clean inputs, float64 [examples].
        corrupted: likewise, of the corrupted inputs; None: they did not run.
        metric: the name of the metric.
        method: how the effects were found.
        direction: "noising": the base run is the clean one. "denoising": the corrupted one.
        model: the model's name.
    """

    sites: tuple[Site, ...]
    names: tuple[str, ...]
    features: tuple[Floats, ...]
    errors: tuple[Floats, ...]
    features_std_error: tuple[Floats, ...]
    errors_std_error: tuple[Floats, ...]
    at_positions: bool
    clean: Floats
    corrupted: Floats | None
    metric: str
    method: str
    direction: Direction
    model: str

    def __repr__(self) -> str:
        count = sum(one.shape[1] for one in self.features)
        places = f" at {len(self.errors[0])} positions" if self.at_positions else ""
        return (
            f"<FeatureEffects of {count:,} features of {len(self.sites)} sites{places} of "
            f"{self.model} on {self.metric}: {self.method}, {len(self.clean):,} examples>"
        )

    def _repr_html_(self) -> str:
        rows = [(n.id, f"{n.effect:+.4g}", f"{n.std_error:.2g}") for n in self.top(_SHOWN)]
        return block(repr(self).strip("<>"), table(["node", "effect", "standard error"], rows, ""))

    @property
    def totals(self) -> Floats:
        """The sum of the effects of each site, features and errors: float64 [sites].

        It estimates the effect of the whole site at once.
        """
        both = zip(self.features, self.errors, strict=True)
        return np.array([features.sum() + errors.sum() for features, errors in both])

    def top(self, k: int, *, errors: bool = True) -> list[FeatureNode]:
        """The nodes with the largest absolute effects, without those whose effect is 0.

        Args:
            k: at most this many.
            errors: whether the errors are among them.

        Raises:
            InvalidArgumentError: (a ValueError) `k` is below 1.
        """
        if k < 1:
            raise InvalidArgumentError(f"k = {k}: give at least 1")
        found = []
        for site in range(len(self.sites)):
            found += self._largest(site, k, errors)
        found.sort(key=lambda node: -abs(node.effect))
        return found[:k]

    def _largest(self, site: int, k: int, errors: bool) -> list[FeatureNode]:
        values = self.features[site]
        flat = np.abs(values).ravel()
        chosen = np.argpartition(-flat, k - 1)[:k] if k < flat.size else np.arange(flat.size)
        found = [
            self._node(site, int(row), int(feature))
            for row, feature in zip(*np.unravel_index(chosen, values.shape), strict=True)
            if values[row, feature]
        ]
        if errors:
            found += [self._node(site, int(row), None) for row in np.flatnonzero(self.errors[site])]
        return found

    def _node(self, site: int, row: int, feature: int | None) -> FeatureNode:
        position = row if self.at_positions else None
        name = f"{self.names[site]}#{'error' if feature is None else feature}"
        name += "" if position is None else f"@{position}"
        place: Any = row if feature is None else (row, feature)
        of = (self.errors, self.errors_std_error) if feature is None else (
            self.features, self.features_std_error
        )  # fmt: skip
        effect, std_error = (float(one[site][place]) for one in of)
        return FeatureNode(name, site, feature, position, effect, std_error)

    def to_pandas(self, top_k: int = 1000) -> pd.DataFrame:
        """A table of the nodes with the largest absolute effects, the largest first.

        Returns:
            node; layer, the captured name of the site's module; position and feature, or missing;
            effect, the mean over the examples, and std_error.

        Raises:
            MissingExtraError: pandas is not installed; the extra "report" brings it.
        """
        with extra("report", "to_pandas"):
            import pandas as pd

        nodes = self.top(top_k)
        columns = {
            "node": [node.id for node in nodes],
            "layer": [self.sites[node.site].layer for node in nodes],
            "position": [node.position for node in nodes],
            "feature": [node.feature for node in nodes],
            "effect": [node.effect for node in nodes],
            "std_error": [node.std_error for node in nodes],
        }
        found: pd.DataFrame = pd.DataFrame(columns)
        for name in ("position", "feature"):
            found[name] = found[name].astype("Int64")
        return found

    def to_graph(self, top_k: int = 1000) -> CausalGraph:
        """The nodes with the largest absolute effects as a causal graph without edges."""
        return CausalGraph(
            tuple(GraphNode(node.id, effect=node.effect) for node in self.top(top_k)),
            model=self.model,
            metric=self.metric,
            method=f"{self.method}, {self.direction}",
            clean=float(self.clean.mean()),
            corrupted=None if self.corrupted is None else float(self.corrupted.mean()),
            examples=len(self.clean),
            versions=versions(),
        )
