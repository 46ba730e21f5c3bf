"""The attribution graph of a text: what features pass on to each other, exactly::

graph = attribution_graph(model, inputs, transcoders, decode=tokenizer.decode)
circuit = graph.pruned()
save_neuronpedia(circuit, "graph.json", slug="my-graph", scan="gemma-2-2b")

The method is that of Ameisen et al. (2025), "Circuit Tracing: Revealing Computational Graphs in
Language Models", transformer-circuits.pub, with a transcoder for each layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ...core.tensors.modules import original_name
from ...errors import InvalidArgumentError, UnsupportedError
from ...progress.bars import Progress, reported
from ..decoders import DecoderGraph, decoder
from ..edits import apply
from ..installed import intervene
from ..metrics import logits_of, widened
from ..nodes import node_names
from ..paths.residuals import linear
from ..prompts import Prompts
from ..running.runs import floats, frozen, model_name
from .attribution_graphs import AttributionGraph, influences
from .coders import Coder
from .replacement import IncomingEdges, LayerParts, LinearTarget, LocalReplacement, parts_of
from .ways import read, whole_coders

__all__ = ["attribution_graph"]

_LOGITS = 10  # the most that are chosen
_PROBABILITY = 0.95  # that they have together, if fewer do


def attribution_graph(
    model: nn.Module,
    inputs: Tensor | Mapping[str, Tensor],
    transcoders: Mapping[Any, Any],
    *,
    logits: Sequence[int] | None = None,
    max_features: int | None = None,
    batch_size: int = 64,
    decode: Callable[[int], str] | None = None,
    strict: bool = True,
    progress: Progress = None,
) -> AttributionGraph:
    """Attributes the features of transcoders, and logits, to embeddings, features and errors.

    In the local replacement model each MLP is its transcoder plus the error of this text, and
    attention patterns and the scales of norms are constants: those of the clean run. Then each
    target is a linear function of its sources, so an edge is exact: the value of the source times
    the derivative of the target. All edges into a target and the biases add up to its value; the
    function checks that for each target. The value of a feature is its activation, which is its
    pre-activation while the feature is active. The value of a logit is the logit of the last
    position minus the mean over the vocabulary, before a soft cap or a scale of the model.

    The model runs once, then once up to its last norm with `batch_size` rows of the text. There is
    a backward pass for each `batch_size` targets. Memory: the run with gradients, and 4 bytes for
    each target times each active feature.

    Args:
        model: the model, in evaluation mode: a decoder that `edge_attribution` knows.
        inputs: the token ids of one text, [tokens] or [1, tokens], or tensors by name as tokenizers
            return them, without padding.
        transcoders: a transcoder for the MLP of each layer, as for `splice`: by the captured name
            of the MLP, or by the hook of TransformerLens. They have no scale of their own
            (``normalize_activations="none"``); skip connections are paths as others.
        logits: token ids. None: the most probable ones, until they have 0.95 of the probability,
            at most 10.
        max_features: at most this many features are in the graph: those with the largest influence
            on the logits, as it is known when each batch is chosen. The others have their sum in
            `AttributionGraph.left_out`. None: all active features.
        batch_size: targets that go back together.
        decode: gives the text of a token id, as ``tokenizer.decode``. None: the ids are the texts.
        strict: as for `splice`.
        progress: shows a bar; counts targets.

    Raises:
        InvalidArgumentError: (a ValueError) there is not one text without padding; a layer has no
            transcoder, or an object is no transcoder of an MLP; a number is out of its range; as
            for `splice`, as for another width.
        UnsupportedError: (a TypeError) it is not known how the model is built, or its MLP is no
            module of its own; a norm is none; a transcoder is not linear, as one that scales what
            it reads; edges and biases do not add up to the value of a target.
    """
    _check_numbers(max_features, batch_size)
    given = _one_text(inputs)
    built = decoder(model)
    coders = _by_layer(built, whole_coders(model, transcoders, strict=strict))
    Prompts(given, given).check_for(model)
    with (
        torch.inference_mode(False),
        frozen(model),
        reported(progress, "Attribution graph") as told,
    ):
        final, output = _Final(built), None
        with intervene(model, *final.edits):
            found, output = read(model, coders, given)
        probabilities = widened(logits_of(output)[0, -1].detach()).double().softmax(-1)
        del output
        weight, bias = final.unembedding()
        chosen = _chosen_logits(probabilities, len(weight), logits)
        parts = [parts_of(coder, found[coder]) for coder in coders]
        linear_model = LocalReplacement(built, coders, parts, given, batch_size)
        read_last = linear_model.read_at(None)[-1]
        ends = [_logit(read_last, weight, bias, token, found[coders[0]].value) for token in chosen]
        rows = _GraphRows(parts, ends, probabilities[chosen].cpu().double().numpy(), max_features)
        for targets in rows.batches(batch_size):
            rows.add(linear_model.edges(targets))
            told(rows.done, rows.total)
    names = tuple(node_names(model, [coder.site for coder in coders]))
    tokens = floats(given["input_ids"][0]).astype(np.int64)
    text = decode or str
    return AttributionGraph(
        model=model_name(model),
        tokens=tokens,
        texts=tuple(text(int(token)) for token in tokens),
        names=names,
        logits=np.array(chosen, np.int64),
        logit_texts=tuple(text(token) for token in chosen),
        probabilities=floats(probabilities[chosen]),
        **rows.result(),
    )


# ---- what is given ------------------------------------------------------------------------------


def _check_numbers(max_features: int | None, batch_size: int) -> None:
    for name, value in (("max_features", max_features), ("batch_size", batch_size)):
        if value is not None and value < 1:
            raise InvalidArgumentError(f"{name} = {value}: give at least 1")


def _one_text(inputs: Tensor | Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The arguments of the model, each [1, ...]."""
    given = {"input_ids": inputs} if isinstance(inputs, Tensor) else dict(inputs)
    ids = given.get("input_ids")
    if not isinstance(ids, Tensor):
        raise InvalidArgumentError("inputs: give token ids, or tensors by name with 'input_ids'")
    given = {name: one[None] if ids.dim() == 1 else one for name, one in given.items()}
    shape = list(given["input_ids"].shape)
    if len(shape) != 2 or shape[0] != 1 or not shape[1]:
        raise InvalidArgumentError(
            f"inputs have the shape {shape}: give one text, [tokens] or [1, tokens]; a graph is of "
            "one text"
        )
    mask = given.get("attention_mask")
    if mask is not None and not bool(mask.all()):
        raise InvalidArgumentError("the attention mask hides tokens: give one text without padding")
    return given


