"""Changes what modules of a live PyTorch model compute, inside a block::

with intervene(model, zero("model.layers.3.mlp"), add("model.layers.5", vector, scale=4.0)):
    logits = model(**inputs).logits
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .._lazy import lazy

if TYPE_CHECKING:
    from .attribution import attribution_patching
    from .circuits import Faithfulness, faithfulness, minimality, run_circuit
    from .decoders import DecoderLayout, register_decoder
    from .edges import edge_attribution, edge_patching
    from .edits import Edit, add, apply, freeze, mean, noise, replace, resample, zero
    from .effects import Effects
    from .experts import ExpertLayout, register_experts
    from .heads import AttentionHeads, HeadLayout, attention_heads, register_heads
    from .installed import Applied, UnusedEditError, intervene
    from .metrics import (
        Metric,
        MetricError,
        accuracy,
        cross_entropy,
        kl_divergence,
        logit_difference,
        probability_difference,
    )
    from .nodes import sites_of
    from .patching import ablation, activation_patching
    from .prompts import Prompts, SpanError
    from .sites import Site

__all__ = [
    "Applied",
    "AttentionHeads",
    "DecoderLayout",
    "Edit",
    "Effects",
    "ExpertLayout",
    "Faithfulness",
    "HeadLayout",
    "Metric",
    "MetricError",
    "Prompts",
    "Site",
    "SpanError",
    "UnusedEditError",
    "ablation",
    "accuracy",
    "activation_patching",
    "add",
    "apply",
    "attention_heads",
    "attribution_patching",
    "cross_entropy",
    "edge_attribution",
    "edge_patching",
    "faithfulness",
    "freeze",
    "intervene",
    "kl_divergence",
    "logit_difference",
    "mean",
    "minimality",
    "noise",
    "probability_difference",
    "register_decoder",
    "register_experts",
    "register_heads",
    "replace",
    "resample",
    "run_circuit",
    "sites_of",
    "zero",
]

__getattr__, __dir__ = lazy(
    __name__,
    {
        "Applied": ".installed",
        "AttentionHeads": ".heads",
        "DecoderLayout": ".decoders",
        "Edit": ".edits",
        "ExpertLayout": ".experts",
        "Faithfulness": ".circuits",
        "Effects": ".effects",
        "HeadLayout": ".heads",
        "Metric": ".metrics",
        "MetricError": ".metrics",
        "Prompts": ".prompts",
        "Site": ".sites",
        "SpanError": ".prompts",
        "UnusedEditError": ".installed",
        "ablation": ".patching",
        "accuracy": ".metrics",
        "activation_patching": ".patching",
        "add": ".edits",
        "apply": ".edits",
        "attention_heads": ".heads",
        "edge_attribution": ".edges",
        "edge_patching": ".edges",
        "faithfulness": ".circuits",
        "attribution_patching": ".attribution",
        "cross_entropy": ".metrics",
        "freeze": ".edits",
        "intervene": ".installed",
        "kl_divergence": ".metrics",
        "logit_difference": ".metrics",
        "mean": ".edits",
        "minimality": ".circuits",
        "noise": ".edits",
        "probability_difference": ".metrics",
        "register_decoder": ".decoders",
        "register_experts": ".experts",
        "register_heads": ".heads",
        "replace": ".edits",
        "resample": ".edits",
        "run_circuit": ".circuits",
        "sites_of": ".nodes",
        "zero": ".edits",
    },
)
