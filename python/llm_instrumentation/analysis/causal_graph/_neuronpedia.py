"""Causal graphs as the graph JSON of Neuronpedia, schema 1.0.0.

https://github.com/hijohnnylin/neuronpedia, apps/webapp/app/api/graph/graph-schema.json
"""

from __future__ import annotations

import re
from collections.abc import Mapping
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
_ABOUT_FEATURES = (
    "Nodes are features of one transcoder for each MLP, their reconstruction errors, embeddings "
    "and logits. A weight is what the source adds to the pre-activation of the target, or to the "
    "logit minus the mean logit, with attention patterns and norms frozen. The influence of a node "
    "is the share of all influence that it and the nodes of more influence have together."
)
_FEATURE = re.compile(r"#([0-9]+|error)@")


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
    if not tokens and "attribution" in graph.notes:
        texts = graph.notes["tokens"]
        tokens = [texts[str(at)] for at in range(len(texts))]
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
    notes = graph.notes.get("attribution")
    attribution = None if notes is None else _attribution(graph, notes)
    names = {node.id: node.id for node in graph.nodes} if attribution is None else {
        name: made["node_id"] for name, made in attribution.items()
    }  # fmt: skip
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
                "description": _ABOUT if attribution is None else _ABOUT_FEATURES,
                "generator": {"name": "llm_instrumentation", "version": __version__},
            },
            "generation_settings": {
                **{name: about[name] for name in settings if name in about},
                **counts,
            },
            **({} if notes is None else _pruning(notes)),
        },
        "qParams": {"linkType": "both", "pinnedIds": [], "clickedId": "", "supernodes": []},
        "nodes": [
            _node(node, at, len(tokens), layers) if attribution is None else attribution[node.id]
            for at, node in enumerate(graph.nodes)
        ],
        "links": [
            {"source": names[edge.source], "target": names[edge.target], "weight": edge.effect}
            for edge in links
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


def _pruning(notes: Mapping[str, Any]) -> dict[str, Any]:
    settings = notes["settings"]
    return {"node_threshold": settings["node_threshold"], "pruning_settings": settings}


def _attribution(graph: CausalGraph, notes: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The nodes of an attribution graph of transcoders, by id.

    Names, layers and numbers are those that circuit-tracer writes: its page takes layer, feature
    and position from a name, -1 for an error, and the layer of logits is one more than that of the
    model's end.

    Raises:
        InvalidArgumentError: the graph has a node of another kind.
    """
    found = {}
    likely = max(notes["probabilities"], key=notes["probabilities"].get, default=None)
    for node in graph.nodes:
        at, feature = node.position, _FEATURE.search(node.id)
        if at is None or not (feature or node.kind == "input"):
            raise InvalidArgumentError(
                f"node {node.id!r} is no feature, error, embedding or logit of an attribution "
                "graph: leave it out"
            )
        more: dict[str, Any] = {"influence": notes["cumulative_influences"].get(node.id)}
        if node.kind == "input":
            token = notes["token_ids"][at]
            name, number, layer, kind = f"E_{token}_{at}", at, "E", "embedding"
        elif node.kind == "logits":
            number, layer, kind = int(feature[1]), str(notes["layers"] + 1), "logit"  # type: ignore[index]
            name, share = f"{layer}_{number}_{at}", notes["probabilities"][node.id]
            more = {
                "token_prob": share,
                "is_target_logit": node.id == likely,
                "clerp": f'Output "{notes["texts"][node.id]}" (p={share:.3f})',
            }
        elif feature[1] == "error":  # type: ignore[index]
            name, number, layer = f"{node.layer}_-1_{at}", -1, str(node.layer)
            kind = "mlp reconstruction error"
        else:
            number, layer, kind = int(feature[1]), str(node.layer), "cross layer transcoder"  # type: ignore[index]
            name, more["activation"] = f"{layer}_{number}_{at}", notes["activations"][node.id]
            # Neuronpedia takes layer and feature from one number, by Cantor's pairing function.
            both = node.layer + number  # type: ignore[operator]
            number += both * (both + 1) // 2
        found[node.id] = {
            "node_id": name,
            "jsNodeId": name,
            "feature": number,
            "layer": layer,
            "ctx_idx": at,
            "feature_type": kind,
            "clerp": "",
            **more,
        }
    return found
