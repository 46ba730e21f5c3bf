"""Sensible configurations from a model and a purpose."""

from __future__ import annotations

from typing import Any, Literal

from .config import InstrumentationConfig

__all__ = ["Purpose", "create_optimized_config", "detect_model_architecture"]

Purpose = Literal["interpretability", "debugging", "performance_analysis", "full_capture"]

_FAMILIES = ("gpt", "llama", "qwen", "bert")
# gpt2, gpt_neox, llama4, qwen3_moe and the like count as their family; Mistral's models are
# of Llama's architecture.
_LARGE = ("gpt", "llama", "qwen", "mistral", "mixtral")


def detect_model_architecture(model: Any) -> str:
    """The architecture of `model` in lower case.

    It is `model.config.model_type` where there is one; else the first of gpt, llama, qwen and
    bert that occurs in the first of `model.config.architectures`, or in the name of the model's
    class; else "unknown".
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
    """A configuration for `purpose`.

    "interpretability" is the attention_analysis preset, "debugging" fast_capture,
    "performance_analysis" balanced, and for decoders of the families of gpt, llama and qwen with
    zstd and 16 GB; "full_capture" and anything else is balanced.

    Args:
        model_arch: of :func:`detect_model_architecture`, or a ``model_type``: "gpt2", "gpt_neox",
            "llama4", "qwen3_moe" and "mistral" count as their family.
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
