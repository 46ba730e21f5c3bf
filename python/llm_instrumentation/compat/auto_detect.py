"""Chooses a configuration by a model's architecture and a purpose."""

from __future__ import annotations

from typing import Any, Literal

from ..core.config import InstrumentationConfig

__all__ = ["Purpose", "create_optimized_config", "detect_model_architecture"]

Purpose = Literal["interpretability", "debugging", "performance_analysis", "full_capture"]

_FAMILIES = ("gpt", "llama", "qwen", "bert")
# A model type belongs to a family if it contains the family's name, such as gpt_neox or qwen3_moe.
# Mistral's models have Llama's architecture.
_LARGE = ("gpt", "llama", "qwen", "mistral", "mixtral")


def detect_model_architecture(model: Any) -> str:
    """The architecture of `model` in lower case.

    It is `model.config.model_type` if there is one. Otherwise it is the family (gpt, llama, qwen or
    bert) whose name occurs in the first of `model.config.architectures`, or else in the name of the
    model's class. Otherwise it is "unknown".
    """
    config = getattr(model, "config", None)
    model_type = getattr(config, "model_type", None)
    if model_type:
        return str(model_type).lower()
    architectures = getattr(config, "architectures", None) or ()
    for name in (*map(str, architectures[:1]), type(model).__name__):
        for family in _FAMILIES:
            if family in name.lower():
                return family
    return "unknown"


def create_optimized_config(model_arch: str, purpose: Purpose | str) -> InstrumentationConfig:
    """Chooses a preset for a purpose.

    - "interpretability": the preset attention_analysis.
    - "debugging": the preset fast_capture.
    - "performance_analysis": the preset balanced; with zstd and 16 GB of staging memory if the
        architecture is of the families gpt, llama, qwen, mistral or mixtral.
    - "full_capture" and every other purpose: the preset balanced.

    Args:
        model_arch: the result of :func:`detect_model_architecture`, or a ``model_type`` such as
            "gpt_neox". It belongs to a family if it contains the family's name.
        purpose: see above.
    """
    if purpose == "interpretability":
        return InstrumentationConfig.attention_analysis()
    if purpose == "debugging":
        return InstrumentationConfig.fast_capture()
    config = InstrumentationConfig.balanced()
    large = any(family in model_arch.lower() for family in _LARGE)
    if purpose == "performance_analysis" and large:
        config.with_compression("zstd").with_memory_limit(16)
    return config