def _by_layer(built: DecoderGraph, coders: Sequence[Coder]) -> list[Coder]:
    """The transcoder of each layer.

    Raises:
        InvalidArgumentError: one is missing, or an object is no transcoder of an MLP.
        UnsupportedError: the MLPs are no modules of their own.
    """
    layers = {block.mlp: number for number, block in enumerate(built.blocks) if block.mlp}
    if len(layers) < len(built.blocks):
        raise UnsupportedError("some layers have no MLP, and transcoders stand for MLPs")
    for block in built.blocks:
        if block.mlp_out != block.mlp and _has_matrix(built.module(block.mlp_out)):
            raise UnsupportedError(
                f"the MLP of {block.layer!r} is no module of its own, so no transcoder can stand "
                "for it"
            )
    found: dict[int, Coder] = {}
    for coder in coders:
        if coder.source is None:
            raise InvalidArgumentError(
                f"{coder.key}: a {type(coder.sae).__name__} is no transcoder: attribution graphs "
                "need objects with d_out, which read the input of an MLP"
            )
        if coder.spot.name not in layers:
            raise InvalidArgumentError(
                f"{coder.key}: that is no MLP: give the names of {', '.join(layers)}"
            )
        found[layers[coder.spot.name]] = coder
    if missing := [name for name, number in layers.items() if number not in found]:
        raise InvalidArgumentError(
            f"{len(missing)} of {len(layers)} MLPs have no transcoder, as {missing[0]!r}: give one "
            "for each, because the model has to be linear between features. feature_edges needs "
            "no transcoders"
        )
    return [found[number] for number in range(len(layers))]


def _has_matrix(module: nn.Module) -> bool:
    return any(one.dim() > 1 for one in module.parameters())


def _chosen_logits(probabilities: Tensor, known: int, logits: Sequence[int] | None) -> list[int]:
    if logits is None:
        values, ids = probabilities.topk(min(_LOGITS, len(probabilities)))
        count = int((values.cumsum(0) < _PROBABILITY).sum()) + 1
        return [int(one) for one in ids[:count]]
    chosen = [int(token) for token in logits]
    if not chosen or len(set(chosen)) < len(chosen):
        raise InvalidArgumentError(f"logits = {chosen}: give token ids, each once")
    for token in chosen:
        if not 0 <= token < known:
            raise InvalidArgumentError(f"logits has {token}, and the model has {known} logits")
    return chosen


class _Final:
    """The final norm and the unembedding behind it.

    Args:
        built: the model.

    Raises:
        UnsupportedError: the model has no unembedding.
    """

    def __init__(self, built: DecoderGraph) -> None:
        head = getattr(built.model, "get_output_embeddings", lambda: None)()
        names = [original_name(name) for name, one in built.model.named_modules() if one is head]
        if head is None or not names:
            raise UnsupportedError(
                f"{type(built.model).__name__} has no unembedding, get_output_embeddings() is "
                "None: give a model that returns logits"
            )
        self._name, self._head, self._norm = names[0], head, built.readers[-1].norm
        self._seen: list[Tensor] = []

        def keep(value: Tensor) -> Tensor:
            self._seen.append(value.detach())
            return value

        self.edits = [apply(self._norm, keep), apply(self._name, keep, side="input")]

    def unembedding(self) -> tuple[Tensor, Tensor | None]:
        """Its weight [vocabulary, width] and its bias, after a run with the edits.

        Raises:
            UnsupportedError: it reads something else than the final norm returns.
        """
        weight, bias = linear(self._head, self._name)
        normed, read_there = self._seen
        if normed.shape[-1] != read_there.shape[-1] or not torch.equal(
            normed[:, -1], read_there[:, -1]
        ):
            raise UnsupportedError(
                f"{self._name!r} reads something else than {self._norm!r} returns, so logits are "
                "not linear in the residual stream"
            )
        return weight, bias


