"""What a change of the heads of a layer becomes behind the norm that follows them.

The heads of a layer write norm(o) to the residual stream, where o is the sum of their outputs. A
change d of that sum, as by one head, changes what is written by norm(o + d) - norm(o). This is not
linear in d, because d changes the scale of the norm too. So the changes by single heads do not add
up to the change by all.
"""

from __future__ import annotations

from typing import get_args

import torch
from torch import Tensor, nn

from ..._warn import warn
from ...errors import InvalidArgumentError, UnsupportedError
from ..decoders import DecoderGraph, PostNorms

__all__ = ["behind", "check_choice", "written_change"]

# A norm by the formula differs less than this from the module, also in bfloat16.
_ROUNDING = 0.02


def check_choice(post_norms: PostNorms, graph: DecoderGraph) -> None:
    """Checks a choice for a model. Warns if the model has no norm that it is for.

    Raises:
        InvalidArgumentError: there is no such choice.
    """
    if post_norms not in get_args(PostNorms):
        raise InvalidArgumentError(
            f"post_norms = {post_norms!r}: choose one of {', '.join(get_args(PostNorms))}"
        )
    if post_norms != "recomputed" and not graph.post_norms:
        warn(f"post_norms = {post_norms!r} makes no difference: the model has no norm behind heads")


class _Alone(nn.Module):
    """A norm whose hooks do not run."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, value: Tensor) -> Tensor:
        found: Tensor = self.norm.forward(value)
        return found


def behind(norm: nn.Module, value: Tensor) -> Tensor:
    """What a norm returns, calculated in the type of the value. Hooks of the norm do not run."""
    weights = {f"norm.{name}": one.to(value.dtype) for name, one in norm.named_parameters()}
    found: Tensor = torch.func.functional_call(_Alone(norm), weights, (value,))
    return found


@torch.no_grad()
def written_change(
    norm: nn.Module, name: str, before: Tensor, change: Tensor, post_norms: PostNorms
) -> Tensor:
    """How a change of the input of a norm changes its output.

    Args:
        norm: the norm.
        name: its name, for messages.
        before: its input without the change, [batch, tokens, width], in float32 or float64.
        change: of the input, [several, batch, tokens, width].
        post_norms: see `PostNorms`.

    Returns:
        [several, batch, tokens, width]. It is exactly 0 at tokens where `change` is 0.

    Raises:
        UnsupportedError: "frozen", and the scale of the norm is not known.
    """
    if post_norms == "recomputed":
        found = behind(norm, before + change) - behind(norm, before)
    else:
        found = _derivative(norm, before.expand(change.shape), change)
        if post_norms == "frozen":
            found = _with_frozen_scale(norm, name, before, change, found)
    # A kernel may round the two differently, and no change has to stay none.
    return torch.where((change == 0).all(-1, keepdim=True), 0, found)


def _derivative(norm: nn.Module, before: Tensor, change: Tensor) -> Tensor:
    """The derivative of a norm at `before` along `change`.

    The gradient by u of u times the derivative: forward differentiation loads a compiler for
    nn.RMSNorm, which takes seconds.
    """
    with torch.enable_grad():
        start = before.detach().clone().requires_grad_()
        weights = torch.zeros_like(start, requires_grad=True)
        output = behind(norm, start)
        (along,) = torch.autograd.grad(output, start, weights, create_graph=True)
        return torch.autograd.grad(along, weights, change)[0]


def _with_frozen_scale(
    norm: nn.Module, name: str, before: Tensor, change: Tensor, linear: Tensor
) -> Tensor:
    """What `linear` is without the part that comes from the change of the scale.

    A norm is f(x) = w * c(x) * s(x) + b, where c(x) is x, or x minus its mean, and s(x) is
    1 / sqrt(mean(c(x)^2) + eps). So its derivative along d is w * c(d) * s minus
    w * c(x) * s^3 * mean(c(x) * c(d)), and the second part is left out here.
    """
    centred = type(norm).__name__.endswith("LayerNorm")
    eps = getattr(norm, "eps", getattr(norm, "variance_epsilon", None))
    if eps is None:
        eps = torch.finfo(before.dtype).eps  # as nn.RMSNorm

    def middled(value: Tensor) -> Tensor:
        return value - value.mean(-1, keepdim=True) if centred else value

    own, other = middled(before), middled(change)
    squared_scale = 1 / (own.square().mean(-1, keepdim=True) + eps)
    alone = (behind(norm, before) - behind(norm, -before)) / 2  # w * c(x) * s, without b
    found = linear + alone * squared_scale * (own * other).mean(-1, keepdim=True)
    # Both sides are w * c(d) * c(x) * s.
    one, another = found * own, alone * other
    if not (one - another).norm() <= _ROUNDING * another.norm():
        raise UnsupportedError(
            f"post_norms = 'frozen': {name!r} is a {type(norm).__name__}, and its scale is not "
            "that of a LayerNorm or RMSNorm: choose 'recomputed' or 'linear'"
        )
    return found
