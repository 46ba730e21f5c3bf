"""Which edges and nodes of a causal graph stay when it is pruned."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TypeVar

from ...errors import InvalidArgumentError
from .parts import Edge, Node

__all__ = ["check_choice", "check_effects", "greedily", "largest", "on_paths"]

_Part = TypeVar("_Part", Node, Edge)


def largest(parts: Sequence[_Part], threshold: float | None, top_k: int | None) -> list[_Part]:
    """The parts with the largest absolute effects, in their order. Of equal ones the first.

    Args:
        parts: all with an effect.
        threshold: the smallest absolute effect; None: `top_k` counts.
        top_k: how many.
    """
    if threshold is not None:
        return [part for part in parts if _size(part) >= threshold]
    best = sorted(range(len(parts)), key=lambda at: -_size(parts[at]))[:top_k]  # a stable sort
    return [parts[at] for at in sorted(best)]


def greedily(edges: Sequence[Edge], outputs: Iterable[str], k: int) -> list[Edge]:
    """At most k edges, in their order: each time the largest one into a node that has been reached.

    The outputs have been reached at the beginning, and an edge reaches its source.
    """
    into: Mapping[str, list[int]] = defaultdict(list)
    for at, edge in enumerate(edges):
        into[edge.target].append(at)
    reached: set[str] = set()
    offered: list[tuple[float, int]] = []

    def reach(node: str) -> None:
        if node not in reached:
            reached.add(node)
            for at in into[node]:
                heapq.heappush(offered, (-_size(edges[at]), at))

    for node in outputs:
        reach(node)
    taken: list[int] = []
    while offered and len(taken) < k:
        _, at = heapq.heappop(offered)
        taken.append(at)
        reach(edges[at].source)
    return [edges[at] for at in sorted(taken)]


def on_paths(edges: Iterable[Edge], inputs: Collection[str], outputs: Collection[str]) -> set[str]:
    """The nodes on the paths from an input to an output. A path may be a single node."""
    after: dict[str, list[str]] = defaultdict(list)
    before: dict[str, list[str]] = defaultdict(list)
    for edge in edges:
        after[edge.source].append(edge.target)
        before[edge.target].append(edge.source)
    return _reachable(inputs, after) & _reachable(outputs, before)


def _reachable(starts: Iterable[str], following: Mapping[str, list[str]]) -> set[str]:
    reached: set[str] = set()
    waiting = list(starts)
    while waiting:
        node = waiting.pop()
        if node not in reached:
            reached.add(node)
            waiting += following.get(node, ())
    return reached


def check_choice(**choice: float | None) -> None:
    """
    Raises:
        InvalidArgumentError: not exactly one of the values is given, or it is out of its range.
    """
    given = {name: value for name, value in choice.items() if value is not None}
    if len(given) != 1:
        told = ", ".join(f"{name} = {value}" for name, value in given.items()) or "nothing"
        raise InvalidArgumentError(f"{told} is given: give one of {', '.join(choice)}")
    for name, value in given.items():
        if name == "threshold" and not value >= 0:  # also NaN
            raise InvalidArgumentError(f"threshold = {value}: give an absolute effect, 0 or more")
        if name != "threshold" and value < 1:
            raise InvalidArgumentError(f"{name} = {value}: give 1 or more")


def check_effects(parts: Iterable[Node | Edge]) -> None:
    """
    Raises:
        InvalidArgumentError: a part has no effect; the message names the first one.
    """
    for part in parts:
        if part.effect is None:
            kind = "node" if isinstance(part, Node) else "edge"
            raise InvalidArgumentError(
                f"{kind} {part.id!r} has no effect, so it cannot be compared with the others"
            )


def _size(part: Node | Edge) -> float:
    assert part.effect is not None
    return abs(part.effect)
