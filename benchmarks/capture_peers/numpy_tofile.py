"""numpy's tofile: all tensors in one file, as float32 or as float16."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from .contender import Contender, Running, hooks, tensors

OWN_PROCESS = False


@contextlib.contextmanager
def _to_one_file(
    model: nn.Module, prepare: Callable[[Tensor], Tensor], folder: Path, memory: float | None
) -> Iterator[Running]:
    with (folder / "tensors.bin").open("wb") as file:

        def write(module: nn.Module, args: Any, output: Any) -> None:
            for tensor in tensors(output):
                prepare(tensor).numpy().tofile(file)

        with hooks(model, lambda name: write):
            yield Running(model)


def contenders(model: nn.Module) -> list[Contender]:
    as_it_is = functools.partial(_to_one_file, model, lambda tensor: tensor)
    as_float16 = functools.partial(_to_one_file, model, lambda tensor: tensor.half())
    return [
        Contender("numpy tofile, float32", as_it_is),
        Contender("numpy tofile, float16", as_float16),
    ]
