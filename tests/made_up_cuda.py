"""A made-up CUDA device, so that tests run the steps of a transfer without a GPU.

Tensors stay in host memory. Operators run at once. A copy that does not block arrives late: its
target has wrong bytes until a thread waits for an event or stream behind the copy. So a test fails
if the library reads a target too early. The log shows which steps were made, in which order and on
which stream. That the steps are right on a real device needs a real device.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from llm_instrumentation.core import sampling
from llm_instrumentation.core.calls import call_writer, waiting_calls
from llm_instrumentation.core.recording import opened
from llm_instrumentation.core.tensors import sink
from llm_instrumentation.memory import cuda_manager
from torch.utils._device import _device_constructors

_WRONG = 0xA5  # what each byte of a target is until its copy is done


class Cuda:
    """What happened on the device.

    Attributes:
        log: all calls to the made-up `torch.cuda`, in order.
        waits: how a thread waited for the device, as ("event", its name) or ("cpu", its name);
            ("beside graphs", its name): it may do so while another thread records a graph.
        pinned: bytes of pinned memory now, and at most.
        capturing: the current stream records a graph.
        room: the device has no memory for a copy of so many bytes or more; None: for all.
    """

    def __init__(self) -> None:
        self.log: list[tuple[Any, ...]] = []
        self.waits: list[tuple[str, str]] = []
        self.pinned = [0, 0]
        self.capturing = False
        self.room: int | None = None
        self.lock = threading.RLock()
        self.here = threading.local()
        self.streams = 0

    def wait(self, how: str) -> None:
        self.waits.append((how, threading.current_thread().name))

    def model_waited(self) -> bool:
        """Whether the main thread waited, in which tests run their models."""
        return any(thread == threading.main_thread().name for _, thread in self.waits)

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        self.pinned[0] += tensor.nbytes
        self.pinned[1] = max(self.pinned)
        weakref.finalize(tensor, self.unpin, tensor.nbytes)
        return tensor

    def unpin(self, nbytes: int) -> None:
        self.pinned[0] -= nbytes


def install(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    """Makes all tensors count as CUDA tensors, until the patch is undone."""
    cuda = Cuda()
    _device_constructors()  # torch keeps the list: it must not have what stands below

    class Stream:
        device = torch.device("cpu")
        cuda_stream = 0  # the handle, which PyTorch's sanitizer of streams asks for

        def __init__(self, device: Any = None, *, name: str | None = None) -> None:
            self.work: list[Callable[[], object]] = []  # unfinished, oldest first
            self.begun = 0
            if name is None:
                name = f"stream {cuda.streams}"
                cuda.streams += 1
                cuda.log.append(("stream", name))
            self.name = name

        def begin(self, work: Callable[[], object]) -> None:
            with cuda.lock:
                self.work.append(work)
                self.begun += 1

        def finish(self, upto: int) -> None:
            with cuda.lock:
                while self.work and self.begun - len(self.work) < upto:
                    self.work.pop(0)()

        def wait_stream(self, other: Stream) -> None:
            cuda.log.append(("wait", self.name, other.name))
            upto = other.begun
            self.begin(lambda: other.finish(upto))

        def synchronize(self) -> None:
            cuda.log.append(("synchronize", self.name))
            self.finish(self.begun)

    class Event:
        device = torch.device("cpu")

        def __init__(self, blocking: bool) -> None:
            assert blocking  # so a waiting thread sleeps, and does not spin on a CPU

        def record(self, stream: Stream) -> None:
            cuda.log.append(("record", stream.name))
            self.stream, self.upto = stream, stream.begun

        def synchronize(self) -> None:
            cuda.wait("event")
            self.stream.finish(self.upto)

        def query(self) -> bool:
            return self.stream.begun - len(self.stream.work) >= self.upto

    class Graph:
        def replay(self) -> None:
            """A replay runs no Python, so nothing is to be seen of it."""

    the_models = Stream(name="the model's")

    def current(device: Any = None) -> Stream:
        return getattr(cuda.here, "stream", the_models)

    @contextlib.contextmanager
    def within(stream: Stream) -> Iterator[None]:
        before, cuda.here.stream = current(), stream
        try:
            yield
        finally:
            cuda.here.stream = before

    @contextlib.contextmanager
    def recording(graph: Graph, **how: Any) -> Iterator[None]:
        cuda.capturing = True
        try:
            yield
        finally:
            cuda.capturing = False

    def copy(self: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        if not non_blocking:
            return plain_copy(self, source)
        cuda.log.append(("copy", current().name, str(source.dtype), non_blocking))
        value = plain_clone(source)
        if self.numel():
            plain_fill(self.view(-1).view(torch.uint8), _WRONG)
        current().begin(lambda: plain_copy(self, value))
        return self

    def clone(self: torch.Tensor, **how: Any) -> torch.Tensor:
        if cuda.room is not None and self.nbytes >= cuda.room:
            raise torch.cuda.OutOfMemoryError("the made-up device is full")
        return plain_clone(self, **how)

    def to_host(self: torch.Tensor) -> torch.Tensor:
        cuda.wait("cpu")
        # Only a tensor whose elements lie side by side goes to the host as it is.
        return plain_cpu(self) if _is_dense(self) else clone(self)

    def empty(*size: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        made = plain_empty(*size, **options)
        return cuda.pin(made) if pin_memory else made

    plain_copy, plain_fill, plain_empty = torch.Tensor.copy_, torch.Tensor.fill_, torch.empty
    plain_clone, plain_cpu = torch.Tensor.clone, torch.Tensor.cpu
    for name in ("nvtx.range_push", "nvtx.range_pop", "profiler.start", "profiler.stop"):
        monkeypatch.setattr(f"torch.cuda.{name}", lambda *told: None)
    for name, value in {
        "Stream": Stream, "Event": Event, "CUDAGraph": Graph, "graph": recording, "stream": within,
        "current_stream": current,
        "is_current_stream_capturing": lambda: cuda.capturing,
        "set_sync_debug_mode": lambda mode: None,
        "synchronize": lambda device=None: current().synchronize(),
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch, "empty", empty)
    monkeypatch.setattr(torch.Tensor, "copy_", copy)
    monkeypatch.setattr(torch.Tensor, "clone", clone)
    monkeypatch.setattr(torch.Tensor, "cpu", to_host)
    monkeypatch.setattr(torch.Tensor, "is_cpu", property(lambda self: False), raising=False)
    monkeypatch.setattr(
        torch.Tensor,
        "record_stream",
        lambda self, stream: cuda.log.append(("lend", str(self.dtype), stream.name)),
    )
    monkeypatch.setattr(opened, "view_function", lambda _: 0)
    for module in (waiting_calls, cuda_manager, sampling, sink):
        monkeypatch.setattr(module, "on_cuda", lambda tensor: True)
    for module in (call_writer, cuda_manager):
        monkeypatch.setattr(module, "wait_beside_graphs", lambda: cuda.wait("beside graphs"))
    return cuda


def _is_dense(tensor: torch.Tensor) -> bool:
    span = sum(step * (n - 1) for step, n in zip(tensor.stride(), tensor.shape, strict=True)) + 1
    return tensor.numel() in (0, span)
