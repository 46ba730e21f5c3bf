"""Effects of the edges of a pre-norm decoder: approximate ones of all edges, and exact ones::

graph = edge_attribution(model, prompts, logit_difference(), steps=5)
exact = edge_patching(model, prompts, logit_difference(), graph.pruned(top_k=50))
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any, cast, get_args

import numpy as np
import torch
from torch import Tensor, nn

from ..analysis.causal_graph import CausalGraph, Edge, EdgeInput, EdgeKey
from ..analysis.causal_graph.parts import INPUTS
from ..analysis.significance import Adjustment
from ..errors import InvalidArgumentError, UnsupportedError
from ..progress.bars import Progress, reported
from ._edge_effects import effects_graph, precise
from ._residuals import Written, before_norm, behind_norm, check_linear, linear, written
from .decoders import DecoderBlock, PreNormDecoder, Readers, decoder
from .edits import Edit, apply
from .installed import intervene
from .metrics import Metric, widened
from .prompts import Direction, Prompts
from .running.integration import points
from .running.runs import check_given, check_gradients, frozen, warn_of_flat

__all__ = ["edge_attribution", "edge_patching"]

_EDGE = re.compile(r"(\S+?)->(\S+?)(?:<([qkv])>)?")


def edge_attribution(
    model: nn.Module,
    prompts: Prompts,
    metric: Metric,
    *,
    steps: int | None = None,
    batch_size: int = 8,
    confidence: float | None = 0.95,
    progress: Progress = None,
) -> CausalGraph:
    """Approximates the effects of all edges with gradients: EAP, or EAP-IG.

    The effect of an edge is what its source writes to the residual stream in the corrupted run
    minus what it writes in the clean run, times the gradient of the metric at the input of its
    target before the norm, summed over tokens and width. So it estimates the metric with the
    corrupted value on this edge, minus the metric of the clean run. q, k and v of each head have
    gradients of their own, also where heads share keys and values.

    EAP (Nanda 2023; Syed et al. 2023) takes the gradient of the clean run. EAP-IG (Hanna et al.
    2024) takes the mean of the gradients on the way from the clean embeddings to the corrupted
    ones, by the trapezoidal rule. That helps where a gradient is flat, as in a saturated softmax.

    Memory is bounded by the batch. Beside what a forward and backward pass takes there are about 15
    tensors of the size [batch, tokens, width] for each layer, and about 12 for each head of one
    layer. The effects take 4 bytes for each example and edge.

    A warning says that the gradient of the metric is 0 in the clean run, and there are no `steps`.

    Args:
        model: a pre-norm decoder, see `register_decoder`, in evaluation mode.
        prompts: the examples.
        metric: what the effects are effects on. It needs a gradient.
        steps: of EAP-IG; it takes a forward and backward pass more than that. None:
            EAP.
        batch_size: examples that run together.
        confidence: of the intervals of the effects over the examples, by `bootstrap_interval`; an
            interval is None for one example, or where the examples do not bound it. None: without
            intervals, which is faster for a large number of edges.
        progress: shows a bar; see `Progress`.

    Returns:
        a graph of all edges. Prune it for a circuit.

    Raises:
        UnsupportedError: (a TypeError) the model is no pre-norm decoder that is known, or its
            projections are quantised; the metric has no gradient; while the model runs: the
            residual stream is not the sum that the layout says; see also `intervene`.
        InvalidArgumentError: (a ValueError) an argument is out of its range.
    """
    way = points(steps)
    check_given(prompts, metric, batch_size)
    check_gradients(model, metric)
    warn_of_flat(metric, steps, "noising")
    if torch.is_inference_mode_enabled():
        raise InvalidArgumentError(
            "attribution needs gradients: call it outside of torch.inference_mode()"
        )
    graph = decoder(model)
    check_linear(graph)
    prompts.check_for(model)
    scores = torch.zeros(len(prompts), graph.size)
    metrics: list[list[Tensor]] = [[], []]
    done, total = 0, len(prompts) * len(way)
    with reported(progress, "edge attribution") as tell, frozen(model):
        first = 0
        for batch in prompts.batches(batch_size):
            clean, corrupted = _both(graph, batch, metric, metrics, check=not first)
            rows = scores[first : first + len(batch)]
            difference, embedded = corrupted.minus(clean), clean.values[0]
            del clean, corrupted
            for share, weight in way:
                start = (embedded + share * difference.values[0]).to(embedded.dtype)
                for readers, gradients in _gradients(graph, batch, start, metric):
                    _add_products(rows, readers, gradients, difference, weight)
                done += len(batch)
                tell(done, total)
            first += len(batch)
    return effects_graph(
        graph, list(graph.edges()), scores.numpy(), confidence=confidence, p_values=None,
        metric=metric,
        method="EAP" if steps is None else f"EAP-IG, {steps} steps",
        clean=torch.cat(metrics[0]), corrupted=torch.cat(metrics[1]),
    )  # fmt: skip


def _both(
    graph: PreNormDecoder,
    batch: Prompts,
    metric: Metric,
    metrics: list[list[Tensor]],
    *,
    check: bool,
) -> tuple[Written, Written]:
    """The clean and the corrupted run of a batch. Their metrics are appended to the two lists."""
    found = []
    for inputs, values in zip((batch.clean, batch.corrupted), metrics, strict=True):
        run, output = written(graph, inputs, check=check)
        values.append(precise(metric(output, batch)))
        found.append(run)
    return found[0], found[1]


def _add_products(
    scores: Tensor, readers: Readers, gradients: Tensor, difference: Written, weight: float
) -> None:
    """Adds the effects of all edges into some readers: [examples, edges] of the decoder."""
    block = scores[:, readers.edges].view(len(scores), len(readers.inputs), readers.upstream)
    for number, writers in enumerate(difference.decoder.writers):
        if writers.end <= readers.upstream:
            sources = difference.spread(number).to(gradients.dtype)
            products = torch.einsum("sbtd,rbtd->brs", sources, gradients)
            block[:, :, writers.begin : writers.end] += weight * products.cpu()


def _gradients(
    graph: PreNormDecoder, batch: Prompts, start: Tensor, metric: Metric
) -> Iterator[tuple[Readers, Tensor]]:
    """The gradients of the metric at what each of the readers reads, before its norm.

    Args:
        graph: the decoder.
        batch: the examples; their clean inputs run.
        start: replaces the residual stream before the first layer.
        metric: of each example.

    Yields:
        the readers, and their gradients [inputs, batch, tokens, width] in float32 or float64.
    """
    leaf = start.detach().clone().requires_grad_()
    residuals: dict[int, Tensor] = {}
    ends: dict[int, Tensor] = {}
    returned: dict[str, Tensor] = {}

    def keep(into: dict[Any, Tensor], key: Any) -> Callable[[Tensor], Tensor]:
        def kept(value: Tensor) -> Tensor:
            into[key] = value
            return value

        return kept

    def keep_own(number: int) -> Callable[[Tensor], Tensor]:
        def kept(value: Tensor) -> Tensor:
            # A copy, because attention may read the same tensor.
            ends[number] = value.clone()
            return ends[number]

        return kept

    edits = [apply(graph.blocks[0].layer, lambda _: leaf, side="input")]
    for number, readers in enumerate(graph.readers):
        edits.append(apply(readers.norm, keep(residuals, number), side="input"))
        if readers.kind == "logits":
            edits.append(apply(readers.norm, keep_own(number)))
            continue
        block = graph.blocks[readers.layer]
        if readers.kind == "mlp":
            edits.append(apply(block.mlp, keep_own(number), side="input"))
        else:
            edits.append(apply(block.out, keep(ends, number), side="input"))
            edits.extend(apply(name, keep(returned, name)) for name in block.projections())
    with torch.enable_grad(), intervene(graph.model, *edits):
        values = metric(graph.model(**batch.clean), batch)
    if not values.requires_grad:
        raise UnsupportedError(f"{metric.name!r} has no gradient: use edge_patching")
    wanted = [ends[number] for number in range(len(graph.readers))]
    found = torch.autograd.grad(
        values.sum(), wanted, retain_graph=True, allow_unused=True, materialize_grads=True
    )
    for number, readers in enumerate(graph.readers):
        residual = residuals[number].detach().reshape(start.shape)
        if readers.kind == "heads":
            block = graph.blocks[readers.layer]
            behind = _into_heads(graph, block, ends[number], found[number], returned)
        else:
            behind = found[number].reshape(1, *start.shape)
        gradients = before_norm(graph, readers.norm, residual, behind)
        yield readers, widened(gradients)


def _into_heads(
    graph: PreNormDecoder,
    block: DecoderBlock,
    results: Tensor,
    gradient: Tensor,
    returned: dict[str, Tensor],
) -> Tensor:
    """The gradients at what q, k and v of each head are projections of.

    Args:
        graph: the decoder.
        block: its layer.
        results: of the heads, [batch, tokens, heads * head_dim].
        gradient: at the results.
        returned: what each projection returned.

    Returns:
        [heads * 3, batch, tokens, width].
    """
    names = list(block.projections())
    heads = block.heads.heads
    by_head = gradient.reshape(*gradient.shape[:2], heads, -1)
    number = torch.arange(heads, device=gradient.device)
    found: list[Tensor] = [gradient] * (3 * heads)
    # Heads that share a key have its gradient together. So one head of each group has its turn.
    for turn in range(block.group):
        alone = (by_head * (number % block.group == turn)[:, None]).reshape(gradient.shape)
        gradients = torch.autograd.grad(
            results, [returned[name] for name in names], alone,
            retain_graph=True, allow_unused=True, materialize_grads=True,
        )  # fmt: skip
        of = dict(zip(names, gradients, strict=True))
        for head in range(turn, heads, block.group):
            for at, kind in enumerate(INPUTS):
                place = block.heads.columns(head, kind)
                weight, _ = linear(graph.module(place.module), place.module)
                found[3 * head + at] = of[place.module][..., place.columns] @ weight[place.columns]
    return torch.stack(found)


# ---- exact effects ----------------------------------------------------------------------------


def edge_patching(
    model: nn.Module,
    prompts: Prompts,
    metric: Metric,
    edges: CausalGraph | Iterable[Edge | EdgeKey | str] | None = None,
    *,
    direction: Direction = "noising",
    batch_size: int = 32,
    confidence: float | None = 0.95,
    p_values: Adjustment | None = None,
    progress: Progress = None,
) -> CausalGraph:
    """Measures the effect of each edge in a separate run: path patching on a pre-norm decoder.

    The target of the edge reads a sum in which what the source has written is that of the other
    run. All other readers of the source see its own value. What follows from the changed target
    flows on to the logits.

    It takes a forward pass of the examples for each edge. So measure the edges that
    `edge_attribution` found, or those of a small model.

    Args:
        model: a pre-norm decoder, see `register_decoder`, in evaluation mode.
        prompts: the examples.
        metric: what the effects are effects on.
        edges: which; texts as "m0->a1.h0<v>". One into a head without an input enters q, k and v
            at once. None: all edges of the model.
        direction: see `Direction`. The effect is the metric with the patch minus that of the run
            that it is put into. By default it is what `edge_attribution` estimates. (For nodes
            `activation_patching` puts clean values into the corrupted run by default.)
        batch_size: examples that run together, each with one edge.
        confidence: of the intervals of the effects over the examples; None: without intervals.
        p_values: how the p-values of the edges are adjusted for their number, see `adjusted`; None:
            without p-values. They are those of `permutation_test`, so none is below 0.0002 times
            the number of edges with "holm".
        progress: shows a bar; see `Progress`.

    Returns:
        a graph of all nodes, and of these edges. Its `clean` and `corrupted` are the metric of the
        two runs.

    Raises:
        UnsupportedError: (a TypeError) as for `edge_attribution`.
        InvalidArgumentError: (a ValueError) there is no such edge; an argument is out of its range.
    """
    if direction not in get_args(Direction):
        raise InvalidArgumentError(f'direction = {direction!r}: give "noising" or "denoising"')
    check_given(prompts, metric, batch_size)
    graph = decoder(model)
    check_linear(graph)
    prompts.check_for(model)
    keys = list(graph.edges()) if edges is None else list(dict.fromkeys(map(_key, _edges(edges))))
    if not keys:
        raise InvalidArgumentError("edges is empty: give some, or None for all")
    graph.numbers(keys)  # refuses unknown ones
    patches = [_Patch.of(graph, key) for key in keys]
    effects = np.zeros((len(prompts), len(keys)), np.float32)
    metrics: list[list[Tensor]] = [[], []]
    with reported(progress, "edge patching") as tell:
        first = 0
        for batch in prompts.batches(batch_size):
            runs = _both(graph, batch, metric, metrics, check=not first)
            base, other = runs if direction == "noising" else runs[::-1]
            inputs = batch.clean if direction == "noising" else batch.corrupted
            patched = _Patched(graph, batch, inputs, metric, base, other.minus(base))
            together = max(1, batch_size // len(batch))
            for begin in range(0, len(keys), together):
                some = patched.effects(patches[begin : begin + together])
                rows = slice(first, first + len(batch))
                effects[rows, begin : begin + together] = some.T.numpy()
                tell(first * len(keys) + min(begin + together, len(keys)) * len(batch),
                     len(prompts) * len(keys))  # fmt: skip
            first += len(batch)
    found = effects_graph(
        graph, keys, effects, confidence=confidence, p_values=p_values, metric=metric,
        method=f"edge patching, {direction}",
        clean=torch.cat(metrics[0]), corrupted=torch.cat(metrics[1]),
    )  # fmt: skip
    return (
        dataclasses.replace(found, nodes=edges.nodes) if isinstance(edges, CausalGraph) else found
    )


def _edges(edges: CausalGraph | Iterable[Edge | EdgeKey | str]) -> Iterable[Edge | EdgeKey | str]:
    if isinstance(edges, CausalGraph):
        return edges.edges
    return [edges] if isinstance(edges, str) else edges


def _key(edge: Edge | EdgeKey | str) -> EdgeKey:
    if isinstance(edge, Edge):
        return edge.key
    if isinstance(edge, EdgeKey):
        return edge
    found = _EDGE.fullmatch(edge) if isinstance(edge, str) else None
    if found is None:
        raise InvalidArgumentError(f'{edge!r} is no edge: give them as "m0->a1.h0<v>"')
    return EdgeKey(found[1], found[2], cast("EdgeInput | None", found[3]))


@dataclasses.dataclass(frozen=True)
class _Patch:
    """An edge that is patched.

    Attributes:
        source: the number of the node that writes.
        readers: the number of the readers.
        head: of the target; None: it is no head.
        inputs: of the head.
    """

    source: int
    readers: int
    head: int | None
    inputs: tuple[EdgeInput, ...]

    @classmethod
    def of(cls, graph: PreNormDecoder, key: EdgeKey) -> _Patch:
        source = graph.sources.index(key.source)
        for number, readers in enumerate(graph.readers):
            nodes = [node for node, _ in readers.inputs]
            if key.target in nodes:
                head = nodes.index(key.target) // 3 if readers.kind == "heads" else None
                inputs = (key.input,) if key.input else INPUTS
                return cls(source, number, head, inputs)
        raise AssertionError(key)


class _Patched:
    """Runs of one batch in which edges are patched, several edges side by side in the batch."""

    def __init__(
        self, graph: PreNormDecoder, batch: Prompts, inputs: dict[str, Tensor], metric: Metric,
        base: Written, difference: Written,
    ) -> None:  # fmt: skip
        self._graph = graph
        self._batch = batch
        self._inputs = inputs
        self._metric = metric
        self._base = base
        self._difference = difference
        self._unpatched: dict[int, Tensor] = {}

    def effects(self, patches: list[_Patch]) -> Tensor:
        """The effects of edges, [edges, examples]."""
        copies = len(patches)
        if copies not in self._unpatched:
            # In a batch of the same size kernels round in the same way.
            self._unpatched[copies] = self._run([], copies)
        return self._run(patches, copies) - self._unpatched[copies]

    @torch.no_grad()
    def _run(self, patches: list[_Patch], copies: int) -> Tensor:
        edits: list[Edit] = []
        by_readers: dict[int, list[tuple[slice, _Patch]]] = {}
        size = len(self._batch)
        for at, patch in enumerate(patches):
            rows = slice(at * size, (at + 1) * size)
            by_readers.setdefault(patch.readers, []).append((rows, patch))
        for number, patched in by_readers.items():
            edits += self._edits(self._graph.readers[number], patched)
        inputs = {name: torch.cat([one] * copies) for name, one in self._inputs.items()}
        with intervene(self._graph.model, *edits):
            output = self._graph.model(**inputs)
        return _by_copy(self._metric, output, self._batch, copies)

    def _edits(self, readers: Readers, patched: list[tuple[slice, _Patch]]) -> Iterator[Edit]:
        """The edits that change what readers read, each in its rows of the batch."""
        graph = self._graph
        shape = self._base.values[0].shape[1:]

        def changed(residual: Tensor) -> Tensor:
            new = residual.clone().reshape(-1, *shape)
            for rows, patch in patched:
                new[rows] += self._difference.of_node(patch.source).to(new.dtype)
            return new.reshape(residual.shape)

        if readers.kind == "logits":
            yield apply(readers.norm, changed, side="input")
            return
        kept: list[Tensor] = []

        def keep(residual: Tensor) -> Tensor:
            kept[:] = [residual]
            return residual

        yield apply(readers.norm, keep, side="input")
        block = graph.blocks[readers.layer]
        if readers.kind == "mlp":
            yield apply(
                block.mlp, lambda _: behind_norm(graph, readers.norm, changed(kept[0])),
                side="input",
            )  # fmt: skip
            return

        def projected(name: str, kinds: tuple[EdgeInput, ...]) -> Callable[[Tensor], Tensor]:
            weight, _ = linear(graph.module(name), name)

            def change(returned: Tensor) -> Tensor:
                returned = returned.clone()
                for rows, patch in patched:
                    residual = kept[0][rows]
                    new = residual + self._difference.of_node(patch.source).to(residual.dtype)
                    # The difference of the projections, so that no change stays none.
                    both = [behind_norm(graph, readers.norm, one) for one in (new, residual)]
                    for kind in kinds:
                        if kind in patch.inputs:
                            columns = block.heads.columns(cast(int, patch.head), kind).columns
                            ends = [one @ weight[columns].T for one in both]
                            returned[rows, ..., columns] += ends[0] - ends[1]
                return returned

            return change

        def restored(results: Tensor) -> Tensor:
            # The other heads of the group share the key and value, and do not see the change.
            results = results.clone()
            own = self._base.values[2 * readers.layer + 1]
            for rows, patch in patched:
                columns = block.heads.columns(cast(int, patch.head)).columns
                new = results[rows, ..., columns].clone()
                results[rows] = own
                results[rows, ..., columns] = new
            return results

        for name, kinds in block.projections().items():
            yield apply(name, projected(name, kinds))
        if block.group > 1:
            yield apply(block.out, restored, side="input")


def _by_copy(metric: Metric, output: Any, batch: Prompts, copies: int) -> Tensor:
    """The metric of each copy of a batch that ran side by side: [copies, examples]."""
    given = metric.tensor_of(output)
    return torch.stack([precise(metric.of_tensor(part, batch)) for part in given.chunk(copies)])
