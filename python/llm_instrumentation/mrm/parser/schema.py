"""The names of mrm-trace under their documented path; see `compat.mrm.schema`."""

from __future__ import annotations

from ...compat.mrm.schema import OpType, Phase, RegionType, RetentionClass, RunValidity

__all__ = ["OpType", "Phase", "RegionType", "RetentionClass", "RunValidity"]
