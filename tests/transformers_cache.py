"""Says what the installed transformers calls the cache in a model's arguments and output."""

from __future__ import annotations

import dataclasses

from transformers.modeling_outputs import CausalLMOutputWithPast

__all__ = ["CACHE_NAME"]

# Release 5.24 renamed it. Models still take the old name from their callers, with a warning.
CACHE_NAME = next(
    field.name
    for field in dataclasses.fields(CausalLMOutputWithPast)
    if field.name in ("cache", "past_key_values")
)
