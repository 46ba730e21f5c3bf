"""Chooses the collector of a run: the first configured one that can run here.

For llama.cpp, two more are tried before memray.
"""

from __future__ import annotations

import importlib
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from . import collector as collectors
from .collector.base import Mode
from .collector.machine import COLLECTORS
from .config.schema import CollectorConfig, CollectorType, EngineType

if TYPE_CHECKING:
    from .collector.base import BaseCollector

__all__ = [
    "CollectorStep",
    "NothingCollectedError",
    "build_collector",
    "choose_mode",
    "collectors_for",
    "engine_mismatch",
]


_BEFORE_MEMRAY = (CollectorType.PAGE_FAULTS, CollectorType.WRITE_SETS)
_WHY_BEFORE_MEMRAY = (
    "for llamacpp it is tried before memray: llama.cpp tells where its weights, caches and "
    "activations lie, and memray sees little of them but one allocation each"
)


@dataclass(frozen=True)
class CollectorStep:
    """A collector that was tried, and whether it was used.

    ``reason`` says why the collector was not used. For a collector that was used, it says why it
    was tried although the configuration does not name it; None: the configuration names it.
    """

    collector: str
    used: bool
    reason: str | None = None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


class NothingCollectedError(RuntimeError):
    """No collector could run; each of ``steps`` says why one could not."""

    def __init__(self, steps: list[CollectorStep]) -> None:
        self.steps = steps
        told = "; ".join(f"{step.collector}: {step.reason}" for step in steps)
        super().__init__(f"no collector could run. {told}")


def build_collector(kind: CollectorType, settings: CollectorConfig) -> BaseCollector:
    """Makes a collector; the keys of its section in the config are its arguments."""
    module, name = COLLECTORS[kind.value]
    built = getattr(importlib.import_module(module, collectors.__name__), name)
    collector: BaseCollector = built(**getattr(settings, kind.value).model_dump())
    return collector


def collectors_for(
    settings: CollectorConfig, engine: EngineType
) -> dict[CollectorType, str | None]:
    """The collectors that a run tries, in this order.

    Collectors of pages show how llama.cpp uses the memory that it names. memray only shows that
    this memory was allocated, among all allocations of the Python program around it. So for
    llama.cpp, page_faults and write_sets are tried before memray. If the configuration names memray
    first, memray stays first.

    Returns:
        For each collector, why it is tried although the configuration does not name it there; None
        if the configuration names it.
    """
    tried: dict[CollectorType, str | None] = {}
    for kind in settings.order:
        if kind is CollectorType.MEMRAY and tried and engine is EngineType.LLAMACPP:
            for one in _BEFORE_MEMRAY:
                tried.setdefault(one, _WHY_BEFORE_MEMRAY)
        tried.setdefault(kind, None)
    return tried


def engine_mismatch(kind: CollectorType, engine: EngineType) -> str | None:
    """Why a collector cannot watch an engine at all, or None."""
    if kind is CollectorType.TORCH and engine is not EngineType.TRANSFORMERS:
        return f"it traces PyTorch models in this process, and {engine.value} is none"
    return None


def choose_mode(collector: BaseCollector, engine: EngineType) -> Mode:
    """How a collector reaches an engine.

    It watches from outside if it can, so that the engine's process holds only the model.
    """
    for mode in (Mode.ATTACH, Mode.WRAP):
        if mode in collector.modes:
            return mode
    return Mode.IN_PROCESS
