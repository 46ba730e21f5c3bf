"""What the rules of `sizes` do not get right: fields of configurations, by model type."""

from __future__ import annotations

from typing import Any

__all__ = ["OVERRIDES"]

_LINEAR_AND_FULL = ["linear_attention", "full_attention"]
_ROTARY = {"rope_type": "default", "rope_theta": 10000.0}

OVERRIDES: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1], "mamba_n_heads": 8, "mamba_d_state": 16},
    "codegen": {"rotary_dim": 4},
    "cohere_compass_text": {"layer_types": ["sliding_attention", "full_attention"],
                            "rope_parameters": {"sliding_attention": _ROTARY,
                                                "full_attention": _ROTARY}},
    "dbrx": {"rope_parameters": _ROTARY},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dory": {"n_input_layers": 1, "n_output_layers": 1, "num_hidden_layers": 3,
             "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "esm": {"pad_token_id": 1, "mask_token_id": 32},
    "gemma3n_text": {"num_kv_shared_layers": 0},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 6},
    "gptj": {"rotary_dim": 4},
    "granitemoehybrid": {"layer_types": _LINEAR_AND_FULL, "mamba_n_heads": 8},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2,
              "expert_layer_offset": 1},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "lilt": {"hidden_size": 48, "channel_shrink_ratio": 4},
    "mamba2": {"num_heads": 8, "n_groups": 2},
    "mimo_v2_flash": {"rope_parameters": {kind: {**_ROTARY, "partial_rotary_factor": 0.5}
                      for kind in ("sliding_attention", "full_attention")}},
    "nemotron": {"num_key_value_heads": 2},
    "nemotron_h": {"n_groups": 2, "mamba_num_heads": 8},
    "recurrent_gemma": {"block_types": ["recurrent", "attention"], "lru_width": 32},
    "reformer": {"axial_pos_embds": False, "attn_layers": ["local", "lsh"],
                 "local_attn_chunk_length": 4, "lsh_attn_chunk_length": 4, "num_buckets": 2,
                 "attention_head_size": 8},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"layers_block_type": ["linear_attention", "hybrid"]},
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid"]},
}  # fmt: skip
