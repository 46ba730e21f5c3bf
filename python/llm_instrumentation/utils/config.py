"""How a capture is set up; defined in :mod:`llm_instrumentation.core.config`."""

from __future__ import annotations

from ..core.config import PRESETS, HookConfig, HookGranularity, InstrumentationConfig

__all__ = ["PRESETS", "HookConfig", "HookGranularity", "InstrumentationConfig"]
