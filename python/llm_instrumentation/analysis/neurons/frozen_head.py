"""The head of a language model as a linear map, with the scale of its last norm held fixed.

A norm divides by a scale that depends on the vector. With the scale of the whole residual stream,
the logit is a sum over the parts of that stream: their direct logit attribution. TransformerLens
does the same in `apply_ln_to_stack`.
"""

from __future__ import annotations

import copy
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ...errors import InvalidArgumentError, UnsupportedError
from .._model_head import VECTORS, ModelHead, unembedding_of

__all__ = ["FrozenHead", "LogitMap"]

_LARGE = 1e4  # values beside which the epsilon of a norm is nothing
_ROUNDING = 1e-3
_CHECKED = 4 << 20  # logits that are compared at once


class LogitMap(NamedTuple):
    """How the logit of a token depends on the residual stream, for each position.

    Attributes:
        directions: float64 [positions, width]: the product with a part of the stream is what the
            part adds to the logit.
        constants: float64 [positions]: what the biases of the norm and the unembedding add.
        logits: float64 [positions]: the product with the whole stream, and the constant.
    """

    directions: Tensor
    constants: Tensor
    logits: Tensor


class FrozenHead:
    """The last norm and the unembedding of a model.

    What the norm does is found from its values, so its class does not matter: whether it takes the
    mean away, its weight, and its bias.

    Args:
        model: a language model. It runs twice, on made-up tokens.
        norm: its last norm.

    Raises:
        InvalidArgumentError: the model has no unembedding.
        UnsupportedError: the model does something else behind its last block.
    """

    def __init__(self, model: nn.Module, norm: nn.Module) -> None:
        self._kind = type(model).__name__
        self._head = ModelHead(model)
        unembedding = unembedding_of(model)
        names = {id(module): name for name, module in model.named_modules()}
        own = names.get(id(unembedding))
        weight, bias = getattr(unembedding, "weight", None), getattr(unembedding, "bias", None)
        others = [name for name in self._head.matrices if name != own]
        if others or not isinstance(weight, Tensor) or not weight.is_floating_point():
            what = ", ".join(map(repr, others)) or "an unembedding without a matrix of floats"
            raise UnsupportedError(
                f"{self._kind} has {what} between its last block and the logits, so it is not "
                "known what a part adds to a logit"
            )
        self._weight: Tensor = weight.detach()
        self._bias: Tensor | None = None if bias is None else bias.detach()
        self._norm = copy.deepcopy(norm).cpu().double()
        with torch.no_grad():
            self._measure(weight.shape[1])

    def _measure(self, width: int) -> None:
        """Finds the weight and the bias of the norm, and whether it takes the mean away."""
        probe = torch.ones(width, dtype=torch.float64)
        probe[1::2] = -1.0
        if width % 2:  # the sum is 0 here too
            probe[-3:] = torch.tensor([2.0, -1.0, -1.0]) * probe[-3]
        self._norm_bias = self._norm(torch.zeros(1, width, dtype=torch.float64))[0].double()
        output = self._norm(_LARGE * probe[None])[0].double()
        moved = self._norm(_LARGE * (probe[None] + 3.0))[0].double()
        self._centred = bool(torch.allclose(output, moved, rtol=1e-3, atol=1e-4))
        size = probe.square().mean().sqrt()
        self._norm_weight = (output - self._norm_bias) * size / probe

    @property
    def width(self) -> int:
        """The width of the residual stream."""
        return self._weight.shape[1]

    def map(self, stream: Tensor, tokens: Tensor, against: Tensor | None) -> LogitMap:
        """The map to the logit of one token at each position.

        Args:
            stream: what the last norm is given, [positions, width].
            tokens: int64 [positions]: the tokens.
            against: int64 [positions]: the logit of this token is taken away; None: the logit
                alone.

        Raises:
            InvalidArgumentError: there is no such token.
            UnsupportedError: the model's own head makes other logits of the stream.
        """
        vocabulary = len(self._weight)
        for token in {*tokens.tolist(), *([] if against is None else against.tolist())}:
            if not 0 <= token < vocabulary:
                raise InvalidArgumentError(
                    f"token {token}: the model has {vocabulary:,}, from 0 on"
                )
        exact = stream.cpu().double()
        with torch.no_grad():
            normed = self._norm(exact).double() - self._norm_bias
        whole = exact - exact.mean(-1, keepdim=True) if self._centred else exact
        whole = whole * self._norm_weight
        scale = (normed * whole).sum(-1) / whole.square().sum(-1)
        if not torch.allclose(normed, scale[:, None] * whole, rtol=1e-2, atol=_ROUNDING):
            raise UnsupportedError(
                f"the last norm of {self._kind} does not divide its input by a number for each "
                "token, so it is not known what a part adds to a logit"
            )
        wanted, bias = self._rows(tokens), self._biases(tokens)
        if against is not None:
            wanted, bias = wanted - self._rows(against), bias - self._biases(against)
        directions = scale[:, None] * self._norm_weight * wanted
        if self._centred:
            directions = directions - directions.mean(-1, keepdim=True)
        constants = wanted @ self._norm_bias + bias
        logits = (directions * exact).sum(-1) + constants
        self._check(stream, tokens, against, logits)
        return LogitMap(directions, constants, logits)

    def _rows(self, tokens: Tensor) -> Tensor:
        return self._weight[tokens.to(self._weight.device)].cpu().double()

    def _biases(self, tokens: Tensor) -> Tensor:
        if self._bias is None:
            return torch.zeros(len(tokens), dtype=torch.float64)
        return self._bias[tokens.to(self._bias.device)].cpu().double()

    def _check(
        self, stream: Tensor, tokens: Tensor, against: Tensor | None, logits: Tensor
    ) -> None:
        """
        Raises:
            UnsupportedError: the model makes other logits of the stream: it has a scale or a cap.
        """
        # A row of logits is long, so there are few at a time.
        most = max(1, _CHECKED // len(self._weight) // VECTORS) * VECTORS
        for begin in range(0, len(stream), most):
            at = slice(begin, begin + most)
            made = self._head.logits(stream[at].to(self._weight.dtype)).cpu()
            own = made.double()
            found = own.gather(-1, tokens[at][:, None])[:, 0]
            if against is not None:
                found = found - own.gather(-1, against[at][:, None])[:, 0]
            tolerance = 1e-3 if made.dtype in (torch.float32, torch.float64) else 3e-2
            usual = own.abs().median()
            off = (found - logits[at]).abs() > tolerance * (usual + found.abs())
            if bool(off.any()):
                first = int(off.nonzero()[0])
                raise UnsupportedError(
                    f"{self._kind} gives token {int(tokens[at][first])} the logit "
                    f"{float(found[first]):.4g}, and its last norm and unembedding alone "
                    f"{float(logits[at][first]):.4g}: it scales or caps its logits, so they are "
                    "no sum of what parts add"
                )
