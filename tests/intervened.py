"""Runs models of transformers, and tells what their layers return under interventions."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from llm_instrumentation import ActivationReader, InstrumentationConfig, capture_activations
from llm_instrumentation.interventions import Edit, apply, intervene
from torch import Tensor, nn

LAYER = "model.layers.0"  # of the llama
MLP = f"{LAYER}.mlp"

SIZES: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "pad_token_id": 0, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
SHARED = {**SIZES, "num_key_value_heads": 2}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
MODELS = {
    "Llama": SHARED, "Mistral": SHARED, "Qwen2": SHARED, "Gemma": {**SHARED, "head_dim": 12},
    "Qwen3": {**SHARED, "head_dim": 12}, "Gemma2": {**SHARED, "head_dim": 12}, "Olmo": SHARED,
    "Gemma3Text": {**SHARED, "head_dim": 12},
    **dict.fromkeys(
        ("Cohere", "Cohere2", "Exaone4", "Olmo2", "Olmo3", "Phi", "Starcoder2"), SHARED
    ),
    "Glm4": {**SHARED, "head_dim": 8}, "GPTJ": {**SIZES, "rotary_dim": 4},
    "FlexOlmo": {**SHARED, "num_experts": 4, "num_experts_per_tok": 2},
    "Olmoe": {**SHARED, "num_experts": 4, "num_experts_per_tok": 2},
    "Mixtral": {**SHARED, "num_local_experts": 4}, "Qwen2Moe": {**SHARED, **EXPERTS},
    "Qwen3Moe": {**SHARED, **EXPERTS, "head_dim": 12}, "GPT2": SIZES, "GPTNeoX": SIZES,
    "OPT": {**SIZES, "ffn_dim": 48, "word_embed_proj_dim": 32}, "Bert": SIZES, "Roberta": SIZES,
    "XLMRoberta": SIZES, "Electra": {**SIZES, "embedding_size": 32},
    "T5": {"vocab_size": 97, "d_model": 32, "d_kv": 12, "d_ff": 48, "num_layers": 2,
           "num_heads": 4, "decoder_start_token_id": 0, "eos_token_id": None, "pad_token_id": 0},
}  # fmt: skip


def inputs_of(architecture: str, ids: Tensor) -> dict[str, Tensor]:
    given = {"input_ids": ids}
    return given | {"decoder_input_ids": ids[:, :5]} if architecture == "t5" else given


def result(model: nn.Module, given: dict[str, Tensor] | Tensor) -> Tensor:
    with torch.no_grad():
        output: Any = model(given) if isinstance(given, Tensor) else model(**given)
    found: Tensor = output["logits"] if "logits" in output else output["last_hidden_state"]
    return found


def captured(model: nn.Module, given: Any, path: Path, exact: bool = True) -> ActivationReader:
    config = InstrumentationConfig.balanced().with_inputs()
    if exact:
        config = config.with_float32()
    with torch.no_grad(), capture_activations(model, path, config=config):
        result(model, given)
    return ActivationReader(path)


def seen_by(seen: list[Tensor]) -> Callable[[Tensor], Tensor]:
    """A function for `apply` that changes nothing."""

    def keep(values: Tensor) -> Tensor:
        seen.append(values.detach().clone())
        return values

    return keep


def output_of(model: nn.Module, layer: str, given: Any, *edits: Edit) -> Tensor:
    """What a layer returns, after edits."""
    seen: list[Tensor] = []
    with intervene(model, *edits, apply(layer, seen_by(seen))):
        result(model, given)
    return seen[-1]


def hooks(model: nn.Module) -> list[Any]:
    """All that hooks leave in a model, and the mode of its modules."""
    return [
        {name: dict(value) for name, value in vars(part).items() if "hooks" in name and value}
        | {"training": part.training, "own forward": "forward" in vars(part)}
        for part in model.modules()
    ]
