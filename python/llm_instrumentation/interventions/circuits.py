"""Circuits on a model: what it does when only the edges of a graph carry their own values::

circuit = edge_attribution(model, prompts, metric, steps=5).pruned(top_k=60)
run_circuit(model, prompts, metric, circuit).mean()
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal, get_args

import numpy as np
import torch
from torch import Tensor, nn

from .._extras import extra
from ..analysis.causal_graph import CausalGraph, EdgeInput, EdgeKey
from ..analysis.significance import Adjustment
from ..core.calls.padding import real_tokens
from ..errors import InvalidArgumentError
from ..progress.bars import Progress, reported
from .decoders import DecoderBlock, decoder
from .edits import Edit, apply
from .experts import Experts
from .installed import intervene
from .metrics import Metric, widened
from .paths.edge_effects import effects_graph, precise
from .paths.edge_space import EdgeBlock, EdgeSpace
from .paths.residuals import Change, Written, behind_norm, check_linear, linear, written
from .paths.spans import Spans
from .prompts import Positions, Prompts
from .running.runs import Floats, check_columns, check_given

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["Ablation", "Faithfulness", "faithfulness", "minimality", "run_circuit"]

Ablation = Literal["corrupted", "mean", "zero"]
"""The values of the edges outside of a circuit. "corrupted": the value of the source in the
corrupted run. "mean": the mean of the source over all tokens of the clean texts; that of heads is
taken before a norm behind them. "zero": zero.
"""

MIB_SHARES = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)


def run_circuit(
    model: nn.Module,
    prompts: Prompts,
    metric: Metric,
    graph: CausalGraph,
    *,
    ablation: Ablation = "corrupted",
    positions: Positions = None,
    experts: bool = False,
    batch_size: int = 8,
    progress: Progress = None,
) -> Tensor:
    """Runs a model in which only the edges of a graph carry the values of their sources.

    Each input of each node, of each head q, k and v apart, is the norm of a residual stream of its
    own: the sum of what the sources of its edges write in this run, and of what all others write in
    the ablated run. With all edges it is the clean model. Without edges it is the ablated one.

    Where heads share keys and values, the examples run once for each head of a group, because each
    head may see another key. Where a norm joins the queries or keys of all heads, as in OLMo 2,
    they run once for each head.

    Heads behind a norm (a post-norm) write together: a reader sees the norm of the sum of the heads
    whose edges are there, and of the ablated run's others. So nothing is approximated.

    With `experts` each expert of a mixture has a residual stream of its own. The router reads it
    too, and says whether this expert is chosen, and with which weight. So at a token the experts of
    a circuit may be more or fewer than those that the model chooses.

    Args:
        model: a decoder, see `register_decoder`, in evaluation mode.
        prompts: the examples.
        metric: what is measured.
        graph: the circuit. Its effects do not count.
        ablation: see `Ablation`.
        positions: those that the graph was made with, see `Positions`; None: its nodes have none.
        experts: as the graph was made with.
        batch_size: examples that run together.
        progress: shows a bar; see `Progress`.

    Returns:
        the metric of each example, [examples].

    Raises:
        UnsupportedError: (a TypeError) as for `edge_attribution`; the prompts have
            `corrupted_spans`, so tokens in no span have no counterpart.
        InvalidArgumentError: (a ValueError) the model has no such edge; an argument is out of its
            range.
    """
    runs = _CircuitRuns(model, prompts, metric, ablation, positions, experts, batch_size)
    masks = [runs.space.mask(edge.key for edge in graph.edges)]
    return runs.values(masks, progress, "circuit")[0]


@dataclasses.dataclass(frozen=True)
class Faithfulness:
    """The faithfulness of circuits of several sizes to their model.

    A faithfulness is (metric of the circuit - metric of the empty circuit) / (metric of the model -
    metric of the empty circuit): 1 is the model, 0 the ablated model.

    Attributes:
        shares: of all edges of the graph, those with the largest effects, that were chosen.
        edges: how many of them stayed, because they are on a path from the input to the logits.
        values: the metric of each circuit.
        faithfulness: of each circuit.
        without: the faithfulness of the model without the circuit: completeness. It is 0 if the
            circuit has all that matters.
        random: [draws, shares], the faithfulness of random circuits with as many edges.
        cpr: integrated circuit performance ratio: the area below `faithfulness` over the shares.
            Larger is better.
        cmd: integrated circuit-model distance: the area between `faithfulness` and 1. 0 is best.
        random_cpr: the mean area of the random circuits.
        clean, empty: the metric of the model, and of the empty circuit.
        metric: its name.
        ablation: of the edges outside of the circuits.
    """

    shares: tuple[float, ...]
    edges: tuple[int, ...]
    values: tuple[float, ...]
    faithfulness: tuple[float, ...]
    without: tuple[float, ...]
    random: Floats
    cpr: float
    cmd: float
    random_cpr: float
    clean: float
    empty: float
    metric: str
    ablation: Ablation

    def __repr__(self) -> str:
        return (
            f"<Faithfulness of {self.metric}, {len(self.shares)} sizes: CPR {self.cpr:.3f} (random "
            f"{self.random_cpr:.3f}), CMD {self.cmd:.3f}>"
        )

    def to_pandas(self) -> pd.DataFrame:
        """A row for each size: share, edges, value, faithfulness, without, random (the mean).

        Raises:
            MissingExtraError: pandas is not installed; the extra "report" brings it.
        """
        with extra("report", "to_pandas"):
            import pandas as pd

        columns = {
            "share": self.shares,
            "edges": self.edges,
            "value": self.values,
            "faithfulness": self.faithfulness,
            "without": self.without,
            "random": self.random.mean(axis=0),
        }
        found: pd.DataFrame = pd.DataFrame(columns)
        return found


def faithfulness(
    model: nn.Module,
    prompts: Prompts,
    metric: Metric,
    graph: CausalGraph,
    *,
    shares: Sequence[float] = MIB_SHARES,
    random: int = 3,
    seed: int = 0,
    ablation: Ablation = "corrupted",
    positions: Positions = None,
    experts: bool = False,
    batch_size: int = 8,
    progress: Progress = None,
) -> Faithfulness:
    """Runs circuits of several sizes, and says how faithful they are.

    The circuits are the edges with the largest absolute effects, as far as they are connected. The
    sizes and areas are those of the benchmark MIB (Mueller et al. 2025). An area begins at the
    smallest share. Random circuits have as many edges, on random paths from the input to the
    logits.

    Args:
        model: a decoder, as for `run_circuit`.
        prompts: the examples.
        metric: what is measured.
        graph: all edges with their effects, not pruned.
        shares: of all edges, rising.
        random: the number of random circuits of each size.
        seed: of the random circuits.
        ablation: see `Ablation`.
        positions: those that the graph was made with, see `Positions`; None: its nodes have none.
        experts: as the graph was made with.
        batch_size: examples that run together.
        progress: shows a bar; see `Progress`.

    Raises:
        UnsupportedError: (a TypeError) as for `edge_attribution`.
        InvalidArgumentError: (a ValueError) the metric of the model is that of the empty circuit;
            the graph lacks edges or effects; shares do not rise from 0 to 1; as for `run_circuit`.
    """
    rising = all(one < other for one, other in itertools.pairwise(shares))
    if len(shares) < 2 or not rising or shares[0] < 0 or shares[-1] > 1:
        raise InvalidArgumentError(
            f"shares = {tuple(shares)}: give two or more rising numbers from 0 to 1"
        )
    if random < 1:
        raise InvalidArgumentError(f"random = {random}: give at least 1")
    runs = _CircuitRuns(model, prompts, metric, ablation, positions, experts, batch_size)
    if len(graph.edges) != runs.space.size:
        raise InvalidArgumentError(
            f"the graph has {len(graph.edges):,} edges, the model {runs.space.size:,}: give all "
            "edges, not a pruned graph, because the circuits are shares of all"
        )
    generator = np.random.default_rng(seed)
    chosen = [_largest(graph, int(share * len(graph.edges))) for share in shares]
    paths = _Paths(graph)
    drawn = [[paths.draw(len(keys), generator) for keys in chosen] for _ in range(random)]
    masks = [runs.space.mask(keys) for keys in chosen]
    whole = torch.ones(runs.space.size, dtype=torch.bool)
    asked = [whole, ~whole, *masks, *(~mask for mask in masks)]
    asked += [runs.space.mask(keys) for row in drawn for keys in row]
    means = runs.values(asked, progress, "faithfulness").double().mean(1).numpy()
    clean, empty = float(means[0]), float(means[1])
    if abs(clean - empty) <= 1e-6 * max(abs(clean), abs(empty)):
        raise InvalidArgumentError(
            f"{metric.name!r} is {clean:.6g} of the model and {empty:.6g} of the empty circuit, so "
            "there is nothing that a circuit could do: choose other corrupted texts"
        )
    share_of = (means[2:] - empty) / (clean - empty)
    faithful, without, randoms = np.split(share_of, [len(shares), 2 * len(shares)])
    randoms = randoms.reshape(random, len(shares))
    return Faithfulness(
        shares=tuple(shares),
        edges=tuple(len(keys) for keys in chosen),
        values=tuple(means[2 : 2 + len(shares)].tolist()),
        faithfulness=tuple(faithful.tolist()),
        without=tuple(without.tolist()),
        random=randoms,
        cpr=_area(shares, faithful),
        cmd=_area(shares, np.abs(1 - faithful)),
        random_cpr=_area(shares, randoms.mean(axis=0)),
        clean=clean,
        empty=empty,
        metric=metric.name,
        ablation=ablation,
    )


def _area(shares: Sequence[float], heights: Floats) -> float:
    """The area below a line, by trapezoids."""
    return float((np.diff(shares) * (heights[1:] + heights[:-1]) / 2).sum())


def _largest(graph: CausalGraph, count: int) -> list[EdgeKey]:
    return [edge.key for edge in graph.pruned(top_k=count).edges] if count else []


class _Paths:
    """Random circuits of a graph: edges on random paths from an input to an output."""

    def __init__(self, graph: CausalGraph) -> None:
        self._edges = graph.edges
        self._inputs = {node.id for node in graph.inputs}
        self._outputs = {node.id for node in graph.outputs}
        self._into: dict[str, list[int]] = defaultdict(list)
        self._out_of: dict[str, list[int]] = defaultdict(list)
        for at, edge in enumerate(self._edges):
            self._into[edge.target].append(at)
            self._out_of[edge.source].append(at)

    def draw(self, count: int, generator: np.random.Generator) -> list[EdgeKey]:
        """A circuit of `count` edges; of fewer only if no path fits into the rest."""
        taken: set[int] = set()
        for at in generator.permutation(len(self._edges)).tolist():
            if len(taken) == count:
                break
            both = taken | self._path(at, generator)
            if len(both) <= count:
                taken = both
        return [self._edges[at].key for at in sorted(taken)]

    def _path(self, at: int, generator: np.random.Generator) -> set[int]:
        """The edges of a random path through an edge."""
        path = {at}
        node = self._edges[at].target
        while node not in self._outputs:
            path.add(step := int(generator.choice(self._out_of[node])))
            node = self._edges[step].target
        node = self._edges[at].source
        while node not in self._inputs:
            path.add(step := int(generator.choice(self._into[node])))
            node = self._edges[step].source
        return path


def minimality(
    model: nn.Module,
    prompts: Prompts,
    metric: Metric,
    circuit: CausalGraph,
    *,
    ablation: Ablation = "corrupted",
    positions: Positions = None,
    experts: bool = False,
    batch_size: int = 8,
    confidence: float | None = 0.95,
    p_values: Adjustment | None = None,
    progress: Progress = None,
) -> CausalGraph:
    """Measures what each edge of a circuit does in it. It takes a run for each edge.

    Args:
        model: a decoder, as for `run_circuit`.
        prompts: the examples.
        metric: what is measured.
        circuit: the circuit. Its effects do not count.
        ablation: see `Ablation`.
        positions: those that the graph was made with, see `Positions`; None: its nodes have none.
        experts: as the graph was made with.
        batch_size: examples that run together.
        confidence: of the intervals of the effects over the examples; None: without intervals.
        p_values: how the p-values of the edges are adjusted for their number, see `adjusted`; None:
            without p-values. They are those of `permutation_test`, so none is below 0.0002 times
            the number of edges with "holm".
        progress: shows a bar; see `Progress`.

    Returns:
        the circuit. The effect of an edge is the metric of the circuit without this edge, minus the
        metric of the circuit. An edge whose effect is near 0 is not needed.

    Raises:
        UnsupportedError, InvalidArgumentError: as for `run_circuit`; the circuit has no edges.
    """
    keys = [edge.key for edge in circuit.edges]
    if not keys:
        raise InvalidArgumentError("the circuit has no edges")
    runs = _CircuitRuns(model, prompts, metric, ablation, positions, experts, batch_size)
    whole = runs.space.mask(keys)
    masks = [whole]
    for numbers in runs.space.numbers(keys):
        masks.append(whole.clone())
        masks[-1][numbers] = False
    masks += [torch.ones_like(whole), torch.zeros_like(whole)]
    alone, *without, model_alone, nothing = runs.values(masks, progress, "minimality")
    effects = (torch.stack(without) - alone).T.numpy().astype(np.float32)
    found = effects_graph(
        runs.space, keys, effects, confidence=confidence, p_values=p_values, metric=metric,
        method=f"minimality, {ablation}", clean=model_alone, corrupted=nothing,
    )  # fmt: skip
    notes = {**found.notes, "circuit alone": float(alone.double().mean())}
    return dataclasses.replace(found, nodes=circuit.nodes, notes=notes)


class _CircuitRuns:
    """Runs circuits of one model on the same examples."""

    def __init__(
        self, model: nn.Module, prompts: Prompts, metric: Metric, ablation: Ablation,
        positions: Positions, experts: bool, batch_size: int,
    ) -> None:  # fmt: skip
        check_given(prompts, metric, batch_size)
        check_columns(prompts)
        if ablation not in get_args(Ablation):
            raise InvalidArgumentError(
                f'ablation = {ablation!r}: give "corrupted", "mean" or "zero"'
            )
        self._decoder = decoder(model, experts=experts)
        check_linear(self._decoder)
        prompts.check_for(model)
        self.space = EdgeSpace.of(self._decoder, positions, prompts)
        self._prompts = prompts
        self._metric = metric
        self._ablation = ablation
        # The queries of each span read keys of their own, so an example runs once for each.
        self._batch_size = max(1, batch_size // len(self.space.spans))

    def values(self, masks: Sequence[Tensor], progress: Progress, what: str) -> Tensor:
        """The metric of each example with the edges of each mask, [masks, examples].

        Args:
            masks: booleans [edges]. Equal ones run once.
            progress, what: of the bar.
        """
        numbers: dict[bytes, int] = {}
        which = [numbers.setdefault(mask.numpy().tobytes(), len(numbers)) for mask in masks]
        distinct = [masks[which.index(number)] for number in range(len(numbers))]
        means = self._means() if self._ablation == "mean" else None
        found: list[Tensor] = []
        done, total = 0, len(self._prompts) * len(distinct)
        with reported(progress, what) as tell:
            first = 0
            for batch in self._prompts.batches(self._batch_size):
                reference = self._reference(batch, means, check=not found)
                residuals = reference.residuals()
                spans = self.space.spans.part(slice(first, first + len(batch)))
                spans = spans.on(residuals[0].device)
                rows = []
                for mask in distinct:
                    circuit = _Circuit(self.space, spans, reference, residuals, mask)
                    rows.append(precise(circuit.run(batch, self._metric)))
                    done += len(batch)
                    tell(done, total)
                found.append(torch.stack(rows))
                first += len(batch)
        return torch.cat(found, 1)[which]

    def _reference(self, batch: Prompts, means: list[Tensor] | None, *, check: bool) -> Written:
        """What all nodes write where no edge is in the circuit."""
        inputs = batch.corrupted if self._ablation == "corrupted" else batch.clean
        run, _ = written(self._decoder, inputs, check=check)
        if means is not None:
            pairs = zip(means, run.values, strict=True)
            return Written(self._decoder, [mean.expand_as(value) for mean, value in pairs])
        if self._ablation == "zero":
            return Written(self._decoder, [torch.zeros_like(value) for value in run.values])
        return run

    def _means(self) -> list[Tensor]:
        """The mean of what each of the writers writes, over all tokens of the clean texts."""
        totals: list[Tensor] = []
        count = 0
        for batch in self._prompts.batches(self._batch_size):
            run, _ = written(self._decoder, batch.clean)
            rows = [value.flatten(0, 1) for value in run.values]
            mask = batch.clean.get("attention_mask")
            real = real_tokens(mask, *run.values[0].shape[:2], of="attention_mask")
            if real is not None:
                rows = [one[real.flatten().to(one.device)] for one in rows]
            sums = [one.double().sum(0) for one in rows]
            totals = [a + b for a, b in zip(totals, sums, strict=True)] if totals else sums
            count += len(rows[0])
        return [
            (total / count).to(value.dtype) for total, value in zip(totals, run.values, strict=True)
        ]


class _Circuit:
    """One run of one batch with some edges.

    The model's own residual stream goes on, but nothing reads it: all inputs of nodes are replaced.

    Args:
        space: all edges.
        spans: of these examples.
        reference: what nodes write on edges that are not there.
        residuals: what the readers read without any edge.
        mask: the edges that are there.
    """

    def __init__(
        self, space: EdgeSpace, spans: Spans, reference: Written, residuals: list[Tensor],
        mask: Tensor,
    ) -> None:  # fmt: skip
        self._space = space
        self._spans = spans
        self._decoder = space.decoder
        self._reference = reference
        self._residuals = residuals
        self._mask = mask
        self._change = Change(reference, {})
        self._shape = residuals[0].shape
        # The copies of the batch: the heads of a group see different keys and values, and so do
        # the queries of different spans.
        self._group = max(block.group for block in self._decoder.blocks)
        self._copies = self._group * len(spans)

    @torch.no_grad()
    def run(self, batch: Prompts, metric: Metric) -> Tensor:
        """The metric of each example."""
        decoder = self._decoder
        edits: list[Edit] = []
        for number, writers in enumerate(decoder.writers):
            block = decoder.blocks[writers.layer]
            if writers.kind == "input":
                edits.append(apply(block.layer, self._keep(number), side="input"))
            elif writers.kind == "heads":
                edits.append(apply(block.out, self._keep_heads(number, block), side="input"))
            elif writers.kind == "mlp":
                edits.append(apply(block.mlp_out, self._keep(number)))
        for number, readers in enumerate(decoder.readers):
            if readers.kind == "logits":
                edits.append(apply(readers.norm, self._into(number, None), side="input"))
                continue
            block = decoder.blocks[readers.layer]
            if readers.kind == "mlp":
                edits.append(apply(block.mlp, self._into(number, readers.norm), side="input"))
            elif block.experts is not None and readers.kind == "experts":
                edits.append(apply(block.mlp, self._into_experts(number, block.experts)))
            else:
                for name, kinds in block.projections().items():
                    edits.append(apply(name, self._projected(number, block, name, kinds)))
        inputs = {name: torch.cat([one] * self._copies) for name, one in batch.clean.items()}
        with intervene(decoder.model, *edits):
            output = decoder.model(**inputs)
        return metric.of_tensor(metric.tensor_of(output)[: len(batch)], batch)

    def _keep(self, number: int) -> Callable[[Tensor], Tensor]:
        def kept(value: Tensor) -> Tensor:
            size = value.numel() // self._copies
            self._set(number, value.flatten()[:size].view(*self._shape[:2], -1))
            return value

        return kept

    def _keep_heads(self, number: int, block: DecoderBlock) -> Callable[[Tensor], Tensor]:
        def kept(value: Tensor) -> Tensor:
            heads = block.heads.heads
            copies = value.view(self._group, len(self._spans), *self._shape[:2], heads, -1)
            each = [
                self._of_queries(copies[head % block.group, ..., head, :]) for head in range(heads)
            ]
            self._set(number, torch.cat(each, -1))
            return value

        return kept

    def _set(self, number: int, value: Tensor) -> None:
        """One of the writers has written in this run."""
        self._change.values[number] = widened(value) - widened(self._reference.values[number])

    def _of_queries(self, copies: Tensor) -> Tensor:
        """The results at each token, from the copy whose keys and values its span reads.

        Args:
            copies: [spans, batch, tokens, width].
        """
        if self._spans.index is None:
            return copies[0]
        # Padding is in no span, and nothing reads it.
        own = self._spans.index.clamp(max=len(self._spans) - 1)
        return copies.gather(0, own[None, ..., None].expand(1, *copies.shape[1:]))[0]

    def _into(self, number: int, norm: str | None) -> Callable[[Tensor], Tensor]:
        """Replaces what an MLP or the last norm receives."""

        def change(value: Tensor) -> Tensor:
            residual = self._residuals_of(number, None, None)[0][0]
            if norm is not None:
                residual = behind_norm(self._decoder, norm, residual)
            return torch.cat([residual] * self._copies).reshape(value.shape)

        return change

    def _into_experts(self, number: int, experts: Experts) -> Callable[[Tensor], Tensor]:
        """Calculates the part of each expert from the residual stream that this expert reads."""
        readers = self._decoder.readers[number]
        writers = next(
            at for at, one in enumerate(self._decoder.writers)
            if one.kind == "experts" and one.layer == readers.layer
        )  # fmt: skip

        def change(returned: Tensor) -> Tensor:
            residuals, which = self._residuals_of(number, None, None)
            received = behind_norm(self._decoder, readers.norm, residuals)
            parts: dict[int, Tensor] = {}
            for at, one in enumerate(received):
                own = [place for place, other in enumerate(which) if other == at]
                parts.update(zip(own, experts.parts(one, own), strict=True))
            self._set(writers, torch.cat([parts[place] for place in range(len(which))], -1))
            return returned  # of the model's own residual stream, which nothing reads

        return change

    def _projected(
        self, number: int, block: DecoderBlock, name: str, kinds: tuple[EdgeInput, ...]
    ) -> Callable[[Tensor], Tensor]:
        """Replaces what a projection returns: q, k or v of all heads."""
        decoder = self._decoder
        weight, bias = linear(decoder.module(name), name)

        def change(returned: Tensor) -> Tensor:
            new = returned.clone().view(self._group, len(self._spans), *self._shape[:2], -1)
            for kind in kinds:
                # A query is read in its own span. Keys and values differ by the query's span.
                for span in (None,) if kind == "q" else range(len(self._spans)):
                    residuals, which = self._residuals_of(number, kind, span)
                    normed = behind_norm(decoder, decoder.readers[number].norm, residuals)
                    for head in range(block.heads.heads):
                        columns = block.reads(head, kind).columns
                        shared = kind == "q" and not block.heads.layout.joint
                        group = slice(None) if shared else head % block.group
                        new[group, slice(None) if span is None else span, ..., columns] = (
                            nn.functional.linear(
                                normed[which[head]],
                                weight[columns],
                                None if bias is None else bias[columns],
                            )
                        )
            return new.view(returned.shape)

        return change

    def _residuals_of(
        self, number: int, kind: EdgeInput | None, span: int | None
    ) -> tuple[Tensor, list[int]]:
        """The residual streams that some inputs of the readers read.

        Args:
            number: of the readers.
            kind: which inputs; None: those of an MLP or the logits.
            span: of the results; None: each token is read for results in its own span.

        Returns:
            the different ones, [different, batch, tokens, width], and which of them each has.
        """
        blocks = self._space.of_readers(number)
        spans = range(len(self._spans)) if span is None else [span]
        masks = [self._sources(blocks[one, kind]) for one in spans]
        mask = torch.stack(masks).any(0)
        different, which = torch.unique(mask, dim=0, return_inverse=True)
        residual = self._residuals[number]
        found = widened(residual).repeat(len(different), 1, 1, 1)
        for at, writers in enumerate(self._decoder.writers):
            there = different[:, writers.begin : writers.end]
            if writers.end <= blocks[0, kind].upstream and there.any():
                sources = self._change.before_norm(at)
                there = there.to(sources)
                if self._spans.index is None:
                    together = torch.einsum("us,sbtd->ubtd", there[..., 0], sources)
                else:
                    tokens = there[..., self._spans.index]
                    together = torch.einsum("usbt,sbtd->ubtd", tokens, sources)
                found += self._change.written(at, together)
        return found.to(residual.dtype), which.tolist()

    def _sources(self, block: EdgeBlock) -> Tensor:
        """Which sources are there for each target, booleans [targets, nodes, spans + 1].

        The last column is that of padding.
        """
        mask = torch.zeros(*block.shape[:2], len(self._spans) + 1, dtype=torch.bool)
        mask[..., list(block.sources)] = self._mask[block.edges].view(block.shape)
        return mask
