"""Which model types transformers has, of what kind each is, and which class runs it."""

from __future__ import annotations

import functools
from typing import Literal, TypeAlias

from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES

__all__ = ["KINDS", "Kind", "class_name", "kind_of", "parts_of_others"]

Kind: TypeAlias = Literal["causal", "masked", "encoder_decoder", "vision", "audio", "multimodal"]

# Each kind with the tasks that tell it, as transformers names its tables of classes. The first task
# that lists a model type gives the kind and the class.
_TASKS: dict[Kind, tuple[str, ...]] = {
    "multimodal": (
        "MULTIMODAL_LM", "IMAGE_TEXT_TO_TEXT", "VISUAL_QUESTION_ANSWERING", "RETRIEVAL",
        "ZERO_SHOT_IMAGE_CLASSIFICATION", "ZERO_SHOT_OBJECT_DETECTION",
    ),
    "encoder_decoder": ("SEQ_TO_SEQ_CAUSAL_LM",),
    "masked": ("MASKED_LM",),
    "audio": (
        "SPEECH_SEQ_2_SEQ", "CTC", "RNNT", "TDT", "TEXT_TO_WAVEFORM", "TEXT_TO_SPECTROGRAM",
        "AUDIO_CLASSIFICATION", "AUDIO_FRAME_CLASSIFICATION", "AUDIO_XVECTOR",
    ),
    "causal": ("CAUSAL_LM",),
    "vision": (
        "IMAGE", "IMAGE_CLASSIFICATION", "OBJECT_DETECTION", "BACKBONE", "DEPTH_ESTIMATION",
        "VIDEO_CLASSIFICATION", "UNIVERSAL_SEGMENTATION", "SEMANTIC_SEGMENTATION",
        "MASK_GENERATION", "KEYPOINT_DETECTION", "KEYPOINT_MATCHING", "IMAGE_MATTING",
        "INSTANCE_SEGMENTATION", "TABLE_RECOGNITION", "TEXT_RECOGNITION", "POSE_ESTIMATION",
    ),
}  # fmt: skip
# Types whose kind the tasks do not tell: there is a base model alone, or the task is another's too.
_TOLD: dict[str, Kind] = {
    "aimv2": "multimodal", "audioflamingo3": "multimodal", "bridgetower": "multimodal",
    "canine": "masked", "clap": "multimodal", "clip_text_model": "causal",
    "groupvit": "multimodal", "layoutlmv2": "multimodal", "layoutlmv3": "multimodal",
    "lilt": "masked", "lxmert": "multimodal", "markuplm": "masked", "musicflamingo": "multimodal",
    "xclip": "multimodal",
}  # fmt: skip

KINDS: tuple[Kind, ...] = ("causal", "masked", "encoder_decoder", "vision", "audio", "multimodal")


def _classes(task: str) -> dict[str, str | tuple[str, ...]]:
    """The names of the classes for a task, by model type. Older releases lack some tasks."""
    name = "MODEL" if task == "" else f"MODEL_FOR_{task}"
    found: dict[str, str | tuple[str, ...]] = getattr(modeling_auto, f"{name}_MAPPING_NAMES", {})
    return found


@functools.cache
def _kind_and_class(model_type: str) -> tuple[Kind, str] | None:
    base = _classes("").get(model_type)
    if base and model_type in _TOLD:
        return _TOLD[model_type], _first(base)
    for kind, tasks in _TASKS.items():
        for task in tasks:
            if found := _classes(task).get(model_type):
                # The class for a task of images is the base model and a head that needs labels.
                return kind, _first(base if kind == "vision" and base else found)
    return None


def _first(names: str | tuple[str, ...]) -> str:
    return names if isinstance(names, str) else names[0]


def kind_of(model_type: str) -> Kind | None:
    """The kind of a model type; None: no task lists it."""
    found = _kind_and_class(model_type)
    return found and found[0]


def class_name(model_type: str) -> str:
    """The class of transformers that makes a model of a type."""
    found = _kind_and_class(model_type)
    assert found is not None, f"no task lists {model_type}"
    return found[1]


@functools.cache
def parts_of_others() -> dict[str, str]:
    """The types that are a part of another one and have no task, each with one that has it.

    They run whenever the model around them runs.
    """
    found: dict[str, str] = {}
    for model_type in CONFIG_MAPPING_NAMES:
        config = CONFIG_MAPPING[model_type]
        parts = getattr(config, "sub_configs_defaults", None) or getattr(config, "sub_configs", {})
        for part in parts.values():
            name = getattr(part, "model_type", None)
            if name and name != model_type and kind_of(name) is None:
                found.setdefault(name, model_type)
    return found