def _logit(
    read_last: Tensor, weight: Tensor, bias: Tensor | None, token: int, like: Tensor
) -> LinearTarget:
    exact = widened(weight)
    direction = exact[token] - exact.mean(0)
    constant = 0.0 if bias is None else float(widened(bias)[token] - widened(bias).mean())
    value = float((direction * read_last).sum()) + constant
    return LinearTarget(None, like.shape[1] - 1, direction, value, constant)


# ---- the rows of the graph ----------------------------------------------------------------------


class _GraphRows:
    """The rows of the graph, as far as there are any, and which targets come next.

    Args:
        parts: of the layers.
        ends: the logits.
        weights: of the logits.
        most: the features that may be in the graph; None: all.
    """

    def __init__(
        self, parts: Sequence[LayerParts], ends: list[LinearTarget], weights: Any, most: int | None
    ) -> None:
        self._features = [
            LinearTarget(layer, int(position), slope, float(value), float(bias))
            for layer, own in enumerate(parts)
            for position, slope, value, bias in zip(
                own.positions.tolist(), own.encoder, own.values, own.encoder_bias, strict=True
            )
        ]
        self._ids = np.array(
            [
                (layer, position, feature)
                for layer, own in enumerate(parts)
                for position, feature in zip(
                    own.positions.tolist(), own.features.tolist(), strict=True
                )
            ],
            np.int64,
        ).reshape(-1, 3)
        self._ends, self._weights, self._most = ends, weights, most
        self._order: list[int] = []  # the features that are targets, in turn
        # Of the logits, and of features by layer: their edges, with the places of the features.
        self._of_logits: list[Any] = []
        self._of_layers: list[list[tuple[Any, Any]]] = [[] for _ in parts]
        self._bias: list[Any] = []
        count = len(self._features)
        self.total = len(ends) + (count if most is None else min(most, count))

    @property
    def done(self) -> int:
        return sum(map(len, self._bias))

    def batches(self, size: int) -> Iterator[list[LinearTarget]]:
        """The targets: the logits, then features. Their rows have to be added in between."""
        for at in range(0, len(self._ends), size):
            yield self._ends[at : at + size]
        while (left := self.total - len(self._ends) - len(self._order)) > 0:
            chosen = self._next(min(size, left))
            self._order += chosen
            yield [self._features[at] for at in chosen]

    def _next(self, size: int) -> list[int]:
        """The features without rows that matter most, as far as is known."""
        count = len(self._features)
        if self._most is None or self._most >= count:
            return list(range(len(self._order), len(self._order) + size))
        known = (block for layer in reversed(self._of_layers) for block in layer)
        matter = influences(np.concatenate(self._of_logits), self._weights, known)[:count]
        matter[self._order] = -1
        return [int(at) for at in np.argsort(-matter, kind="stable")[:size]]

    def add(self, rows: IncomingEdges) -> None:
        together = [rows.features, rows.errors.flatten(1), rows.embeddings]
        edges = torch.cat(together, 1).cpu().numpy()
        if self.done < len(self._ends):
            self._of_logits.append(edges)
        else:
            places = np.array(self._order[-len(edges) :], np.int64)
            layers = self._ids[places, 0]
            for layer in np.unique(layers):
                own = layers == layer
                self._of_layers[layer].append((places[own], edges[own]))
        self._bias.append(floats(rows.bias))

    def result(self) -> dict[str, Any]:
        """The fields of the graph."""
        count, ends = len(self._features), len(self._ends)
        order = np.array(sorted(self._order), np.int64)
        places = np.append(ends + np.argsort(self._order), np.arange(ends)).astype(np.int64)
        others = np.setdiff1d(np.arange(count), order)
        last = np.concatenate(self._of_logits)
        columns = np.append(order, np.arange(count, last.shape[1]))
        edges = np.empty((len(places), len(columns)), last.dtype)
        left_out = np.empty(len(places))
        edges[len(order) :] = last[:, columns]
        left_out[len(order) :] = last[:, others].sum(1, dtype=np.float64)
        for layer in self._of_layers:
            while layer:  # each block is freed when its edges are in the graph
                own, block = layer.pop()
                at = np.searchsorted(order, own)
                edges[at] = block[:, columns]
                left_out[at] = block[:, others].sum(1, dtype=np.float64)
        targets = [*(self._features[at] for at in order), *self._ends]
        return {
            "features": self._ids[order],
            "edges": edges,
            "values": np.array([one.value for one in targets]),
            "bias": np.concatenate(self._bias)[places],
            "left_out": left_out,
        }
