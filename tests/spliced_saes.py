"""Autoencoders of SAELens with random weights, on disk, and a language model for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

WIDTH, FEATURES = 16, 24
# The name of an architecture of SAELens, and fields of its configuration.
AUTOENCODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "standard": ("standard", {}),
    "without b_dec at the input": ("standard", {"apply_b_dec_to_input": False}),
    "jumprelu": ("jumprelu", {}),
    "gated": ("gated", {}),
    "topk": ("topk", {"k": 4, "rescale_acts_by_decoder_norm": True}),
    "abstopk": ("abstopk", {"k": 4}),
    "matching pursuit": ("matching_pursuit", {"max_iterations": 4}),
    "layer norm": ("standard", {"normalize_activations": "layer_norm"}),
    "norm": ("standard", {"normalize_activations": "constant_norm_rescale"}),
}
TRANSCODERS = {
    name: (name, {"d_out": WIDTH, "apply_b_dec_to_input": False})
    for name in (
        "transcoder", "skip_transcoder", "jumprelu_transcoder", "jumprelu_skip_transcoder",
    )
}  # fmt: skip
# Architectures of training only, which SAELens saves as others.
TRAINED: dict[str, dict[str, Any]] = {
    "batchtopk": {"k": 4},
    "matryoshka_batchtopk": {"k": 4, "matryoshka_widths": [8, FEATURES]},
}


def randomized(sae: Any, seed: int) -> Any:
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in sae.named_parameters():
        values = torch.randn(parameter.shape, generator=generator) * 0.3
        parameter.data.copy_(values.abs() if name == "threshold" else values)
    if "matching" in sae.cfg.architecture():  # its features are unit vectors
        sae.W_dec.data /= sae.W_dec.data.norm(dim=-1, keepdim=True)
    return sae


def made(architecture: str, seed: int = 0, **fields: Any) -> Any:
    """An autoencoder or transcoder of SAELens."""
    from sae_lens import registry
    from sae_lens.saes.sae import SAEMetadata

    kind, config = registry.get_sae_class(architecture)
    metadata = SAEMetadata(**fields.pop("metadata", {}))
    given = {"d_in": WIDTH, "d_sae": FEATURES, **fields}
    return randomized(kind(config(metadata=metadata, **given)), seed).eval()


def trained(architecture: str, folder: Path, **fields: Any) -> None:
    """Saves an autoencoder of a training architecture as SAELens' trainer does."""
    from sae_lens import registry

    kind, config = registry.get_sae_training_class(architecture)
    sae = randomized(kind(config(d_in=WIDTH, d_sae=FEATURES, **fields)), 0)
    sae.topk_threshold.fill_(0.5)
    sae.save_inference_model(folder)


def language_model(kind: str = "GPT2", **fields: Any) -> nn.Module:
    """A causal language model of transformers with random weights, WIDTH wide."""
    import transformers

    sizes: dict[str, Any] = {
        "vocab_size": 60, "hidden_size": WIDTH, "intermediate_size": 32, "num_hidden_layers": 2,
        "num_attention_heads": 2, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
        **({"head_dim": 8} if kind != "GPT2" else {}), **fields,
    }  # fmt: skip
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**sizes)
    suffix = "LMHeadModel" if kind == "GPT2" else "ForCausalLM"
    model: nn.Module = getattr(transformers, f"{kind}{suffix}")(config).eval()
    return model
