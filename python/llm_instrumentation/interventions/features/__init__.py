"""Features of sparse autoencoders and transcoders: splicing, effects, edges, attribution graphs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..._lazy import lazy

if TYPE_CHECKING:
    from .attribution import feature_attribution, feature_patching
    from .attribution_graphs import AttributionGraph
    from .circuit_tracing import attribution_graph
    from .edges import feature_edges
    from .effects import FeatureEffects, FeatureNode
    from .faithfulness import FeatureFaithfulness, feature_faithfulness
    from .splicing import Spliced, splice

__all__ = [
    "AttributionGraph",
    "FeatureEffects",
    "FeatureFaithfulness",
    "FeatureNode",
    "Spliced",
    "attribution_graph",
    "feature_attribution",
    "feature_edges",
    "feature_faithfulness",
    "feature_patching",
    "splice",
]

__getattr__, __dir__ = lazy(
    __name__,
    {
        "AttributionGraph": ".attribution_graphs",
        "FeatureEffects": ".effects",
        "FeatureFaithfulness": ".faithfulness",
        "FeatureNode": ".effects",
        "Spliced": ".splicing",
        "attribution_graph": ".circuit_tracing",
        "feature_attribution": ".attribution",
        "feature_edges": ".edges",
        "feature_faithfulness": ".faithfulness",
        "feature_patching": ".attribution",
        "splice": ".splicing",
    },
)
