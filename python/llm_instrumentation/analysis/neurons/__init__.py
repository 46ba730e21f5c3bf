"""Neurons and directions: where they are active, what lies near them, and what they tell apart::

    found = top_contexts("run.stream", "model.layers.3.mlp.act_fn", 7, tokenizer=tokenizer)
    print(found)                             # the texts around its largest and smallest values
    print(layer_units("run.stream", "model.layers.3.mlp.act_fn").to_pandas())     # all units
    print(nearest("run.stream", "model.layers.3", vector, tokenizer=tokenizer))
    print(probe("run.stream", "model.layers.3", "truth"))     # a label that annotate gave

A unit is one value of a layer's vectors. A direction is any vector of that width. Everything here
reads a capture in blocks, so the capture may be larger than memory.
"""

from __future__ import annotations

from ..token_rows.contexts import TokenContext
from ._nearest import Metric, Neighbour, Neighbours, nearest
from ._probes import (
    Labels,
    LinearProbe,
    ProbeMethod,
    ProbeTokens,
    contrastive_direction,
    probe,
)
from ._units import QUANTILES, TopContexts, Unit, top_contexts
from .scans import LayerUnits, RelatedUnit, UnitPage, layer_units, unit_page

__all__ = [
    "QUANTILES",
    "Labels",
    "LayerUnits",
    "LinearProbe",
    "Metric",
    "Neighbour",
    "Neighbours",
    "ProbeMethod",
    "ProbeTokens",
    "RelatedUnit",
    "TokenContext",
    "TopContexts",
    "Unit",
    "UnitPage",
    "contrastive_direction",
    "layer_units",
    "nearest",
    "probe",
    "top_contexts",
    "unit_page",
]
