"""Runs of a decoder in which single edges have the value of another run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import cast

import torch
from torch import Tensor

from ...analysis.causal_graph import EdgeInput
from ..decoders import Readers
from ..edits import Edit, apply
from ..experts import Experts
from ..installed import intervene
from ..metrics import Metric
from ..prompts import Prompts
from .edge_effects import precise
from .edge_space import EdgeSpace, Ends
from .residuals import Change, behind_norm, linear
from .spans import Spans

__all__ = ["Patched"]


class Patched:
    """Runs of one batch in which edges are patched, several edges side by side in the batch.

    Args:
        space: all edges.
        spans: of these examples, on the device of the model.
        batch: the examples, as the metric of the changed run gets them.
        inputs: those of the run that is changed.
        metric: of each example.
        difference: what nodes write in the other run, minus what they write in this one.
        edges: those that will be patched.
    """

    def __init__(
        self, space: EdgeSpace, spans: Spans, batch: Prompts, inputs: dict[str, Tensor],
        metric: Metric, difference: Change, edges: Sequence[Ends],
    ) -> None:  # fmt: skip
        self._graph = space.decoder
        self._spans = spans
        self._batch = batch
        self._inputs = inputs
        self._metric = metric
        self._difference = difference
        # The layers in which some results of heads must be those of the run without a patch.
        readers = {edge.readers for edge in edges if self._restores(edge)}
        self._restored = sorted(self._graph.readers[number].layer for number in readers)
        # The metric without a patch, and the results of heads, by copies of the batch.
        self._unpatched: dict[int, tuple[Tensor, dict[int, Tensor]]] = {}

    def effects(self, edges: Sequence[Ends]) -> Tensor:
        """The effects of edges, [edges, examples]."""
        copies = len(edges)
        if copies not in self._unpatched:
            # In a batch of the same size kernels round in the same way.
            results: dict[int, Tensor] = {}
            keep = [self._keep(layer, results) for layer in self._restored]
            self._unpatched[copies] = self._run(keep, copies), results
        by_readers: dict[int, list[tuple[slice, Ends]]] = {}
        size = len(self._batch)
        for at, edge in enumerate(edges):
            rows = slice(at * size, (at + 1) * size)
            by_readers.setdefault(edge.readers, []).append((rows, edge))
        unpatched, results = self._unpatched[copies]
        edits: list[Edit] = []
        for number, patched in by_readers.items():
            edits += self._edits(self._graph.readers[number], patched, results)
        return self._run(edits, copies) - unpatched

    def _restores(self, edge: Ends) -> bool:
        """Whether other results of the layer's heads change too, which are not the edge's."""
        if edge.head is None:
            return False
        shared = self._graph.blocks[self._graph.readers[edge.readers].layer].group > 1
        return shared or self._spans.columns(edge.span) is not None

    def _keep(self, layer: int, results: dict[int, Tensor]) -> Edit:
        def kept(value: Tensor) -> Tensor:
            results[layer] = value.clone()
            return value

        return apply(self._graph.blocks[layer].out, kept, side="input")

    @torch.no_grad()
    def _run(self, edits: Sequence[Edit], copies: int) -> Tensor:
        """The metric of each copy of the batch, [copies, examples]."""
        inputs = {name: torch.cat([one] * copies) for name, one in self._inputs.items()}
        with intervene(self._graph.model, *edits):
            output = self._graph.model(**inputs)
        given = self._metric.tensor_of(output)
        parts = [self._metric.of_tensor(part, self._batch) for part in given.chunk(copies)]
        return torch.stack([precise(part) for part in parts])

    def _change(self, edge: Ends) -> Tensor:
        """What the other run adds to the residual stream on an edge: [batch, tokens, width]."""
        change = self._difference.of_node(edge.source)
        spans = [edge.source_span]
        if edge.head is None:  # an MLP, an expert and the logits read their own tokens
            spans.append(edge.span)
        for span in spans:
            if (inside := self._spans.columns(span)) is not None:
                change = change * inside[..., None]
        return change

    def _of_experts(
        self, experts: Experts, readers: Readers, patched: list[tuple[slice, Ends]],
        kept: list[Tensor],
    ) -> Callable[[Tensor], Tensor]:  # fmt: skip
        """Changes the parts of single experts in what a block returns.

        Args:
            experts: of the block.
            readers: they.
            patched: the rows of the batch, and the edge in each.
            kept: the residual stream that they read, once it is known.
        """

        def change(returned: Tensor) -> Tensor:
            new = returned.clone().reshape(kept[0].shape)
            for rows, edge in patched:
                residual = kept[0][rows]
                changed = residual + self._change(edge).to(residual.dtype)
                # The difference of the parts, so that no change stays none.
                after, before = (
                    experts.parts(behind_norm(self._graph, readers.norm, one), [edge.target])[0]
                    for one in (changed, residual)
                )
                new[rows] += after - before
            return new.reshape(returned.shape)

        return change

    def _edits(
        self, readers: Readers, patched: list[tuple[slice, Ends]], unpatched: dict[int, Tensor]
    ) -> Iterator[Edit]:
        """The edits that change what readers read, each in its rows of the batch."""
        graph = self._graph
        shape = self._difference.values[0].shape[1:]

        def changed(residual: Tensor) -> Tensor:
            new = residual.clone().reshape(-1, *shape)
            for rows, edge in patched:
                new[rows] += self._change(edge).to(new.dtype)
            return new.reshape(residual.shape)

        if readers.kind == "logits":
            yield apply(readers.norm, changed, side="input")
            return
        kept: list[Tensor] = []

        def keep(residual: Tensor) -> Tensor:
            kept[:] = [residual]
            return residual

        yield apply(readers.at, keep, side="input")
        block = graph.blocks[readers.layer]
        if readers.kind == "mlp":
            yield apply(
                block.mlp, lambda _: behind_norm(graph, readers.norm, changed(kept[0])),
                side="input",
            )  # fmt: skip
            return
        if readers.kind == "experts":
            assert block.experts is not None
            yield apply(block.mlp, self._of_experts(block.experts, readers, patched, kept))
            return

        def projected(name: str, kinds: tuple[EdgeInput, ...]) -> Callable[[Tensor], Tensor]:
            weight, _ = linear(graph.module(name), name)

            def change(returned: Tensor) -> Tensor:
                returned = returned.clone()
                for rows, edge in patched:
                    residual = kept[0][rows]
                    new = residual + self._change(edge).to(residual.dtype)
                    # The difference of the projections, so that no change stays none.
                    both = [behind_norm(graph, readers.norm, one) for one in (new, residual)]
                    for kind in kinds:
                        if kind in edge.inputs:
                            columns = block.reads(cast(int, edge.head), kind).columns
                            ends = [one @ weight[columns].T for one in both]
                            returned[rows, ..., columns] += ends[0] - ends[1]
                return returned

            return change

        def restored(results: Tensor) -> Tensor:
            # Heads that share the key and value do not see the change, nor do other queries.
            results, own = results.clone(), unpatched[readers.layer].view(results.shape)
            for rows, edge in patched:
                columns = block.heads.columns(cast(int, edge.head)).columns
                new, old = results[rows, ..., columns].clone(), own[rows, ..., columns]
                inside = self._spans.columns(edge.span)
                results[rows] = own[rows]
                results[rows, ..., columns] = (
                    new if inside is None else torch.where(inside[..., None], new, old)
                )
            return results

        for name, kinds in block.projections().items():
            yield apply(name, projected(name, kinds))
        if any(self._restores(edge) for _, edge in patched):
            yield apply(block.out, restored, side="input")
