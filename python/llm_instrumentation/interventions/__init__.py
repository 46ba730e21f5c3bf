"""Changes what modules of a live PyTorch model compute, inside a block::

with intervene(model, zero("model.layers.3.mlp"), add("model.layers.5", vector, scale=4.0)):
    logits = model(**inputs).logits
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .._lazy import lazy

if TYPE_CHECKING:
    from .edits import Edit, add, apply, freeze, mean, noise, replace, resample, zero
    from .heads import AttentionHeads, HeadLayout, attention_heads, register_heads
    from .installed import Applied, UnusedEditError, intervene
    from .sites import Site

__all__ = [
    "Applied",
    "AttentionHeads",
    "Edit",
    "HeadLayout",
    "Site",
    "UnusedEditError",
    "add",
    "apply",
    "attention_heads",
    "freeze",
    "intervene",
    "mean",
    "noise",
    "register_heads",
    "replace",
    "resample",
    "zero",
]

__getattr__, __dir__ = lazy(
    __name__,
    {
        "Applied": ".installed",
        "AttentionHeads": ".heads",
        "Edit": ".edits",
        "HeadLayout": ".heads",
        "Site": ".sites",
        "UnusedEditError": ".installed",
        "add": ".edits",
        "apply": ".edits",
        "attention_heads": ".heads",
        "freeze": ".edits",
        "intervene": ".installed",
        "mean": ".edits",
        "noise": ".edits",
        "register_heads": ".heads",
        "replace": ".edits",
        "resample": ".edits",
        "zero": ".edits",
    },
)
