"""torchlens: its fastlog recorder, which streams the output of every operator to disk.

Its events for modules have no tensors. The tensors that modules return are among the outputs of the
operators.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .contender import Absent, Contender, Running

OWN_PROCESS = True  # it wraps torch's functions and does not restore them


class _Recorded(Running):
    """Passes the model's calls through the recorder."""

    def __init__(self, model: nn.Module, recorder: Any) -> None:
        super().__init__(model)
        self.recorder = recorder

    def prefill(self, ids: Tensor) -> None:
        self.recorder.log(ids)

    def generation(self, ids: Tensor) -> None:
        cache: Any = None
        for _ in range(self.tokens):
            settings = {"past_key_values": cache, "use_cache": True, "logits_to_keep": 1}
            out = self.recorder.log(ids, settings)
            cache, ids = out.past_key_values, out.logits[:, -1:].argmax(-1)


def contenders(model: nn.Module) -> list[Contender]:
    try:
        from torchlens.fastlog import Recorder
        from torchlens.options import StreamingOptions
    except ImportError as error:
        raise Absent(str(error)) from None

    @contextlib.contextmanager
    def capture(folder: Path, memory: float | None) -> Iterator[Running]:
        to_disk = StreamingOptions(bundle_path=folder / "bundle", retain_in_memory=False)
        with torch.no_grad(), Recorder(model, default_op=True, streaming=to_disk) as recorder:
            yield _Recorded(model, recorder)

    return [Contender("torchlens fastlog, every operator", capture)]
