"""The order of the nodes of a causal graph: each comes after those that pass something to it."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Sequence

from ...errors import InvalidArgumentError
from .parts import Edge, Node

__all__ = ["execution_order", "rank"]


def rank(node: Node) -> tuple[float, int, int, int, str]:
    """Sorts nodes: the input, then layer by layer heads and MLP or experts, then the logits."""
    layer = {"input": -1.0, "logits": math.inf}.get(node.kind, -0.5)
    part = {"head": 0, "mlp": 1, "expert": 2}.get(node.kind, 3)
    number = node.expert if node.kind == "expert" else node.head
    place = number if number is not None else 1 << 30 if node.kind == "expert" else -1
    position = -1 if node.position is None else node.position
    return layer if node.layer is None else node.layer, part, place, position, node.id


def execution_order(nodes: Iterable[Node], edges: Sequence[Edge]) -> list[Node]:
    """The nodes in an order in which every edge leads to a later one; by `rank` where that is free.

    Raises:
        InvalidArgumentError: the edges form a cycle; the message names its nodes.
    """
    by_id = {node.id: node for node in nodes}
    sources: dict[str, set[str]] = {name: set() for name in by_id}
    targets: dict[str, set[str]] = {name: set() for name in by_id}
    for edge in edges:
        sources[edge.target].add(edge.source)
        targets[edge.source].add(edge.target)
    waits_for = {name: len(found) for name, found in sources.items()}
    ready = [(rank(by_id[name]), name) for name, count in waits_for.items() if not count]
    heapq.heapify(ready)
    ordered = []
    while ready:
        _, name = heapq.heappop(ready)
        ordered.append(by_id[name])
        for target in targets[name]:
            waits_for[target] -= 1
            if not waits_for[target]:
                heapq.heappush(ready, (rank(by_id[target]), target))
    if len(ordered) < len(by_id):
        left = {name for name, count in waits_for.items() if count}
        raise InvalidArgumentError(
            f"the edges form a cycle: {' -> '.join(_cycle(left, sources))}: "
            "an effect leads from earlier parts of a model to later ones"
        )
    return ordered


def _cycle(left: set[str], sources: dict[str, set[str]]) -> list[str]:
    """A cycle among nodes that each have a source among them, from a node back to itself."""
    walked = [min(left)]
    while walked[-1] not in walked[:-1]:
        walked.append(min(sources[walked[-1]] & left))
    return walked[walked.index(walked[-1]) :][::-1]
