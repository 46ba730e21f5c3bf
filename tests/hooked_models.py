"""Frameworks with models to capture, and the number of hooks in a model."""

from __future__ import annotations

from llm_instrumentation import InstrumentationConfig, InstrumentationFramework
from torch import nn


def hooks_of(model: nn.Module) -> int:
    return sum(
        len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()
    )


def balanced(*models: nn.Module, **changes: object) -> InstrumentationFramework:
    config = InstrumentationConfig.balanced()
    for name, value in changes.items():
        setattr(config, name, value)
    framework = InstrumentationFramework(config)
    for model in models:
        framework.instrument_model(model)
    return framework
