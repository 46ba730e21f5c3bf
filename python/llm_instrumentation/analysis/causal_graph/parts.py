"""The nodes and edges of causal graphs: their names, their effects, and the checks of both."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal, NamedTuple, cast, get_args

from ...errors import InvalidArgumentError

__all__ = [
    "INPUTS",
    "Edge",
    "EdgeInput",
    "EdgeKey",
    "Node",
    "NodeKind",
    "at_span",
    "chosen",
    "edge_text",
    "finite",
    "given",
    "merged",
    "split_span",
]

NodeKind = Literal["input", "head", "mlp", "expert", "logits", "module"]
"""The kind of a node, as its id says it."""
EdgeInput = Literal["q", "k", "v"]
"""The input of a head that an edge enters: the query, the key or the value."""
#: The inputs of a head, in their order.
INPUTS: tuple[EdgeInput, ...] = get_args(EdgeInput)

_NUMBERS = ("effect", "low", "high", "p_value")
_AT = re.compile(r"(.+?)(?:@(-?[0-9]{1,9}))?")
# A part of a decoder at a named span. Names of other modules may hold "@" themselves.
_SPAN = re.compile(
    r"(input|logits|a[0-9]{1,9}\.h[0-9]{1,9}|m[0-9]{1,9}(?:\.e[0-9]{1,9}|\.shared)?)"
    r"@([^\W\d][\w.-]*)"
)
_HEAD = re.compile(r"a([0-9]{1,9})\.h([0-9]{1,9})")
_MLP = re.compile(r"m([0-9]{1,9})")
_EXPERT = re.compile(r"m([0-9]{1,9})\.(?:e([0-9]{1,9})|shared)")
# A feature of an autoencoder at a part of the model, or the error there.
_FEATURE = re.compile(r"(.+)#(?:[0-9]{1,9}|error)")
# The logit of one token.
_LOGIT = re.compile(r"logits#[0-9]{1,9}")
# A number that is a whole part of a module's name: model.layers.3.mlp, h.0[1].
_LAYER = re.compile(r"(?:^|\.)([0-9]{1,9})(?=[.\[]|$)")


class EdgeKey(NamedTuple):
    """The key of an edge in its graph."""

    source: str
    target: str
    input: EdgeInput | None


class _Name(NamedTuple):
    """What the id of a node says."""

    kind: NodeKind
    layer: int | None
    head: int | None
    position: int | None
    span: str | None
    expert: int | None = None


@functools.lru_cache(maxsize=1 << 16)
def _parsed(node: str) -> _Name:
    if named := _SPAN.fullmatch(node):
        return _parsed(named[1])._replace(span=named[2])
    found = _AT.fullmatch(node)
    assert found is not None, node
    name, at = found[1], None if found[2] is None else int(found[2])
    if _LOGIT.fullmatch(name):
        return _Name("logits", None, None, at, None)
    if name in ("input", "logits"):
        return _Name(cast(NodeKind, name), None, None, at, None)
    if head := _HEAD.fullmatch(name):
        return _Name("head", int(head[1]), int(head[2]), at, None)
    if mlp := _MLP.fullmatch(name):
        return _Name("mlp", int(mlp[1]), None, at, None)
    if expert := _EXPERT.fullmatch(name):
        number = None if expert[2] is None else int(expert[2])
        return _Name("expert", int(expert[1]), None, at, None, number)
    if feature := _FEATURE.fullmatch(name):
        return _Name("module", _parsed(feature[1]).layer, None, at, None)
    layer = _LAYER.search(name)
    return _Name("module", int(layer[1]) if layer else None, None, at, None)


def at_span(node: str, span: str | None) -> str:
    """The id of a node at a position or a span, or everywhere."""
    return node if span is None else f"{node}@{span}"


def split_span(node: str) -> tuple[str, str | None]:
    """The id of a node without its position or span, and that as text; None: everywhere."""
    named = _parsed(node)
    if named.span is None and named.position is None:
        return node, None
    name, _, span = node.rpartition("@")
    return name, span


def edge_text(source: str, target: str, input: str | None) -> str:  # noqa: A002 - its name in `Edge`
    """An edge as text: ``m0->a1.h0<v>``, ``a1.h0->logits``."""
    return f"{source}->{target}" + (f"<{input}>" if input else "")


@dataclasses.dataclass(frozen=True)
class Node:
    """A part of a model in a causal graph.

    Numbers of numpy and torch become floats.

    Attributes:
        id: its name, without characters that cannot be printed. ``input`` (the sum of the
            embeddings), ``a3.h5`` (head 5 of the attention of layer 3), ``m3`` (the MLP of layer
            3), ``m3.e5`` (expert 5 of the MLP of layer 3), ``m3.shared`` (its shared expert),
            ``logits``, or the captured name of another module. ``#17`` behind it is a feature of an
            autoencoder there, ``#error`` its error; behind ``logits`` it is the logit of one token.
            ``@7`` at its end means what the part returns at position 7 alone, ``@subject`` at the
            tokens of that span.
        effect: the metric with the intervention on this node, minus the metric without it; the mean
            over the examples. None: it was not measured.
        low, high: a confidence interval of the effect; both or none.
        p_value: of a test whether the effect is 0.

    Raises:
        InvalidArgumentError: (a ValueError) the id is empty or cannot be printed; a number is NaN,
            infinite or out of its range.
    """

    id: str
    effect: float | None = None
    low: float | None = None
    high: float | None = None
    p_value: float | None = None

    def __post_init__(self) -> None:
        _check_id(self.id, "node")
        _check_numbers(self, f"node {self.id!r}")

    @property
    def kind(self) -> NodeKind:
        """The kind that the id says; "module" for every other name."""
        return _parsed(self.id).kind

    @property
    def layer(self) -> int | None:
        """The number of its layer, from 0; of a module the first number in its name."""
        return _parsed(self.id).layer

    @property
    def head(self) -> int | None:
        """The number of the head in its layer, from 0; None if the node is no head."""
        return _parsed(self.id).head

    @property
    def expert(self) -> int | None:
        """The number of the expert in its layer, from 0; None: a shared expert, or no expert."""
        return _parsed(self.id).expert

    @property
    def position(self) -> int | None:
        """The position of the token, from 0; None: all positions, or those of a span."""
        return _parsed(self.id).position

    @property
    def span(self) -> str | None:
        """The name of the span of tokens; None: all positions, or one."""
        return _parsed(self.id).span


@dataclasses.dataclass(frozen=True)
class Edge:
    """An edge of a causal graph: one node passes values on to another.

    Attributes:
        source, target: the ids of the nodes.
        input: the input of the target head that the edge enters: "q", "k" or "v". None: all of its
            inputs, or the target is no head.
        effect, low, high, p_value: as in `Node`, of an intervention on this edge alone.

    Raises:
        InvalidArgumentError: (a ValueError) the edge leads from the logits or to the input; the
            target has no such input; a number is NaN, infinite or out of its range.
    """

    source: str
    target: str
    input: EdgeInput | None = None
    effect: float | None = None
    low: float | None = None
    high: float | None = None
    p_value: float | None = None

    def __post_init__(self) -> None:
        _check_id(self.source, "source of an edge")
        _check_id(self.target, "target of an edge")
        if _parsed(self.source).kind == "logits" or _parsed(self.target).kind == "input":
            raise InvalidArgumentError(
                f"edge {self.id!r}: no edge leads from the logits or to the input"
            )
        if self.input not in (None, *INPUTS):
            raise InvalidArgumentError(
                f"edge {self.source!r} -> {self.target!r}: input = {self.input!r}: give 'q', 'k', "
                "'v' or None"
            )
        if self.input and _parsed(self.target).kind in ("input", "mlp", "expert", "logits"):
            raise InvalidArgumentError(
                f"edge {self.id!r}: {self.target!r} has no input {self.input!r}: only attention has"
            )
        _check_numbers(self, f"edge {self.id!r}")

    @property
    def id(self) -> str:
        """The edge as text: ``m0->a1.h0<v>``."""
        return edge_text(self.source, self.target, self.input)

    @property
    def key(self) -> EdgeKey:
        """Source, target and input. No two edges of a graph have the same."""
        return EdgeKey(self.source, self.target, self.input)


def _check_id(name: object, what: str) -> None:
    if not isinstance(name, str):
        raise InvalidArgumentError(f"{what}: {name!r} is no text")
    if not name or not name.isprintable():
        raise InvalidArgumentError(
            f"{what}: {name!r} is empty, or has characters that cannot be printed: rename it"
        )


def _check_numbers(part: Node | Edge, what: str) -> None:
    """Makes floats of the numbers, and checks them."""
    for name in _NUMBERS:
        object.__setattr__(part, name, finite(getattr(part, name), f"{what}: {name}"))
    if (part.low is None) != (part.high is None):
        raise InvalidArgumentError(f"{what}: low = {part.low}, high = {part.high}: give both")
    if part.low is not None and part.low > cast(float, part.high):
        raise InvalidArgumentError(f"{what}: low = {part.low} is above high = {part.high}")
    if part.p_value is not None and not 0 <= part.p_value <= 1:
        raise InvalidArgumentError(f"{what}: p_value = {part.p_value} is not within 0 and 1")


def finite(value: Any, what: str) -> float | None:
    """The value as a float; None stays.

    Raises:
        InvalidArgumentError: it is no number, NaN or infinite. The message begins with `what`.
    """
    if value is None:
        return None
    if isinstance(value, (str, bytes, bool)) or not hasattr(value, "__float__"):
        raise InvalidArgumentError(f"{what} = {value!r} is no number")
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError) as error:  # as a tensor of many values
        raise InvalidArgumentError(f"{what} = {value!r} is no number: {error}") from error
    if not math.isfinite(number):
        raise InvalidArgumentError(
            f"{what} = {number}: give a finite number, or None if it was not measured"
        )
    return number


def given(part: Node | Edge) -> dict[str, Any]:
    """The fields of a node or edge that are not None, by name."""
    return {name: value for name, value in dataclasses.asdict(part).items() if value is not None}


def chosen(fields: Mapping[str, Any], kind: type[Node] | type[Edge]) -> dict[str, Any]:
    """Those of the values that are fields of a node or an edge, by name."""
    names = {field.name for field in dataclasses.fields(kind)}
    return {name: value for name, value in fields.items() if name in names}


def merged(edges: Iterable[Edge]) -> Iterator[Edge]:
    """The edges, with one edge for those into several inputs of a head.

    Its effect is the sum of theirs. It has no interval, because theirs are not independent.

    Raises:
        InvalidArgumentError: some edges between two nodes have an effect, and others have none.
    """
    between: dict[tuple[str, str], list[Edge]] = {}
    for edge in edges:
        between.setdefault((edge.source, edge.target), []).append(edge)
    for (source, target), found in between.items():
        if len(found) == 1:
            yield found[0]
            continue
        effects = [edge.effect for edge in found if edge.effect is not None]
        if 0 < len(effects) < len(found):
            raise InvalidArgumentError(
                f"not all edges from {source!r} to {target!r} have an effect: they have no sum"
            )
        yield Edge(source, target, effect=math.fsum(effects) if effects else None)
