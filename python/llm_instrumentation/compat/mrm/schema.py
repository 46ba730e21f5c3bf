"""The enums of a trace's columns, of which :mod:`llm_instrumentation.mrm.schema` defines most."""

from __future__ import annotations

from enum import Enum

from ...mrm.schema import OpType, Phase, RegionType, RunValidity

__all__ = ["OpType", "Phase", "RegionType", "RetentionClass", "RunValidity"]


class RetentionClass(str, Enum):
    """How long data are kept, as mrm-trace names it. No table of this package has it."""

    SECONDS = "seconds"
    MINUTES = "minutes"
    HOURS = "hours"
    SESSION = "session"
