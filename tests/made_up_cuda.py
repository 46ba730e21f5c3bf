"""Fake CUDA streams and events, so that tests run the steps of a transfer without a GPU.

Tensors stay in host memory, and each copy is complete when the call returns. Tests check which
steps a transfer makes, in which order and on which stream, and what the callbacks receive. They
cannot check that these steps are correct on a real device.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from llm_instrumentation.core import sink
from llm_instrumentation.memory import cuda_manager


class Cuda:
    """The log of all calls to the fake `torch.cuda`, in order."""

    def __init__(self) -> None:
        self.log: list[tuple[Any, ...]] = []
        self.current = threading.local()
        self.capturing = False

    def stream(self) -> Any:
        return getattr(self.current, "stream", "the model's")


def install(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    """Makes all tensors count as CUDA tensors, until the test ends."""
    cuda = Cuda()

    class Stream:
        def __init__(self, device: torch.device) -> None:
            self.name = f"stream {sum(entry[0] == 'stream' for entry in cuda.log)}"
            cuda.log.append(("stream", self.name))

        def wait_stream(self, other: Any) -> None:
            cuda.log.append(("wait", self.name, other))

        def synchronize(self) -> None:
            cuda.log.append(("synchronize", self.name))

    class Event:
        def __init__(self, blocking: bool) -> None:
            assert blocking  # so a waiting thread sleeps, and does not spin on a CPU

        def record(self, stream: Any) -> None:
            cuda.log.append(("record", getattr(stream, "name", stream)))

        def synchronize(self) -> None:
            assert threading.current_thread() is not threading.main_thread()

    @contextlib.contextmanager
    def within(stream: Stream) -> Iterator[None]:
        before, cuda.current.stream = cuda.stream(), stream.name
        try:
            yield
        finally:
            cuda.current.stream = before

    def copy(self: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        cuda.log.append(("copy", cuda.stream(), str(source.dtype), non_blocking))
        return plain_copy(self, source)

    def pinned(*size: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        return plain_empty(*size, **options)

    plain_copy, plain_empty = torch.Tensor.copy_, torch.empty
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "stream", within)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: cuda.stream())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: cuda.capturing)
    monkeypatch.setattr(torch, "empty", pinned)
    monkeypatch.setattr(torch.Tensor, "copy_", copy)
    monkeypatch.setattr(
        torch.Tensor,
        "record_stream",
        lambda self, stream: cuda.log.append(("lend", str(self.dtype), stream.name)),
    )
    for module in (cuda_manager, sink):
        monkeypatch.setattr(module, "on_cuda", lambda tensor: True)
    return cuda
