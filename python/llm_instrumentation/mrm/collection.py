"""Which collector a run uses: the first of the configured ones that can run here."""

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
    "engine_mismatch",
]


@dataclass(frozen=True)
class CollectorStep:
    """A collector that was considered, and why it was not the one."""

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
