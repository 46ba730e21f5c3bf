"""Tiny configurations: each field shrunk by what its name says."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from typing import Any

from transformers import PretrainedConfig

__all__ = ["FIRST_SPECIAL", "VOCABULARY", "tiny_config"]

VOCABULARY = 128
FIRST_SPECIAL = 100  # ids from here on are special tokens of a model

_HIDDEN = (
    r"hidden_size|hidden_dim|d_model|n_embd|embed_dim|embedding_size|embedding_dim|emb_dim|dim|"
    r"proj_dim|projection_dim|project_dim|output_dim|feature_size|output_channels|query_dim|"
    r"embed_size|reduce_dim"
)
_INNER = (
    r"intermediate_size|intermediate_dim|ffn_dim|mlp_dim|d_ff|dff|d_inner|n_inner|dim_ff|"
    r"linear_units|ffn_hidden_size|feedforward_dim|dim_feedforward|mlp_hidden_size|"
    r"intermediate_size_mlp"
)
# Numbers: the largest value of a field, by its name. The first pattern that fits counts.
_AT_MOST: tuple[tuple[str, int], ...] = (
    (r"(.*_)?vocab_size(_per_layer_input)?", VOCABULARY),
    (rf".*(moe|expert).*_({_INNER})|({_INNER})_moe", 24),
    (rf"(.*_)?({_INNER})", 48),
    (r"(.*_)?(head_dim|d_kv|d_head|dim_head|kv_channels|head_size)", 8),
    (rf"(.*_)?({_HIDDEN})|hidden_size_.*", 32),
    (r"(.*_)?lora_rank", 16),
    (r"(.*_)?(num_|n_)(routed_|local_)?experts|moe_num_experts", 4),
    (r"n_group|num_expert_groups|index_n_heads|(?!index_)(.*_)?(per_tok|topk|top_k|moe_k)", 2),
    (r"topk_group|first_k_dense_replace|num_dense_layers", 1),
    (r"(.*_)?(layers?|depth|num_blocks)", 2),
    (r"(.*_)?heads?", 4),
    (r"max_.*position_embeddings|n_positions|n_ctx|max_seq_len|max_(source|target)_positions|"
     r"context_length|max_sequence_length", 64),
    (r"sliding_window(_size)?|attention_chunk_size|index_topk", 6),
    (r"(mamba_)?chunk_size", 8),  # texts are padded to it
    (r"(.*_)?image_size|img_size|resolution", 64),
    (r"patch_size", 16),
)  # fmt: skip
# Lists of numbers: the value of each entry, and of the first one.
_ENTRIES: tuple[tuple[str, int, int], ...] = (
    (r"(.*_)?depths|layers|num_blocks|stage_num_blocks", 1, 1),
    (r"(.*_)?(hidden_sizes|embed_dims?|dims|conv_dim|embedding_sizes?|channels)", 32, 16),
    (r"(.*_)?heads", 2, 2),
)
_SPECIAL = re.compile(r".*(token_id|token_index|_token)|im_.*_id|image_patch_id")
_KEY_VALUE_HEADS = re.compile(r"(.*_)?(num_key_value_heads|num_kv_heads|n_head_kv)")


def tiny_config(
    config_class: type[PretrainedConfig], overrides: Mapping[str, Any]
) -> PretrainedConfig:
    """A configuration of a class with small sizes.

    Args:
        config_class: the class.
        overrides: fields that the rules do not get right; for a part, as ``text_config``, a
            dictionary of its fields.
    """
    return config_class(**_tiny_fields(config_class(), overrides, {}))


def _tiny_fields(
    default: PretrainedConfig, overrides: Mapping[str, Any], specials: dict[str, int]
) -> dict[str, Any]:
    """What to give to the class of a configuration with the default sizes."""
    found: dict[str, Any] = {}
    for name, in_class in _fields(type(default)).items():
        value = _value(default, name, in_class)
        override = overrides.get(name)
        if isinstance(value, PretrainedConfig) and (name not in overrides or override):
            part = _tiny_fields(value, override or {}, specials)
            found[name] = {"model_type": value.model_type, **part}
        elif name in overrides:
            found[name] = override
        elif _SPECIAL.fullmatch(name):
            if isinstance(value, int) and value >= FIRST_SPECIAL:
                found[name] = specials.setdefault(name, FIRST_SPECIAL + len(specials))
        elif name == "head_dim" and in_class is None:
            found[name] = 8
        elif name == "vocab_size" and in_class is None:
            found[name] = VOCABULARY
        else:
            tiny = _tiny(name, in_class)
            if tiny != in_class:
                found[name] = tiny
    _keep_grouping(found, default)
    _each_type_of_layer_once(found, default, overrides)
    _shrink_rotary(found, default, overrides)
    return {**found, **{k: v for k, v in overrides.items() if k not in found}}


def _fields(config_class: type[PretrainedConfig]) -> dict[str, Any]:
    """The arguments of a class with their defaults."""
    given = inspect.signature(config_class.__init__).parameters.values()
    return {
        one.name: None if one.default is one.empty else one.default
        for one in given
        if one.name != "self" and one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)
    }


def _value(config: PretrainedConfig, name: str, in_class: Any) -> Any:
    """The value of a field; its default if the configuration has one for each layer."""
    try:
        return getattr(config, name, in_class)
    except Exception:
        return in_class


def _tiny(name: str, value: Any) -> Any:
    if isinstance(value, int) and not isinstance(value, bool):
        return next((min(value, most) for of, most in _AT_MOST if re.fullmatch(of, name)), value)
    if isinstance(value, (list, tuple)) and value and {type(one) for one in value} == {int}:
        for of, entry, first in _ENTRIES:
            if re.fullmatch(of, name):
                return type(value)([first, *[entry] * (len(value) - 1)])
    return value


def _keep_grouping(found: dict[str, Any], default: PretrainedConfig) -> None:
    """Half as many heads of keys as of queries, where the default has fewer."""
    heads = _value(default, "num_attention_heads", None)
    for name in [name for name in found if _KEY_VALUE_HEADS.fullmatch(name)]:
        of_keys = _value(default, name, heads)
        fewer = isinstance(heads, int) and isinstance(of_keys, int) and of_keys < heads
        found[name] = min(found[name], 2) if fewer else found[name]


def _each_type_of_layer_once(
    found: dict[str, Any], default: PretrainedConfig, overrides: Mapping[str, Any]
) -> None:
    """As many layers as there are types of layers, at least 2."""
    types = _value(default, "layer_types", None)
    if not isinstance(types, (list, tuple)) or "num_hidden_layers" in overrides:
        return
    distinct = list(dict.fromkeys(types))
    if (
        "layer_types" not in overrides
        and "layer_types" in _fields(type(default))
        and len(distinct) > 1
    ):
        found["layer_types"] = distinct
        found["num_hidden_layers"] = len(distinct)


def _shrink_rotary(
    found: dict[str, Any], default: PretrainedConfig, overrides: Mapping[str, Any]
) -> None:
    """The sections of rotary embeddings for images, for heads of width 8."""
    rotary = _value(default, "rope_parameters", None)
    if (
        "rope_parameters" in overrides
        or not isinstance(rotary, dict)
        or "mrope_section" not in rotary
    ):
        return
    sections = rotary["mrope_section"]
    tiny = [1, 1, 2] if len(sections) == 3 else [4 // len(sections)] * len(sections)
    if "rope_parameters" not in overrides:
        found["rope_parameters"] = {**rotary, "mrope_section": tiny}
