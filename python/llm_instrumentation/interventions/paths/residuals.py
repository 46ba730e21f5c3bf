"""The residual stream of a decoder as the sum of what its nodes write."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import UnsupportedError
from ..decoders import DecoderGraph, PostNorms, Writers
from ..edits import Edit, apply
from ..experts import Experts
from ..installed import intervene
from ..metrics import widened
from .mixing import check_apart
from .post_norms import written_change
from .spans import Spans

__all__ = ["Change", "Written", "before_norm", "behind_norm", "check_linear", "linear", "written"]

# A sum in another order than the model's differs less than this, also in bfloat16.
_ROUNDING = 0.02


def linear(module: nn.Module, name: str) -> tuple[Tensor, Tensor | None]:
    """The weight [outputs, inputs] and bias [outputs] of a linear module.

    Raises:
        UnsupportedError: the module has no weight of floats; it may be quantised, or an adapter.
    """
    weight, bias = getattr(module, "weight", None), getattr(module, "bias", None)
    if isinstance(weight, Tensor) and weight.dim() == 2 and weight.is_floating_point():
        if isinstance(module, nn.Linear):
            return weight.detach(), None if bias is None else bias.detach()
        if type(module).__name__ == "Conv1D":  # of transformers; its weight is [inputs, outputs]
            return weight.detach().T, None if bias is None else bias.detach()
    raise UnsupportedError(
        f"{name!r} is a {type(module).__name__} without a weight of floats, and edges need the "
        "columns of each head: load the model unquantised, and merge adapters into it, with "
        "merge_and_unload()"
    )


def check_linear(decoder: DecoderGraph) -> None:
    """Refuses a decoder whose projections of heads are not linear modules."""
    for block in decoder.blocks:
        for name in (block.out, *block.projections()):
            linear(decoder.module(name), name)


class Written:
    """What the nodes of a decoder write to the residual stream in one run, without gradients.

    Heads are kept before their output projection, so all heads of a layer take as much memory as
    one tensor of the residual stream.

    Args:
        decoder: the decoder.
        values: for each of `decoder.writers` [batch, tokens, width]: the residual stream before the
            first layer, the results of all heads of a layer, or what an MLP returned. Of experts
            [batch, tokens, experts * width]: the parts of all in what the block returns.
    """

    def __init__(self, decoder: DecoderGraph, values: Sequence[Tensor]) -> None:
        self.decoder = decoder
        self.values = list(values)

    def minus(self, other: Written) -> Change:
        """What the nodes write in this run, minus what they write in another."""
        pairs = enumerate(zip(self.values, other.values, strict=True))
        return Change(other, {at: widened(one) - widened(another) for at, (one, another) in pairs})

    def at_counterparts(self, base: Written, spans: Spans) -> Written:
        """What the nodes write in this run, at the tokens that another run has.

        Args:
            base: what they write in the other run.
            spans: of the other run. Without `others` tokens stand in the same columns, and this
                object is returned.

        Returns:
            the first token of each role has what the nodes write at the first token of this role in
            this run, and so on. All other tokens have what they write in `base`.
        """
        if spans.others is None:
            return self
        found = [value.clone() for value in base.values]
        for number in spans.sources:
            here, there = spans.index == number, spans.others == number
            for value, own in zip(found, self.values, strict=True):
                value[here] = own[there]
        return Written(self.decoder, found)

    def residuals(self) -> list[Tensor]:
        """What each of `decoder.readers` reads: [batch, tokens, width] of each."""
        after = [self.values[0]]
        for writers, value in zip(self.decoder.writers[1:], self.values[1:], strict=True):
            if writers.kind in ("heads", "experts"):
                value = self.together(writers, value)
                value = behind_norm(self.decoder, writers.post_norm, value)
            after.append(after[-1] + value)
        ends = {writers.end: at for at, writers in enumerate(self.decoder.writers)}
        return [after[ends[readers.upstream]] for readers in self.decoder.readers]

    def together(self, writers: Writers, value: Tensor) -> Tensor:
        """What heads or experts return together, before a norm behind them.

        Args:
            writers: which.
            value: theirs.

        Returns:
            [batch, tokens, width].
        """
        if writers.kind == "experts":
            return value.reshape(*value.shape[:2], len(writers.nodes), -1).sum(-2)
        block = self.decoder.blocks[writers.layer]
        weight, bias = linear(self.decoder.module(block.out), block.out)
        return nn.functional.linear(value, weight, bias)


class Change:
    """How what the nodes of a decoder write differs from a run.

    Args:
        base: what they write in the run.
        values: by the number of the writers, as in `Written`, in float32 or float64.
    """

    def __init__(self, base: Written, values: dict[int, Tensor]) -> None:
        self.decoder = base.decoder
        self.values = values
        self._base = base

    def spread(self, number: int, post_norms: PostNorms = "recomputed") -> Tensor:
        """What the nodes of one of the writers add to the residual stream, each alone.

        Args:
            number: of the writers.
            post_norms: how a node passes a norm behind several, see `PostNorms`.

        Returns:
            [nodes, batch, tokens, width].
        """
        return self.written(number, self.before_norm(number), post_norms)

    def of_node(self, number: int) -> Tensor:
        """What one node alone adds to the residual stream: [batch, tokens, width]."""
        at = next(i for i, one in enumerate(self.decoder.writers) if number < one.end)
        writers = self.decoder.writers[at]
        if writers.kind == "experts":
            return self.written(at, self.before_norm(at)[number - writers.begin, None])[0]
        if writers.kind != "heads":
            return self.values[at]
        block = self.decoder.blocks[writers.layer]
        columns = block.heads.columns(number - writers.begin).columns
        weight, _ = linear(self.decoder.module(block.out), block.out)
        value = self.values[at][..., columns]
        return self.written(at, (value @ weight[:, columns].to(value.dtype).T)[None])[0]

    def before_norm(self, number: int) -> Tensor:
        """What the nodes of one of the writers return, before a norm behind several.

        The bias of an output projection belongs to no head.

        Returns:
            [nodes, batch, tokens, width].
        """
        value = self.values[number]
        writers = self.decoder.writers[number]
        if writers.kind == "experts":
            return value.reshape(*value.shape[:2], len(writers.nodes), -1).movedim(-2, 0)
        if writers.kind != "heads":
            return value[None]
        block = self.decoder.blocks[writers.layer]
        weight, _ = linear(self.decoder.module(block.out), block.out)
        heads = len(writers.nodes)
        by_head = value.reshape(*value.shape[:2], heads, -1)
        columns = weight.to(value.dtype).reshape(len(weight), heads, -1)
        return torch.einsum("bthe,dhe->hbtd", by_head, columns)

    def written(
        self, number: int, returned: Tensor, post_norms: PostNorms = "recomputed"
    ) -> Tensor:
        """What changes of what nodes return change in the residual stream, each of them alone.

        Args:
            number: of the writers.
            returned: the changes before a norm behind several nodes, [several, batch, tokens,
                width].
            post_norms: see `PostNorms`.
        """
        writers = self.decoder.writers[number]
        if not writers.post_norm:
            return returned
        together = self._base.together(writers, self._base.values[number])
        norm = self.decoder.module(writers.post_norm)
        return written_change(norm, writers.post_norm, widened(together), returned, post_norms)


def behind_norm(decoder: DecoderGraph, norm: str, residual: Tensor) -> Tensor:
    """What a norm makes of a residual stream; "": no norm. Hooks of the norm do not run."""
    if not norm:
        return residual
    found: Tensor = decoder.module(norm).forward(residual)
    return found


def before_norm(decoder: DecoderGraph, norm: str, residual: Tensor, gradients: Tensor) -> Tensor:
    """The gradients at the input of a norm, from those at its output.

    Args:
        decoder: the decoder.
        norm: the name of the norm.
        residual: its input, [batch, tokens, width].
        gradients: at its output, [several, batch, tokens, width].
    """
    if not norm:
        return gradients
    with torch.enable_grad():
        leaf = residual.detach().expand(gradients.shape).requires_grad_()
        output = behind_norm(decoder, norm, leaf)
        return torch.autograd.grad(output, leaf, gradients)[0]


@torch.no_grad()
def written(
    decoder: DecoderGraph,
    inputs: Mapping[str, Tensor],
    *,
    check: bool = False,
    edits: Sequence[Edit] = (),
) -> tuple[Written, Any]:
    """Runs the model, and keeps what its nodes write.

    Args:
        decoder: the decoder.
        inputs: arguments of the model.
        check: compare what each norm receives with the sum that the layout says.
        edits: of the model, which come first.

    Returns:
        what was written, and what the model returned.

    Raises:
        UnsupportedError: the residual stream is not that sum.
    """
    values: dict[int, Tensor] = {}
    read: dict[int, Tensor] = {}
    normed: dict[str, dict[int, Tensor]] = {}  # what projections and MLPs receive
    joined: dict[int, Tensor] = {}  # what blocks with experts return

    def keep(into: dict[int, Tensor], number: int) -> Callable[[Tensor], Tensor]:
        def kept(value: Tensor) -> Tensor:
            # A later layer may change a tensor in place. Some MLPs see all tokens as one row.
            shape = values[0].shape[:2] if values else value.shape[:2]
            into[number] = value.detach().clone().reshape(*shape, -1)
            return value

        return kept

    def keep_parts(number: int, experts: Experts) -> Callable[[Tensor], Tensor]:
        kept = keep(values, number)

        def parts(received: Tensor) -> Tensor:
            kept(experts.parts(received).movedim(0, -2).flatten(-2))
            return received

        return parts

    edits = list(edits)
    for number, writers in enumerate(decoder.writers):
        block = decoder.blocks[writers.layer]
        if block.experts is not None and writers.kind == "experts":
            edits.append(apply(block.mlp, keep_parts(number, block.experts), side="input"))
            if check:
                edits.append(apply(block.mlp, keep(joined, number)))
            continue
        layer, side = {
            "input": (block.layer, "input"),
            "heads": (block.out, "input"),
            "mlp": (block.mlp_out, "output"),
        }[writers.kind]
        edits.append(apply(layer, keep(values, number), side=side))  # type: ignore[arg-type]
    if check:
        for number, readers in enumerate(decoder.readers):
            edits.append(apply(readers.at, keep(read, number), side="input"))
            if readers.kind == "logits":
                continue
            block = decoder.blocks[readers.layer]
            parts = list(block.projections()) if readers.kind == "heads" else [block.mlp]
            for part in parts:
                normed[part] = {}
                edits.append(apply(part, keep(normed[part], number), side="input"))
    with intervene(decoder.model, *edits):
        output = decoder.model(**inputs)
    found = Written(decoder, [values[number] for number in range(len(decoder.writers))])
    if check:
        for number, returned in joined.items():
            experts = decoder.blocks[decoder.writers[number].layer].experts
            assert experts is not None
            experts.check_sum(Change(found, {number: values[number]}).before_norm(number), returned)
        _check(decoder, found, read, normed)
        check_apart(decoder, inputs)
    return found, output


def _check(
    decoder: DecoderGraph,
    found: Written,
    read: Mapping[int, Tensor],
    normed: Mapping[str, Mapping[int, Tensor]],
) -> None:
    for part, received in normed.items():
        for number, value in received.items():
            norm = decoder.readers[number].norm
            if not _alike(value, behind_norm(decoder, norm, read[number])):
                wanted = f"{norm!r} returns" if norm else f"{decoder.readers[number].at!r} does"
                raise UnsupportedError(
                    f"{part!r} receives something else than {wanted}, so "
                    f"{type(decoder.model).__name__} is not as its layout says; see "
                    "register_decoder"
                )
    for number, residual in enumerate(found.residuals()):
        readers = decoder.readers[number]
        if not _alike(read[number], residual):
            error = (read[number] - residual).float().norm() / read[number].float().norm()
            raise UnsupportedError(
                f"{readers.at!r} receives something else than the sum of what the embeddings, "
                f"heads and MLPs before it have written: they differ by {float(error):.0%}. So "
                f"{type(decoder.model).__name__} is not as its layout says; see register_decoder"
            )


def _alike(value: Tensor, expected: Tensor) -> bool:
    """Whether two tensors differ by rounding only."""
    size = value.float().norm().clamp_min(1e-9)
    return bool((value - expected.reshape(value.shape)).float().norm() / size < _ROUNDING)
