"""The encoders of encoder-decoder models."""

from __future__ import annotations

from torch import nn

from ..tensors.modules import original_name

__all__ = ["encoder_of", "encoders_of"]


def encoder_of(model: nn.Module) -> nn.Module | None:
    """The encoder of an encoder-decoder model of transformers, or None."""
    if not getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        return None
    encoder = getattr(model, "get_encoder", lambda: None)()
    return encoder if isinstance(encoder, nn.Module) and encoder is not model else None


def encoders_of(label: str, model: nn.Module) -> dict[str, dict[str, list[str]]]:
    """The names of a model's encoder, for the calls file."""
    model = getattr(model, "_orig_mod", model)
    if (encoder := encoder_of(model)) is None:
        return {}
    names: dict[int, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        names.setdefault(id(module), []).append(original_name(name))
    own = {id(module) for module in encoder.modules()}
    within = tuple(f"{name}." for name in names[id(encoder)])
    shared = [
        name
        for module in own
        for name in names[module]
        if module != id(encoder) and any(not one.startswith(within) for one in names[module])
    ]
    return {label: {"modules": names[id(encoder)], "shared": sorted(shared)}}
