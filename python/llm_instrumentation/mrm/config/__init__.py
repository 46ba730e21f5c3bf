"""Experiment files in YAML: their schema, their reader, their checks and their runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..._lazy import lazy

if TYPE_CHECKING:
    from .loader import ConfigError, load_experiment
    from .prompts import Prompt, load_prompts
    from .schema import (
        CollectorType,
        EngineType,
        ExperimentConfig,
        MetricName,
        ModelConfig,
        RunConfig,
        UnknownPolicy,
    )
    from .validators import (
        ValidationResult,
        expand_sweep,
        generate_run_id,
        validate_config_semantics,
        validate_environment,
        validate_model_paths,
    )

__all__ = [
    "CollectorType",
    "ConfigError",
    "EngineType",
    "ExperimentConfig",
    "MetricName",
    "ModelConfig",
    "Prompt",
    "RunConfig",
    "UnknownPolicy",
    "ValidationResult",
    "expand_sweep",
    "generate_run_id",
    "load_experiment",
    "load_prompts",
    "validate_config_semantics",
    "validate_environment",
    "validate_model_paths",
]

__getattr__, __dir__ = lazy(
    __name__,
    {
        "CollectorType": ".schema",
        "ConfigError": ".loader",
        "EngineType": ".schema",
        "ExperimentConfig": ".schema",
        "MetricName": ".schema",
        "ModelConfig": ".schema",
        "Prompt": ".prompts",
        "RunConfig": ".schema",
        "UnknownPolicy": ".schema",
        "ValidationResult": ".validators",
        "expand_sweep": ".validators",
        "generate_run_id": ".validators",
        "load_experiment": ".loader",
        "load_prompts": ".prompts",
        "validate_config_semantics": ".validators",
        "validate_environment": ".validators",
        "validate_model_paths": ".validators",
    },
)
