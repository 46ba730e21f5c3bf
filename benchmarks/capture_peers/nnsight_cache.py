"""nnsight: its cache of all modules' outputs, which torch.save writes after each forward call.

nnsight itself cannot stream to disk.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .contender import Absent, Contender, Running, tensors

OWN_PROCESS = True  # it adds a method to every Python object


class _Traced(Running):
    """Traces the model's calls and writes the outputs of each trace to a file."""

    def __init__(self, model: nn.Module, wrapped: Any, folder: Path) -> None:
        super().__init__(model)
        self.wrapped, self.folder, self.calls = wrapped, folder, 0

    def _call(self, ids: Tensor, **settings: Any) -> Any:
        with self.wrapped.trace(ids, **settings) as tracer:
            cache = tracer.cache()
            out = self.wrapped.output.save()
        outputs = {name: list(tensors(cache[name].output)) for name in cache.keys()}  # noqa: SIM118
        torch.save(outputs, self.folder / f"{self.calls}.pt")
        self.calls += 1
        return out

    def prefill(self, ids: Tensor) -> None:
        self._call(ids)

    def generation(self, ids: Tensor) -> None:
        cache: Any = None
        for _ in range(self.tokens):
            out = self._call(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
            cache, ids = out.past_key_values, out.logits[:, -1:].argmax(-1)


def contenders(model: nn.Module) -> list[Contender]:
    try:
        from nnsight import NNsight
    except ImportError as error:
        raise Absent(str(error)) from None
    wrapped = NNsight(model)

    @contextlib.contextmanager
    def capture(folder: Path, memory: float | None) -> Iterator[Running]:
        yield _Traced(model, wrapped, folder)

    return [Contender("nnsight cache, torch.save", capture)]
