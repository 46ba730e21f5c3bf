"""All edges of a decoder by number, with a number for each pair of spans that an edge joins."""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from ...analysis.causal_graph import CausalGraph, Edge, EdgeInput, EdgeKey, Node
from ...analysis.causal_graph.parts import INPUTS, split_span
from ...errors import InvalidArgumentError
from ..decoders import DecoderGraph
from ..edits import apply
from ..prompts import Positions, Prompts, Text
from .residuals import written
from .spans import Spans

__all__ = ["MOST_EDGES", "EdgeBlock", "EdgeSpace", "Ends", "is_causal"]

#: A graph of more edges takes more than a gigabyte of memory.
MOST_EDGES = 2_000_000


@dataclasses.dataclass(frozen=True)
class EdgeBlock:
    """The edges into one input of all nodes of some readers, whose results are in one span.

    Attributes:
        readers: the number of the readers.
        input: of heads; None: experts, an MLP or the logits.
        span: of the results.
        sources: the spans in which the sources write; none, if the tokens of the span have no
            counterpart in the other run, and the input reads no other ones.
        targets: the nodes.
        upstream: the number of source nodes.
        begin: the number of the first edge.
    """

    readers: int
    input: EdgeInput | None
    span: int
    sources: tuple[int, ...]
    targets: tuple[str, ...]
    upstream: int
    begin: int

    @property
    def shape(self) -> tuple[int, int, int]:
        """Targets, source nodes, source spans."""
        return len(self.targets), self.upstream, len(self.sources)

    @property
    def edges(self) -> slice:
        """Its edges among all."""
        targets, upstream, spans = self.shape
        return slice(self.begin, self.begin + targets * upstream * spans)


@dataclasses.dataclass(frozen=True)
class Ends:
    """The ends of an edge, as numbers.

    Attributes:
        source: the number of the node that writes.
        source_span: where it writes; None: everywhere.
        readers: the number of the readers.
        target: the number of the target among them.
        head: of the target; None: it is no head.
        inputs: of the head.
        span: of the result of the target; None: all.
    """

    source: int
    source_span: int | None
    readers: int
    target: int
    head: int | None
    inputs: tuple[EdgeInput, ...]
    span: int | None


