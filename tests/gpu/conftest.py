"""The device: CUDA's, or on a machine without one a made-up one."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import made_up_cuda
import pytest
import torch
from llm_instrumentation import ActivationReader, InstrumentationConfig
from torch import Tensor

os.environ["HF_HUB_OFFLINE"] = "1"
if not torch.cuda.is_available():
    torch.set_num_threads(1)  # threads of small models wait for each other on a busy machine


@pytest.fixture
def made_up(request, monkeypatch) -> made_up_cuda.Cuda | None:
    """The made-up device, or None if there is a real one."""
    if torch.cuda.is_available():
        return None
    return made_up_cuda.install(monkeypatch)


@pytest.fixture
def device(made_up) -> str:
    return "cuda" if made_up is None else "cpu"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run.stream"


@pytest.fixture
def quiet() -> InstrumentationConfig:
    """Stores all tensors bit for bit."""
    return InstrumentationConfig.fast_capture().with_float32().with_progress(False)


@pytest.fixture
def read() -> Callable[..., list[tuple[str, Tensor]]]:
    """Names and values of the activations of a capture, in capture order."""

    def read(path: Path, **how: Any) -> list[tuple[str, Tensor]]:
        with ActivationReader(path) as reader:
            return [(activation.name, activation.to_torch(**how)) for activation in reader]

    return read


@pytest.fixture
def busy(device) -> Callable[[], None]:
    """Gives the current stream work that takes a while, so that reading too early is seen."""
    size = 4096 if device == "cuda" else 8
    x = torch.randn(size, size, device=device)

    def work() -> None:
        for _ in range(20):
            torch.mm(x, x)

    return work


@pytest.fixture
def full(made_up) -> Callable[[], contextlib.AbstractContextManager[None]]:
    """A block in which the device has no room for tensors of 32 MiB or more."""

    @contextlib.contextmanager
    def block() -> Iterator[None]:
        if made_up is not None:
            made_up.room = 32 << 20
            yield
            made_up.room = None
            return
        torch.cuda.empty_cache()
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(
            (torch.cuda.memory_reserved() + (30 << 20)) / total
        )
        try:
            yield
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)

    return block
