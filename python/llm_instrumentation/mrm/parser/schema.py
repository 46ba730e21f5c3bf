"""The enums of a trace's columns, defined in :mod:`llm_instrumentation.mrm.schema`."""

from __future__ import annotations

from ..schema import OpType, Phase, RegionType, RunValidity

__all__ = ["OpType", "Phase", "RegionType", "RunValidity"]