class EdgeSpace:
    """The edges of a decoder.

    A node at a span is what the part writes to the residual stream at the tokens of the span. An
    edge into an MLP, an expert, the logits or the query of a head joins equal spans. An edge into a
    key or value leads from the span of the key to the span of the query, so it is what the head
    returns there that differs. No edge begins in a span without a counterpart in the other run.

    Args:
        decoder: the decoder.
        spans: of all examples.
        causal: no query reads later columns.

    Attributes:
        decoder, spans: as given.
        blocks: all edges in the order of their numbers.
        size: the number of edges.
    """

    def __init__(self, decoder: DecoderGraph, spans: Spans, causal: bool = True) -> None:
        self.decoder = decoder
        self.spans = spans
        origins = spans.sources
        carried = [tuple(one for one in read if one in origins) for read in spans.carried(causal)]
        blocks: list[EdgeBlock] = []
        begin = 0
        for number, readers in enumerate(decoder.readers):
            kinds = INPUTS if readers.kind == "heads" else (None,)
            targets = tuple(dict.fromkeys(node for node, _ in readers.inputs))
            for span in range(len(spans)):
                for kind in kinds:
                    own = (span,) if span in origins else ()
                    sources = carried[span] if kind in ("k", "v") else own
                    blocks.append(
                        EdgeBlock(number, kind, span, sources, targets, readers.upstream, begin)
                    )
                    begin = blocks[-1].edges.stop
        self.blocks = tuple(blocks)
        self.size = begin
        self._by_readers: dict[int, dict[tuple[int, EdgeInput | None], EdgeBlock]] = {}
        for block in blocks:
            self._by_readers.setdefault(block.readers, {})[block.span, block.input] = block
        self._begins = [block.begin for block in blocks]
        self._sources = {name: number for number, name in enumerate(decoder.sources)}
        self._readers = {
            target: number
            for number, readers in enumerate(decoder.readers)
            for target, _ in readers.inputs
        }

    @classmethod
    def of(
        cls, decoder: DecoderGraph, positions: Positions, prompts: Prompts, text: Text = "clean"
    ) -> EdgeSpace:
        """The edges at the positions that a caller gives.

        Args:
            decoder: the decoder.
            positions: see `Positions`.
            prompts: the examples.
            text: the text of each pair that runs while edges are changed.

        Raises:
            InvalidArgumentError, UnsupportedError: as `Spans.of`.
        """
        spans = Spans.of(positions, prompts, text)
        return cls(decoder, spans, len(spans) == 1 or is_causal(decoder, prompts))

    def check_size(self) -> None:
        """
        Raises:
            InvalidArgumentError: there are more edges than a graph holds.
        """
        if len(self.spans) > 1 and self.size > MOST_EDGES:
            raise InvalidArgumentError(
                f"{len(self.spans)} positions make {self.size:,} edges, and a graph holds at most "
                f"{MOST_EDGES:,}: give fewer spans as positions, the edges to measure, or top_k to "
                "edge_attribution"
            )

    def of_readers(self, number: int) -> dict[tuple[int, EdgeInput | None], EdgeBlock]:
        """The blocks of some readers, by span and input."""
        return self._by_readers[number]

    def key(self, number: int) -> EdgeKey:
        """The edge of a number."""
        block = self.blocks[bisect.bisect_right(self._begins, number) - 1]
        _, upstream, spans = block.shape
        target, source = divmod((number - block.begin) // spans, upstream)
        span = block.sources[(number - block.begin) % spans]
        return EdgeKey(
            self.spans.node(self.decoder.sources[source], span),
            self.spans.node(block.targets[target], block.span),
            block.input,
        )

    def edges(self) -> Iterator[EdgeKey]:
        """All edges, in the order of their numbers."""
        names = [
            [self.spans.node(name, span) for span in range(len(self.spans))]
            for name in self.decoder.sources
        ]
        for block in self.blocks:
            for target in block.targets:
                end = self.spans.node(target, block.span)
                for source in names[: block.upstream]:
                    for span in block.sources:
                        yield EdgeKey(source[span], end, block.input)

    def ends(self, key: EdgeKey) -> Ends:
        """The ends of an edge.

        Raises:
            InvalidArgumentError: the model has no such edge, or there is no such span.
        """
        (source, source_span), (target, span) = split_span(key.source), split_span(key.target)
        at, number = self._sources.get(source), self._readers.get(target)
        readers = None if number is None else self.decoder.readers[number]
        if (
            at is None or number is None or readers is None or at >= readers.upstream
            or (key.input and readers.kind != "heads")
        ):  # fmt: skip
            raise InvalidArgumentError(
                f"the model has no edge {Edge(*key).id!r}: its edges lead from 'input', "
                "'a0.h0', 'm0' and so on to the heads and MLPs of later layers and to 'logits'"
                + self._advice(source, target)
            )
        place = list(dict.fromkeys(node for node, _ in readers.inputs)).index(target)
        head = place if readers.kind == "heads" else None
        inputs = (key.input,) if key.input else INPUTS
        places = []
        for name in (source_span, span):
            if name is not None and name not in self.spans.names:
                known = ", ".join(map(str, self.spans.names))
                raise InvalidArgumentError(
                    f"the model has no edge {Edge(*key).id!r}: there is no position or span "
                    f"{name!r}: "
                    + ("give positions" if self.spans.index is None else f"known are {known}")
                )
            places.append(None if name is None else self.spans.names.index(name))
        found = Ends(at, places[0], number, place, head, inputs, places[1])
        if self.spans.others is not None and places[0] not in self.spans.sources:
            known = ", ".join(repr(self.spans.names[one]) for one in self.spans.sources)
            raise InvalidArgumentError(
                f"the model has no edge {Edge(*key).id!r}: the two texts of a pair have the same "
                f"roles, and other tokens have no counterpart, so an edge begins at {known}"
            )
        if not self._numbers(found):
            raise InvalidArgumentError(
                f"the model has no edge {Edge(*key).id!r}: the position of a node is where it "
                "writes. An edge into q, an MLP, an expert or the logits joins equal positions; "
                "one into k or v leads from the position of the key to that of a query which "
                "reads it"
            )
        return found

    def _advice(self, *names: str) -> str:
        """What to say of the names of an edge that is not there."""
        layers = {one.layer for one in self.decoder.writers if one.kind == "experts"}
        for name in names:
            node = Node(name)
            if node.kind == "expert" and not layers:
                return f": for {name!r} give experts=True"
            if node.kind == "mlp" and node.layer in layers:
                return f": with experts=True {name!r} is several nodes, '{node.id}.e0' and so on"
        return ""

    def numbers(self, keys: Iterable[EdgeKey]) -> list[list[int]]:
        """The numbers of edges.

        An edge into all inputs of a head has those of all, and one from or to a node without a
        position has those at all spans.

        Raises:
            InvalidArgumentError: the model has no such edge, or there is no such span.
        """
        return [self._numbers(self.ends(key)) for key in keys]

    def _numbers(self, ends: Ends) -> list[int]:
        found = []
        inputs = (None,) if ends.head is None else ends.inputs
        for block in self.of_readers(ends.readers).values():
            if block.input not in inputs or ends.span not in (None, block.span):
                continue
            _, upstream, spans = block.shape
            row = block.begin + (ends.target * upstream + ends.source) * spans
            found += [
                row + at
                for at, span in enumerate(block.sources)
                if ends.source_span in (None, span)
            ]
        return found

    def mask(self, edges: Iterable[EdgeKey]) -> Tensor:
        """Which edges are among some: booleans [edges].

        Raises:
            InvalidArgumentError: the model has no such edge, or there is no such span.
        """
        mask = torch.zeros(self.size, dtype=torch.bool)
        for numbers in self.numbers(edges):
            mask[numbers] = True
        return mask

    def nodes(self) -> list[Node]:
        """All nodes, each at all spans at which it has edges."""
        ends = {(name, span) for name in self.decoder.sources for span in self.spans.sources}
        ends.update(
            (target, block.span) for block in self.blocks if block.sources
            for target in block.targets
        )  # fmt: skip
        return [
            Node(self.spans.node(name, span))
            for span in range(len(self.spans))
            for name in (*self.decoder.sources, "logits")
            if (name, span) in ends
        ]

    def graph(self, edges: Iterable[Edge], **about: Any) -> CausalGraph:
        """A graph with all nodes, and with these edges."""
        nodes = {node.id: node for node in self.nodes()}
        edges = tuple(edges)
        for edge in edges:
            for name in (edge.source, edge.target):
                nodes.setdefault(name, Node(name))
        return CausalGraph(tuple(nodes.values()), edges, **about)


def is_causal(decoder: DecoderGraph, prompts: Prompts) -> bool:
    """Whether what the last token of an example writes is read at no earlier token.

    It is tried on the longest example: the residual stream of its last token gets another sign.
    Rounding may look like a change. Then the answer is False, and edges that cannot act have the
    effect 0.
    """
    real = prompts.as_run_on("clean").real_tokens()
    longest = int(real.sum(1).argmax())
    inputs = {name: one[longest : longest + 1] for name, one in prompts.clean.items()}
    last = int(real[longest].nonzero()[-1])

    def changed(residual: Tensor) -> Tensor:
        new = residual.clone()
        new[:, last] *= -1
        return new

    first, _ = written(decoder, inputs)
    start = apply(decoder.blocks[0].layer, changed, side="input")
    second, _ = written(decoder, inputs, edits=[start])
    earlier = real[longest].clone()
    earlier[last] = False
    return all(
        torch.allclose(
            one[:, earlier], other[:, earlier], rtol=1e-5, atol=1e-6 * float(one.abs().max())
        )
        for one, other in zip(first.values, second.values, strict=True)
    )
