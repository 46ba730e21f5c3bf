"""Which collector a run uses: the first that can run here.

They are the configured ones, in their order. For llama.cpp two more stand before memray.
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
    """A collector that was considered, and why it was not the one.

    Of one that was used, ``reason`` says why it was tried though the file does not name it.
    """

    collector: str
    used: bool
    reason: str | None = None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


class NothingCollectedError(RuntimeError):
    """No configured collector could run; ``steps`` says why, one each."""

    def __init__(self, steps: list[CollectorStep]) -> None:
        self.steps = steps
        told = "; ".join(f"{step.collector}: {step.reason}" for step in steps)
        super().__init__(f"no collector could run. {told}")


def build_collector(kind: CollectorType, settings: CollectorConfig) -> BaseCollector:
    """A collector; the keys of its section of the config are its arguments."""
    module, name = COLLECTORS[kind.value]
    built = getattr(importlib.import_module(module, collectors.__name__), name)
    collector: BaseCollector = built(**getattr(settings, kind.value).model_dump())
    return collector


def collectors_for(
    settings: CollectorConfig, engine: EngineType
) -> dict[CollectorType, str | None]:
    """The collectors that a run tries, in their order.

    Collectors that see pages show what llama.cpp does with the memory that it names; memray
    shows that it was allocated, among all allocations of the Python program around it. So they
    stand before a memray that is a fallback. A memray that is named first stays first.

    Returns:
        for each, why it is tried though the configuration does not name it there; None where
        it does.
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
    """How a collector gets at an engine.

    From outside where it can: then the engine's process holds the model and nothing else.
    """
    for mode in (Mode.ATTACH, Mode.WRAP):
        if mode in collector.modes:
            return mode
    return Mode.IN_PROCESS
