"""Configurations as plain values, which engines send to their workers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from ..core.config import InstrumentationConfig, from_preset
from ..errors import InvalidArgumentError, UnsupportedError

__all__ = ["config_of", "settings_of"]


def settings_of(config: InstrumentationConfig) -> dict[str, Any]:
    """The values of a configuration by their names.

    Raises:
        InvalidArgumentError: a pattern is no glob. Other forms cannot be sent.
    """
    config.validate()
    settings = {field.name: getattr(config, field.name) for field in fields(config)}
    settings["granularity"] = config.granularity.value
    for name in ("include", "exclude", "probes"):
        settings[name] = list(settings[name])
        for pattern in settings[name]:
            if not isinstance(pattern, str):
                raise InvalidArgumentError(
                    f"{name} has {pattern!r}, which cannot be sent to the workers: give a glob"
                )
    return settings


def config_of(preset: str | None, settings: Mapping[str, Any] | None) -> InstrumentationConfig:
    """The configuration of a preset, balanced by default, with other settings.

    Raises:
        ValueError: the preset is unknown, or a value is out of its range.
        InvalidArgumentError: a setting is unknown.
        UnsupportedError: it keeps the last position only.
    """
    config = from_preset(preset or "balanced")
    names = [field.name for field in fields(config)]
    if unknown := sorted(set(settings or {}) - set(names)):
        raise InvalidArgumentError(
            f"no setting {', '.join(map(repr, unknown))}: choose of {', '.join(names)}"
        )
    config = replace(config, **(settings or {}))
    if config.last_position:
        raise UnsupportedError(
            "the batches of an engine have the tokens of all requests in one axis, so the last "
            "position is that of one request alone: leave last_position out"
        )
    return config
