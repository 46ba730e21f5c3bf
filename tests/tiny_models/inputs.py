"""Inputs of models: made of what their ``forward`` takes."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .types import Kind

__all__ = ["Padding", "inputs_of", "real_lengths"]

Padding = str | None
# Ids of texts: no special token of a tiny model lies between these.
_FIRST, _LAST = 30, 60


def real_lengths(rows: int, length: int) -> list[int]:
    """How many tokens of each row are real where there is padding: the first row has no padding."""
    return [max(1, length - 3 * row) for row in range(rows)]


def inputs_of(
    model: nn.Module, kind: Kind, rows: int, length: int, padding: Padding
) -> dict[str, Any]:
    """What to call a model with.

    Args:
        model: the model.
        kind: its kind.
        rows: the size of the batch.
        length: the number of tokens of each text, with padding.
        padding: "left" or "right": all texts but the first are padded. None: none is.
    """
    asked = inspect.signature(model.forward).parameters
    random = torch.Generator().manual_seed(1)
    found: dict[str, Any] = {}
    config: Any = model.config
    if "input_ids" in asked:
        ids = torch.randint(_FIRST, _LAST, (rows, length), generator=random)
        mask = _mask(rows, length, padding)
        found["input_ids"] = torch.where(mask, ids, _padding_id(config))
        if "attention_mask" in asked:
            found["attention_mask"] = mask.long()
        if "bbox" in asked:
            found["bbox"] = torch.zeros(rows, length, 4, dtype=torch.long)
    if "decoder_input_ids" in asked and getattr(config, "is_encoder_decoder", False):
        found["decoder_input_ids"] = torch.randint(
            _FIRST, _LAST, (rows, length - 2), generator=random
        )
    for name, make in _OTHERS.items():
        if name in asked and (value := make(model, kind, rows, random)) is not None:
            found[name] = value
    return found


def _mask(rows: int, length: int, padding: Padding) -> Tensor:
    places = torch.arange(length)
    lengths = torch.tensor(real_lengths(rows, length))[:, None]
    if padding is None:
        return torch.ones(rows, length, dtype=torch.bool)
    return places >= length - lengths if padding == "left" else places < lengths


def _padding_id(config: Any) -> int:
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    found = getattr(text, "pad_token_id", None)
    return found if isinstance(found, int) and found >= 0 else 0


def _pixels(model: nn.Module, kind: Kind, rows: int, random: torch.Generator) -> Tensor | None:
    config: Any = model.config
    if kind != "vision" and not _reads_image(model):
        return None
    vision = getattr(config, "vision_config", None) or config
    size = getattr(vision, "image_size", None) or 64
    height, width = size if isinstance(size, (list, tuple)) else (size, size)
    channels = getattr(vision, "num_channels", None) or 3
    return torch.randn(rows, channels, height, width, generator=random)


def _reads_image(model: nn.Module) -> bool:
    """Whether a model of texts and images needs an image in each call."""
    from transformers.models.auto import modeling_auto

    needs = {
        *modeling_auto.MODEL_FOR_ZERO_SHOT_IMAGE_CLASSIFICATION_MAPPING_NAMES,
        *modeling_auto.MODEL_FOR_ZERO_SHOT_OBJECT_DETECTION_MAPPING_NAMES,
        *modeling_auto.MODEL_FOR_VISUAL_QUESTION_ANSWERING_MAPPING_NAMES,
        "aimv2",
        "bridgetower",
        "groupvit",
        "kosmos-2",
        "idefics",
    }
    return model.config.model_type in needs


def _sound(model: nn.Module, kind: Kind, rows: int, random: torch.Generator) -> Tensor | None:
    return None if kind != "audio" else torch.randn(rows, 800, generator=random)


def _spectrum(model: nn.Module, kind: Kind, rows: int, random: torch.Generator) -> Tensor | None:
    if kind != "audio":
        return None
    config: Any = model.config
    return torch.randn(rows, getattr(config, "num_mel_bins", 80), 64, generator=random)


_OTHERS: dict[str, Callable[[nn.Module, Kind, int, torch.Generator], Tensor | None]] = {
    "pixel_values": _pixels,
    "input_values": _sound,
    "input_features": _spectrum,
}
