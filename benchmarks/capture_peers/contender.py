"""Contenders: a model, and the ways to capture it."""

from __future__ import annotations

import contextlib
import gc
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from _common import clean_folder, stored, sync
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

Figures = dict[str, Any]


class Absent(Exception):  # noqa: N818
    """A contender cannot run here; the text says why."""


class Running:
    """A model while it is captured.

    A contender that has to call the model itself overrides the methods.

    Attributes:
        told: further figures of the capture, known after it is closed.
    """

    tokens: ClassVar[int] = 32
    """The number of tokens of a generation."""

    def __init__(self, model: nn.Module) -> None:
        self.model: Any = model
        self.told: dict[str, float] = {}

    def prefill(self, ids: Tensor) -> None:
        """One forward call, ids of shape (1, length)."""
        self.model(ids)

    def generation(self, ids: Tensor) -> None:
        """Greedy generation after a prompt of shape (1, length), with the key-value cache."""
        self.model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, use_cache=True,
            min_new_tokens=self.tokens, max_new_tokens=self.tokens,
        )  # fmt: skip


@dataclass
class Contender:
    """A way of capturing.

    Attributes:
        name: the name in the table.
        capture: opens a capture in an empty folder, with a memory limit in GB (None: its default).
            The end of the block closes the capture, when all bytes are written.
    """

    name: str
    capture: Callable[[Path, float | None], contextlib.AbstractContextManager[Running]]

    def run(
        self, workload: str, ids: Tensor, passes: int, memory: float | None, parent: Path,
        until_synced: bool,
    ) -> Figures:  # fmt: skip
        """Runs many passes in one capture.

        Returns:
            Per pass: "model", the seconds of the model's calls; "whole", the seconds from before
            the opening to the end of the capture; "stored", the stored bytes; and `Running.told`.
        """
        with clean_folder(parent) as folder:
            gc.collect()
            began = time.perf_counter()
            with self.capture(folder, memory) as running:
                model_seconds = run_passes(running, workload, ids, passes)
            if until_synced:
                sync(folder)
            whole = time.perf_counter() - began
            return {
                "model": model_seconds / passes, "whole": whole / passes,
                "stored": stored(folder) / passes, **running.told,
            }  # fmt: skip


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
    """The tensors of a module's output, in order. Caches are left out."""
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, dict):
        for value in output.values():
            yield from tensors(value)
    elif isinstance(output, (tuple, list)):
        for value in output:
            yield from tensors(value)


def each_tensor(
    model: nn.Module, suffix: str, save: Callable[[Tensor, Path], None]
) -> Callable[[Path, float | None], contextlib.AbstractContextManager[Running]]:
    """A `capture` for Contender that saves each tensor to a separate file, in the hook."""

    @contextlib.contextmanager
    def capture(folder: Path, memory: float | None) -> Iterator[Running]:
        saved = 0

        def make(name: str) -> Callable[..., None]:
            def hook(module: nn.Module, args: Any, output: Any) -> None:
                nonlocal saved
                for tensor in tensors(output):
                    save(tensor, folder / f"{saved}-{name}{suffix}")
                    saved += 1

            return hook

        with hooks(model, make):
            yield Running(model)

    return capture


# ---- the model and its runs ---------------------------------------------------------


def build(quick: bool) -> nn.Module:
    """The Llama. With `quick` it is tiny and generates three tokens."""
    torch.manual_seed(0)
    size = {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 8}
    if quick:
        Running.tokens = 3
        size = {"hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2}
    config = LlamaConfig(
        **size, vocab_size=32000, num_attention_heads=12,
        bos_token_id=None, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def run_passes(running: Running, workload: str, ids: Tensor, passes: int) -> float:
    work = getattr(running, workload)
    began = time.perf_counter()
    for _ in range(passes):
        work(ids)
    return time.perf_counter() - began
