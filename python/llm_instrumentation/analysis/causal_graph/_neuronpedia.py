"""Causal graphs as the graph JSON of Neuronpedia, schema 1.0.0.

https://github.com/hijohnnylin/neuronpedia, apps/webapp/app/api/graph/graph-schema.json
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from ..._version import __version__
from ...errors import InvalidArgumentError
from ._pruning import check_effects
from .parts import Node, merged

if TYPE_CHECKING:
    from . import CausalGraph

__all__ = ["neuronpedia_record"]

_EVERYWHERE = "(all positions)"
_TYPES = {
    "input": "embedding",
    "head": "attention head",
    "mlp": "mlp",
    "expert": "expert",
    "logits": "logit",
}
_ABOUT = (
    "Nodes are heads, MLPs and other modules of the model, not features of transcoders. The number "
    "of a feature is the place of the node in this file. Weights are effects on the metric. "
    "Activations, influences, probabilities of tokens and dashboards were not measured."
)


def neuronpedia_record(
    graph: CausalGraph, slug: str, scan: str, tokens: list[str]
) -> dict[str, Any]:
    """The values of the file. See `causal_graph.save_neuronpedia`."""
    if not re.fullmatch(r"[A-Za-z0-9_-]+", slug):
        raise InvalidArgumentError(
            f"slug = {slug!r}: give letters, digits, - and _, because it is a part of addresses"
        )
    if not scan:
        raise InvalidArgumentError("scan is empty: give the model's id on Neuronpedia")
    check_effects(graph.edges)
    for node in graph.nodes:
        if node.position is not None and node.position >= len(tokens):
            raise InvalidArgumentError(
                f"node {node.id!r} is at position {node.position}, and there are {len(tokens)} "
                "tokens: give the tokens of the prompt"
            )
        if node.span is not None:
            raise InvalidArgumentError(
                f"node {node.id!r} is at a span of tokens, and Neuronpedia has positions alone: "
                "measure edges at positions"
            )
        if node.kind == "module" and node.layer is None:
            raise InvalidArgumentError(
                f"node {node.id!r} has no layer, and Neuronpedia needs one: leave it out"
            )
    everywhere = [_EVERYWHERE] if any(node.position is None for node in graph.nodes) else []
    layers = 1 + max((node.layer for node in graph.nodes if node.layer is not None), default=0)
    about = graph.to_dict()
    settings = ("model", "metric", "method", "clean", "corrupted", "examples", "versions")
    # The schema has one link between two nodes, and a head has an edge into each of q, k and v.
    links = list(merged(graph.edges))
    counts = {"edges": len(graph.edges), "links": len(links)}
    return {
        "metadata": {
            "slug": slug,
            "scan": scan,
            "prompt": "".join(tokens),
            "prompt_tokens": [*tokens, *everywhere],
            "info": {
                "description": _ABOUT,
                "generator": {"name": "llm_instrumentation", "version": __version__},
            },
            "generation_settings": {
                **{name: about[name] for name in settings if name in about},
                **counts,
            },
        },
        "qParams": {"linkType": "both", "pinnedIds": [], "clickedId": "", "supernodes": []},
        "nodes": [_node(node, at, len(tokens), layers) for at, node in enumerate(graph.nodes)],
        "links": [
            {"source": edge.source, "target": edge.target, "weight": edge.effect} for edge in links
        ],
    }


def _node(node: Node, place: int, last: int, layers: int) -> dict[str, Any]:
    # The page puts layer "E" at the bottom. It reads a probability from the text of a logit, and
    # breaks if the text has none, so this text is empty.
    layer = {"input": "E", "logits": str(layers)}.get(node.kind, str(node.layer))
    return {
        "node_id": node.id,
        "jsNodeId": node.id,
        "feature": place,
        "layer": layer,
        "ctx_idx": last if node.position is None else node.position,
        "feature_type": _TYPES.get(node.kind, "module"),
        "clerp": "" if node.kind == "logits" else node.id,
    }
