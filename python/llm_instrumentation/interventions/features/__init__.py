"""Features of sparse autoencoders and transcoders as parts of a model: splicing, effects, edges."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..._lazy import lazy

if TYPE_CHECKING:
    from .attribution import feature_attribution, feature_patching
    from .edges import feature_edges
    from .effects import FeatureEffects, FeatureNode
    from .faithfulness import FeatureFaithfulness, feature_faithfulness
    from .splicing import Spliced, splice

__all__ = [
    "FeatureEffects",
    "FeatureFaithfulness",
    "FeatureNode",
    "Spliced",
    "feature_attribution",
    "feature_edges",
    "feature_faithfulness",
    "feature_patching",
    "splice",
]

__getattr__, __dir__ = lazy(
    __name__,
    {
        "FeatureEffects": ".effects",
        "FeatureFaithfulness": ".faithfulness",
        "FeatureNode": ".effects",
        "Spliced": ".splicing",
        "feature_attribution": ".attribution",
        "feature_edges": ".edges",
        "feature_faithfulness": ".faithfulness",
        "feature_patching": ".attribution",
        "splice": ".splicing",
    },
)
