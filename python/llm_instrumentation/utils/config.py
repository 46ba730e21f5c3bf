"""The configuration of a capture; :mod:`llm_instrumentation.core.config` defines it."""

from __future__ import annotations

from ..core.config import PRESETS, HookConfig, HookGranularity, InstrumentationConfig

__all__ = ["PRESETS", "HookConfig", "HookGranularity", "InstrumentationConfig"]
