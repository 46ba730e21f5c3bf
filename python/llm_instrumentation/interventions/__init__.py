"""Changes what modules of a live PyTorch model compute, inside a block::

with intervene(model, zero("model.layers.3.mlp"), add("model.layers.5", vector, scale=4.0)):
    logits = model(**inputs).logits
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .._lazy import lazy

if TYPE_CHECKING:
    from .circuits import Faithfulness, faithfulness, minimality, run_circuit
    from .decoders import DecoderLayout, register_decoder
    from .edges import edge_attribution, edge_patching
    from .edits import Edit, add, apply, freeze, mean, noise, replace, resample, zero
    from .heads import AttentionHeads, HeadLayout, attention_heads, register_heads
    from .installed import Applied, UnusedEditError, intervene
    from .sites import Site

__all__ = [
    "Applied",
    "AttentionHeads",
    "DecoderLayout",
    "Edit",
    "Faithfulness",
    "HeadLayout",
    "Site",
    "UnusedEditError",
    "add",
    "apply",
    "attention_heads",
    "edge_attribution",
    "edge_patching",
    "faithfulness",
    "freeze",
    "intervene",
    "mean",
    "minimality",
    "noise",
    "register_decoder",
    "register_heads",
    "replace",
    "resample",
    "run_circuit",
    "zero",
]

__getattr__, __dir__ = lazy(
    __name__,
    {
        "Applied": ".installed",
        "AttentionHeads": ".heads",
        "DecoderLayout": ".decoders",
        "Edit": ".edits",
        "Faithfulness": ".circuits",
        "HeadLayout": ".heads",
        "Site": ".sites",
        "UnusedEditError": ".installed",
        "add": ".edits",
        "apply": ".edits",
        "attention_heads": ".heads",
        "edge_attribution": ".edges",
        "edge_patching": ".edges",
        "faithfulness": ".circuits",
        "freeze": ".edits",
        "intervene": ".installed",
        "mean": ".edits",
        "minimality": ".circuits",
        "noise": ".edits",
        "register_decoder": ".decoders",
        "register_heads": ".heads",
        "replace": ".edits",
        "resample": ".edits",
        "run_circuit": ".circuits",
        "zero": ".edits",
    },
)
