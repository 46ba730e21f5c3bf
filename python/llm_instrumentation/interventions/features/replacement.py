"""The local replacement model: transcoders stand for all MLPs, and all else is linear.

For one text the attention patterns and the scales of norms are those of the clean run, and so are
the errors of the transcoders. Then what each feature reads is a linear function of what the
embeddings, the features and the errors before it write (Ameisen et al. 2025, "Circuit Tracing").
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ...errors import UnsupportedError
from ..decoders import DecoderBlock, DecoderGraph
from ..edits import Edit, apply
from ..installed import intervene
from ..metrics import widened
from ..paths.post_norms import behind
from ..paths.residuals import linear
from .coders import Coder
from .ways import Read

__all__ = ["IncomingEdges", "LayerParts", "LinearTarget", "LocalReplacement", "parts_of"]

_CHUNK = 1 << 24  # elements of one-hot features at once
_PROBED = 64  # features whose encoder is tried at a second point
_EXACT = 1e-3  # of a formula beside the module that it stands for


class LayerParts(NamedTuple):
    """The transcoder of a layer on one text, as the parts of a linear model.

    Attributes:
        positions, features: of each active feature, [active]; by position, then by feature.
        values: their activations, [active].
        encoder: the derivative of each activation by what the MLP reads, [active, width].
        encoder_bias: the activation minus the part that `encoder` makes, [active].
        decoder: what an activation of 1 writes, [active, width].
        constant: what the transcoder writes without features, [width].
        error: what the MLP returned minus what the transcoder makes, [tokens, width].
    """

    positions: Tensor
    features: Tensor
    values: Tensor
    encoder: Tensor
    encoder_bias: Tensor
    decoder: Tensor
    constant: Tensor
    error: Tensor


def parts_of(coder: Coder, read: Read) -> LayerParts:
    """The parts of a transcoder on a text.

    Args:
        coder: the transcoder.
        read: what the MLP returned and read, [1, tokens, width].

    Raises:
        UnsupportedError: the transcoder scales what it reads, its decoder is not linear, or its
            features are no linear function of what it reads while they are active.
    """
    if coder.needs_input:
        raise UnsupportedError(
            f"{coder.key}: the transcoder scales what it reads by its mean or norm, so its "
            "features are not linear in it: choose one with normalize_activations = 'none'"
        )
    with torch.no_grad():
        split = coder.split(read.value, read.given)
    positions, features = split.features[0].nonzero(as_tuple=True)
    values = split.features[0, positions, features]
    width, count = split.features.shape[-1], len(values)
    step = max(1, _CHUNK // width)
    with torch.no_grad():
        zeros = split.features.new_zeros(1, 1, width)
        constant = coder.rebuilt(zeros, torch.zeros_like(split.given[:, :1]))[0, 0]
        decoder = constant.new_empty(count, constant.shape[-1])
        for first in range(0, count, step):
            chosen = nn.functional.one_hot(features[first : first + step], width)[None]
            given = split.given.new_zeros(1, chosen.shape[1], split.given.shape[-1])
            made = coder.rebuilt(chosen.to(split.features), given)[0]
            decoder[first : first + step] = made - constant
        written = constant.repeat(split.given.shape[1], 1)
        written.index_add_(0, positions, values[:, None] * decoder)
        if (skipped := coder.skipped(split.given)) is not None:
            written += skipped[0]
    if not _alike(written, split.rebuilt[0]):
        raise UnsupportedError(
            f"{coder.key}: what {type(coder.sae).__name__}.decode makes of several features is not "
            "the sum of what it makes of each, so there are no edges: its decoder has to be linear"
        )
    rows = split.given[0, positions]
    encoder = torch.cat(
        [
            _slopes(coder, rows[at : at + step], features[at : at + step])
            for at in range(0, count, step)
        ]
        or [rows]
    )
    _check_slopes(coder, rows[:_PROBED], features[:_PROBED], encoder[:_PROBED])
    values, encoder = widened(values), widened(encoder)
    bias = values - (encoder * rows.to(encoder)).sum(-1)
    error = widened(read.value)[0] - widened(split.rebuilt)[0].to(widened(read.value))
    return LayerParts(
        positions, features, values, encoder, bias, widened(decoder), widened(constant), error
    )


def _slopes(coder: Coder, rows: Tensor, features: Tensor) -> Tensor:
    """The derivative of one feature by each of the rows [n, width] that it is encoded from."""
    with torch.enable_grad():
        leaf = rows.detach().clone().requires_grad_()
        made = coder.encoded(leaf[None])[0].gather(1, features[:, None]).sum()
        if not made.requires_grad:
            raise UnsupportedError(
                f"{coder.key}: {type(coder.sae).__name__}.encode has no gradient, and edges are "
                "products of gradients: leave torch.no_grad() out of it"
            )
        return torch.autograd.grad(made, leaf)[0]


def _check_slopes(coder: Coder, rows: Tensor, features: Tensor, slopes: Tensor) -> None:
    """
    Raises:
        UnsupportedError: the slope of an active feature is another one nearby.
    """
    nearby = _slopes(coder, rows * 1.25, features)
    stays = (nearby != 0).any(-1)  # others are not active there
    if not _alike(nearby[stays], slopes[stays]):
        raise UnsupportedError(
            f"{coder.key}: the features of {type(coder.sae).__name__} are not linear in what it "
            "reads while they are active, so there is no attribution graph: use a transcoder with "
            "ReLU, JumpReLU or TopK"
        )


def _alike(value: Tensor, expected: Tensor) -> bool:
    error = (widened(value) - widened(expected)).norm()
    return bool(error <= _rounding(value.dtype, _EXACT) * widened(expected).norm() + 1e-12)


def _rounding(dtype: torch.dtype, least: float) -> float:
    """What rounding may change of a sum, as a share of its size."""
    return max(least, float(torch.finfo(dtype).eps ** 0.5))


class _FrozenNorm:
    """A LayerNorm or RMSNorm as the affine function that it is with the scales of a run.

    The norm is f(x) = w * c(x) * s(x) + b, where c(x) is x, or x minus its mean, and s(x) is
    1 / sqrt(mean(c(x)^2) + eps). w and b are read off at one vector and its negative.

    Args:
        norm: the norm.
        name: its name, for messages.
        like: what it gets in the run, [rows, tokens, width].

    Raises:
        UnsupportedError: the norm is none of this form.
    """

    @torch.no_grad()
    def __init__(self, norm: nn.Module, name: str, like: Tensor) -> None:
        self._centred = type(norm).__name__.endswith("LayerNorm")
        exact = widened(like[:1, :1])
        steps = torch.linspace(1, 2, like.shape[-1], dtype=exact.dtype, device=exact.device)
        probe = steps * (1 - 2 * (torch.arange(len(steps), device=steps.device) % 2))
        probe = probe.expand_as(exact)
        self._eps = self._epsilon(norm, probe, like.dtype)
        there, back = behind(norm, probe), behind(norm, -probe)
        self.bias = ((there + back) / 2).to(exact)[0, 0]
        self._weight = ((there - back) / 2 / self._normed(probe)).to(exact)[0, 0]
        value = widened(like)
        if not _alike(self.linear(value) + self.bias, behind(norm, value)):
            raise UnsupportedError(
                f"{name!r} is a {type(norm).__name__}, and its scale is not that of a LayerNorm or "
                "RMSNorm: it cannot be frozen, so there is no attribution graph"
            )

    def _epsilon(self, norm: nn.Module, probe: Tensor, dtype: torch.dtype) -> float:
        """The number eps that the norm adds to the mean square; None stands for that of a type."""
        for name in ("eps", "variance_epsilon"):
            if hasattr(norm, name):
                eps = getattr(norm, name)
                return float(torch.finfo(dtype).eps if eps is None else eps)
        # As OlmoLayerNorm: eps is what makes the results of a vector and of a small part differ.
        part = 1e-3
        own = probe - probe.mean() if self._centred else probe
        size = float(own.square().mean())
        sizes = [float((behind(norm, x) - behind(norm, -x)).norm()) for x in (probe, part * probe)]
        share = (sizes[1] / max(sizes[0], 1e-30)) ** 2
        return max(0.0, part**2 * size * (1 - share) / max(share - part**2, 1e-30))

    def linear(self, value: Tensor) -> Tensor:
        """W * c(x) * s, where gradients see s as a constant."""
        return self._weight * self._normed(value)

    def _normed(self, value: Tensor) -> Tensor:
        own = value - value.mean(-1, keepdim=True) if self._centred else value
        scale = (own.detach().square().mean(-1, keepdim=True) + self._eps).rsqrt()
        return own * scale


class LinearTarget(NamedTuple):
    """What edges lead to: an active feature, or a logit.

    Attributes:
        layer: of a feature; None: a logit.
        position: of the token.
        direction: the derivative of the target by what is read there, [width].
        value: the value of the target in the run.
        bias: the constant part of the target where it is read.
    """

    layer: int | None
    position: int
    direction: Tensor
    value: float
    bias: float


class IncomingEdges(NamedTuple):
    """The edges into some targets.

    Attributes:
        features: from each active feature of each layer, [targets, active features].
        errors: from each error, [targets, layers, tokens].
        embeddings: from each token, [targets, tokens].
        bias: what biases add to each target, [targets].
    """

    features: Tensor
    errors: Tensor
    embeddings: Tensor
    bias: Tensor


class _AtFinalNorm(Exception):  # noqa: N818 - no error: the run has reached the final norm
    """Ends a run before the unembedding."""


class LocalReplacement:
    """A run of a model in which only the linear paths between its parts have gradients.

    The batch holds one text several times, so that each row leads back from a target of its own.

    Args:
        decoder: the model.
        coders: the transcoder of each layer.
        parts: likewise, on this text.
        inputs: arguments of the model for the text, [1, tokens].
        rows: how often the text is in the batch.
    """

    def __init__(
        self, decoder: DecoderGraph, coders: Sequence[Coder], parts: Sequence[LayerParts],
        inputs: Mapping[str, Tensor], rows: int,
    ) -> None:  # fmt: skip
        self.rows = rows
        self._decoder = decoder
        self._parts = parts
        self._reads: list[Tensor] = []  # what the MLPs read, [rows, tokens, width]
        self._written: list[Tensor] = []  # 0, added to what the MLPs return
        self._constants: list[tuple[Tensor, Tensor]] = []  # 0 where a bias is added; the bias
        self.embeddings = self._final = torch.empty(0)
        self._start = torch.empty(0)
        edits = [apply(decoder.blocks[0].layer, self._begin, side="input")]
        norms: dict[str, None] = {}
        for block, coder in zip(decoder.blocks, coders, strict=True):
            behind_mlp = block.mlp_out if block.mlp_out != block.mlp else ""
            if coder.site.side == "added":
                behind_mlp = ""  # it is a part of what the transcoder stands for
            edits += self._attention(block)
            edits += self._mlp(coder)
            norms.update(
                dict.fromkeys((block.attention_norm, block.mlp_norm, block.post_norm, behind_mlp))
            )
        norms.pop("", None)
        edits += [edit for name in norms for edit in self._norm(name)]
        last = decoder.readers[-1].norm
        edits += [*self._norm(last), apply(last, self._end)]
        batch = {name: one.expand(rows, *one.shape[1:]) for name, one in inputs.items()}
        with (
            torch.enable_grad(),
            contextlib.suppress(_AtFinalNorm),
            intervene(decoder.model, *edits, unused="ignore"),
        ):
            decoder.model(**batch)

    # ---- the run ----------------------------------------------------------------------------

    def _begin(self, value: Tensor) -> Tensor:
        self.embeddings = widened(value[0]).detach()
        self._start = torch.zeros_like(value, requires_grad=True)
        return value.detach() + self._start

    def _end(self, value: Tensor) -> Tensor:
        self._final = value
        raise _AtFinalNorm

    def _with_constant(self, value: Tensor, constant: Tensor) -> Tensor:
        """The value, with a leaf of zeros where the constant was added."""
        leaf = value.new_zeros(self.rows, *[1] * (value.dim() - 2), value.shape[-1])
        self._constants.append((leaf.requires_grad_(), widened(constant.detach())))
        return value + leaf

    def _norm(self, name: str) -> list[Edit]:
        norm, read = self._decoder.module(name), []

        def keep(value: Tensor) -> Tensor:
            read.append(value)
            return value

        def freeze(value: Tensor) -> Tensor:
            given = read.pop()
            frozen = _FrozenNorm(norm, name, given.detach())
            made = frozen.linear(widened(given))
            return self._with_constant(_with_gradient(value, made), frozen.bias)

        return [apply(name, keep, side="input"), apply(name, freeze)]

    def _attention(self, block: DecoderBlock) -> list[Edit]:
        """Queries and keys without gradients, so that patterns are constants."""
        edits = []
        for name, kinds in block.projections().items():
            if "v" not in kinds:
                edits.append(apply(name, Tensor.detach))
                continue
            _, bias = linear(self._decoder.module(name), name)
            columns = [block.heads.columns(head, "v").columns for head in range(block.heads.heads)]

            def values_alone(
                value: Tensor, bias: Tensor | None = bias, columns: Sequence[slice] = columns
            ) -> Tensor:
                mask = torch.zeros(value.shape[-1], dtype=torch.bool, device=value.device)
                for one in columns:
                    mask[one] = True
                if bias is not None:
                    value = self._with_constant(value, bias * mask)
                return torch.where(mask, value, value.detach())

            edits.append(apply(name, values_alone))
        _, bias = linear(self._decoder.module(block.out), block.out)
        if bias is not None:
            edits.append(apply(block.out, lambda value: self._with_constant(value, bias)))
        return edits

    def _mlp(self, coder: Coder) -> list[Edit]:
        assert coder.source is not None
        number = len(self._written)
        self._written.append(torch.empty(0))

        def keep(value: Tensor) -> Tensor:
            self._reads.append(value)
            return value

        def stand_in(value: Tensor) -> Tensor:
            self._written[number] = torch.zeros_like(value, requires_grad=True)
            made = value.detach() + self._written[number]
            skipped = coder.skipped(self._reads[number])
            return made if skipped is None else _with_gradient(made, skipped, add=True)

        return [apply(coder.source, keep), apply(coder.site, stand_in)]

    # ---- edges ------------------------------------------------------------------------------

    def read_at(self, target_layer: int | None) -> Tensor:
        """What the MLP of a layer reads, or the unembedding: [tokens, width]."""
        read = self._final if target_layer is None else self._reads[target_layer]
        return widened(read[0]).detach()

    def edges(self, targets: Sequence[LinearTarget]) -> IncomingEdges:
        """The edges into targets, at most `rows` of them.

        Raises:
            UnsupportedError: edges and biases do not add up to the value of a target.
        """
        outputs, gradients = [], []
        for layer in sorted({one.layer for one in targets}, key=lambda one: (one is None, one)):
            output = self._final if layer is None else self._reads[layer]
            gradient = torch.zeros_like(output)
            for row, target in enumerate(targets):
                if target.layer == layer:
                    gradient[row, target.position] = target.direction.to(gradient)
            outputs.append(output)
            gradients.append(gradient)
        leaves = [self._start, *self._written, *(leaf for leaf, _ in self._constants)]
        found = torch.autograd.grad(
            outputs, leaves, gradients, retain_graph=True, allow_unused=True
        )
        count = len(targets)
        exact = [None if one is None else widened(one[:count]) for one in found]
        start, written = exact[0], exact[1 : 1 + len(self._written)]
        assert start is not None
        tokens = start.shape[1]
        bias = torch.tensor([one.bias for one in targets]).to(start)
        for gradient, (_, constant) in zip(exact[1 + len(written) :], self._constants, strict=True):
            if gradient is not None:
                bias += (gradient.flatten(1, -2).sum(1) * constant.to(gradient)).sum(-1)
        features, errors = [], start.new_zeros(count, len(written), tokens)
        for layer, (gradient, parts) in enumerate(zip(written, self._parts, strict=True)):
            own = start.new_zeros(count, len(parts.values))
            features.append(own)
            if gradient is None:
                continue
            bias += (gradient.sum(1) * parts.constant.to(gradient)).sum(-1)
            errors[:, layer] = (gradient * parts.error.to(gradient)).sum(-1)
            weighted = (parts.values[:, None] * parts.decoder).to(gradient)
            ends = torch.bincount(parts.positions, minlength=tokens).cumsum(0).tolist()
            for position, (first, end) in enumerate(zip([0, *ends], ends, strict=False)):
                own[:, first:end] = gradient[:, position] @ weighted[first:end].T
        embeddings = (start * self.embeddings).sum(-1)
        rows = IncomingEdges(torch.cat(features, 1), errors, embeddings, bias)
        self._check(targets, rows)
        return rows

    def _check(self, targets: Sequence[LinearTarget], rows: IncomingEdges) -> None:
        parts = torch.cat(
            [rows.features, rows.errors.flatten(1), rows.embeddings, rows.bias[:, None]], 1
        )
        values = torch.tensor([one.value for one in targets]).to(parts)
        limit = _rounding(self._final.dtype, 1e-4) * (parts.abs().sum(1) + values.abs())
        wrong = ((parts.sum(1) - values).abs() > limit).nonzero()
        if len(wrong):
            at = int(wrong[0])
            layer = targets[at].layer
            where = "a logit" if layer is None else f"a feature of layer {layer}"
            raise UnsupportedError(
                f"the edges into {where} at position {targets[at].position} and the biases add up "
                f"to {float(parts[at].sum()):.6g}, and its value is {float(values[at]):.6g}: "
                f"{type(self._decoder.model).__name__} has a path that is not linear with frozen "
                "attention patterns and norms, so there is no attribution graph"
            )


def _with_gradient(value: Tensor, made: Tensor, *, add: bool = False) -> Tensor:
    """The numbers of `value`, with the gradients of `made`; with `add` with those of both."""
    return (value if add else value.detach()) + (made - made.detach()).to(value)
