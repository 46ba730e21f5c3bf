"""What a benchmark runs: a model under some way of capturing it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

TOKENS = 32


class Absent(Exception):  # noqa: N818
    """This way cannot be had here; the text says why."""


class Running:
    """A model while it is captured.

    A way of capturing that has to make the model's calls itself overrides these methods.

    Attributes:
        told: what the capture says of itself once it is closed.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model: Any = model
        self.told: dict[str, float] = {}

    def prefill(self, ids: Tensor) -> None:
        """One forward call, ids of shape (1, length)."""
        self.model(ids)

    def generation(self, ids: Tensor) -> None:
        """Greedy tokens after a prompt, the key-value cache in use."""
        self.model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, use_cache=True,
            min_new_tokens=TOKENS, max_new_tokens=TOKENS,
        )  # fmt: skip


@dataclass
class Contender:
    """A way of capturing.

    Attributes:
        name: in the table.
        capture: opens a capture into an empty folder, with a limit of its memory in GB (None: its
            own), and closes it when all bytes are written.
        stores: False for the ones that only show what hooks cost.
    """

    name: str
    capture: Callable[[Path, float | None], contextlib.AbstractContextManager[Running]]
    stores: bool = field(default=True)


@contextlib.contextmanager
def hooks(model: nn.Module, make: Callable[[str], Callable[..., None]]) -> Iterator[None]:
    """Registers a forward hook on every module: `make(name)`."""
    handles = [module.register_forward_hook(make(name)) for name, module in model.named_modules()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def tensors(output: Any) -> Iterator[Tensor]:
    """The tensors of a module's output, in order; caches, which are no activations, left out."""
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, dict):
        for value in output.values():
            yield from tensors(value)
    elif isinstance(output, (tuple, list)):
        for value in output:
            yield from tensors(value)
