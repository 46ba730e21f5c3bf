"""Where the experts of mixture-of-experts blocks are, for each architecture.

A block with experts returns a sum. A router chooses some of the experts for each token, and gives
each of them a weight. The part of an expert is what it returns, times its weight; it is 0 at tokens
for which the expert is not chosen. A shared expert has a part at every token.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ..core.tensors.modules import adapter_advice, original_name
from ..errors import InvalidArgumentError, UnsupportedError

__all__ = ["SHARED", "ExpertLayout", "Experts", "experts_of", "register_experts"]

#: The name of the shared expert.
SHARED = "shared"


@dataclasses.dataclass(frozen=True)
class ExpertLayout:
    """The places of the parts in a class of mixture-of-experts blocks.

    All names are relative to the block. All parts receive what the block receives, as [tokens,
    width].

    Attributes:
        router: returns the scores of all experts, and for each token the weights and the numbers of
            the experts that are chosen, [tokens, chosen].
        experts: all experts in one module, as transformers has them from release 5 on. It has their
            number as `num_experts`. It is called with the tokens, the numbers and the weights, and
            returns the sum of what the chosen experts return, each times its weight.
        shared: an expert at every token. None: there is none.
        shared_gate: returns a number for each token; its sigmoid is the weight of the shared
            expert. None: its weight is 1.
    """

    router: str = "gate"
    experts: str = "experts"
    shared: str | None = None
    shared_gate: str | None = None

    def __post_init__(self) -> None:
        if self.shared_gate is not None and self.shared is None:
            raise InvalidArgumentError(
                f"shared_gate = {self.shared_gate!r} needs a shared expert: give shared too"
            )


# By the class of the block. A subclass has the layout of its base.
_LAYOUTS: dict[str, ExpertLayout] = {
    **{
        f"{name}SparseMoeBlock": ExpertLayout()
        for name in ("FlexOlmo", "Mixtral", "Olmoe", "Qwen3Moe")
    },
    "Qwen2MoeSparseMoeBlock": ExpertLayout(
        shared="shared_expert", shared_gate="shared_expert_gate"
    ),
}


def register_experts(block: type[nn.Module] | str, layout: ExpertLayout) -> None:
    """Says where a class of mixture-of-experts blocks has its parts::

        register_experts("MyMoeBlock", ExpertLayout("router", "experts", shared="shared_mlp"))

    The first run of each function checks that the block returns the sum of these parts.

    Args:
        block: the class of the blocks, or its name.
        layout: replaces an earlier one of this class.
    """
    name = block if isinstance(block, str) else block.__name__
    _LAYOUTS[name] = layout


class Experts:
    """The experts of one block.

    Args:
        name: the name of the block in its model.
        block: the block.
        layout: where its parts are.

    Attributes:
        name: as given.
        names: those of the experts: "e0", "e1" and so on, and "shared" for a shared one.

    Raises:
        UnsupportedError: the block is not as its layout says.
    """

    def __init__(self, name: str, block: nn.Module, layout: ExpertLayout) -> None:
        self.name = name
        self._kind = type(block).__name__
        try:
            self._router, self._experts = map(block.get_submodule, (layout.router, layout.experts))
            self._shared = None if layout.shared is None else block.get_submodule(layout.shared)
            gate = layout.shared_gate
            self._shared_gate = None if gate is None else block.get_submodule(gate)
        except AttributeError as error:
            raise UnsupportedError(
                f"{name!r} ({self._kind}) is not as its layout of experts says: {error}. Use "
                f"register_experts with another layout{adapter_advice(block)}"
            ) from error
        if isinstance(self._experts, nn.ModuleList):
            raise UnsupportedError(
                f"{name!r} ({self._kind}) has a module for each expert, as transformers had before "
                "release 5, and the weights of the experts are not known: install "
                "transformers>=5, or take the block as one node"
            )
        count = getattr(self._experts, "num_experts", None)
        if not isinstance(count, int):
            raise UnsupportedError(
                f"{name!r} ({self._kind}): {type(self._experts).__name__} does not say the number "
                "of its experts as num_experts: use register_experts with another layout"
            )
        self._count = count
        self.names = (*(f"e{number}" for number in range(count)), *[SHARED] * bool(layout.shared))

    def __repr__(self) -> str:
        return f"<Experts of {self.name!r} ({self._kind}): {len(self.names)}>"

    @property
    def width(self) -> int:
        """The width of what the block receives and returns.

        Raises:
            UnsupportedError: the experts and the router do not say it.
        """
        width = getattr(self._experts, "hidden_dim", None)
        if not isinstance(width, int):
            weight = getattr(self._router, "weight", None)
            if not isinstance(weight, Tensor) or weight.dim() != 2:
                raise UnsupportedError(
                    f"{self.name!r} ({self._kind}): the width of its experts is not known: give "
                    f"{type(self._experts).__name__} an attribute hidden_dim"
                )
            width = weight.shape[1]
        return width

    def place(self, expert: int | str) -> int:
        """The place of an expert, as a site has it, in `names`.

        Raises:
            InvalidArgumentError: there is no such expert.
        """
        name = expert if isinstance(expert, str) else f"e{expert}"
        if name not in self.names:
            raise InvalidArgumentError(
                f"expert = {expert!r}: {self.name!r} has {self.names[0]} to {self.names[-1]}"
            )
        return self.names.index(name)

    def check_sum(self, parts: Tensor, returned: Tensor) -> None:
        """Refuses a block that returns something else than the sum of the parts.

        Args:
            parts: of all experts, [experts, ..., width].
            returned: by the block.

        Raises:
            UnsupportedError: they differ by more than rounding.
        """
        total = parts.detach().sum(0)
        error = (total - returned.detach().reshape(total.shape)).float().norm()
        # A sum in another order than the block's differs less than this, also in bfloat16.
        if not error <= 0.02 * returned.detach().float().norm().clamp_min(1e-9):
            raise UnsupportedError(
                f"{self.name!r} returns something else than the sum of what its experts return, "
                f"each times its weight, so {self._kind} is not as its layout says: see "
                "register_experts, or take the block as one node"
            )

    def parts(self, received: Tensor, which: Sequence[int] | None = None) -> Tensor:
        """The parts of experts in what the block returns. Their sum is what it returns.

        Hooks of the router and the experts do not run. Gradients flow through the outputs of the
        experts and through their weights. The choice of the experts has no gradient.

        Args:
            received: what the block receives, [..., width].
            which: the experts, by their places in `names`. None: all.

        Returns:
            [experts, ..., width].

        Raises:
            UnsupportedError: the router returns something else than its layout says.
        """
        tokens = received.reshape(-1, received.shape[-1])
        weights, chosen = self._routed(tokens)
        numbers = range(len(self.names)) if which is None else which
        found = [self._part(number, tokens, weights, chosen) for number in numbers]
        return torch.stack(found).reshape(len(found), *received.shape)

    def _routed(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """The weights and the numbers of the chosen experts, each [tokens, chosen]."""
        found = self._router.forward(tokens)
        if isinstance(found, tuple) and len(found) == 3:
            _, weights, chosen = found
            if (
                isinstance(weights, Tensor) and isinstance(chosen, Tensor)
                and weights.shape == chosen.shape and len(chosen) == len(tokens)
                and not chosen.is_floating_point()
            ):  # fmt: skip
                return weights, chosen
        raise UnsupportedError(
            f"{self.name!r} ({self._kind}): {type(self._router).__name__} does not return scores, "
            "and weights and numbers of the chosen experts for each token, so the parts of the "
            "experts cannot be told apart: take the block as one node"
        )

    def _part(self, number: int, tokens: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        if number == self._count:
            assert self._shared is not None
            part: Tensor = self._shared.forward(tokens)
            if self._shared_gate is not None:
                part = torch.sigmoid(self._shared_gate.forward(tokens)) * part
            return part
        here = chosen == number
        rows = here.any(-1).nonzero()[:, 0]
        part = torch.zeros_like(tokens)
        if not len(rows):
            return part
        own = (weights * here).sum(-1, keepdim=True)[rows]
        of_rows = self._experts.forward(tokens[rows], chosen.new_full((len(rows), 1), number), own)
        return part.index_copy(0, rows, of_rows)


def experts_of(model: nn.Module) -> dict[str, Experts]:
    """The mixture-of-experts blocks of a model that the table knows, by name, in its order.

    The table knows the blocks of Mixtral, Qwen2-MoE, Qwen3-MoE, OLMoE and FlexOlmo in transformers
    5, and their subclasses. `register_experts` adds a class.

    Raises:
        UnsupportedError: a block is not as the layout of its class says.
    """
    found = {}
    for raw, module in model.named_modules():
        names = [kind.__name__ for kind in type(module).__mro__]
        layout = next((_LAYOUTS[name] for name in names if name in _LAYOUTS), None)
        if layout is not None:
            name = original_name(raw)
            found[name] = Experts(name, module, layout)
    return found


def check_no_experts(name: str, block: nn.Module) -> None:
    """Refuses a block that seems to have experts, and whose class the table does not know.

    Raises:
        UnsupportedError: it has a part with "expert" in its name.
    """
    if any("expert" in part.lower() for part, _ in block.named_modules()):
        raise UnsupportedError(
            f"{name!r}: it is not known where {type(block).__name__} has its experts: say it with "
            "register_experts, or take the block as one node"
        )
