"""Models whose configuration has other values than the one of its type."""

from __future__ import annotations

import re
from typing import Any

from tiny_models import Tiny, make
from tiny_models.overrides import OVERRIDES
from transformers import PretrainedConfig

__all__ = ["with_fields"]


def with_fields(tiny: Tiny, pattern: str, value: float) -> Tiny | None:
    """A tiny model of the same type with a value in the fields of a name, also in its parts.

    Args:
        tiny: the model.
        pattern: fits the whole names.
        value: for each of these fields that holds a number, or None.

    Returns:
        None: it has no such fields.
    """
    config: Any = tiny.model.config
    fields = _fields(config, pattern, value)
    if not fields:
        return None
    for name, of_part in OVERRIDES.get(tiny.model_type, {}).items():
        if isinstance(fields.get(name), dict) and isinstance(of_part, dict):
            fields[name] = {**of_part, **fields[name]}
    return make(tiny.model_type, **fields)


def _fields(config: PretrainedConfig, pattern: str, value: float) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, before in vars(config).items():
        if isinstance(before, PretrainedConfig):
            if inner := _fields(before, pattern, value):
                found[name] = inner
        elif re.fullmatch(pattern, name) and _is_number(before) and before != value:
            found[name] = value
    return found


def _is_number(value: object) -> bool:
    return value is None or (isinstance(value, (int, float)) and not isinstance(value, bool))
