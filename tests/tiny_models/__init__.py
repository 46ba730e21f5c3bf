"""Tiny models of all types of transformers, with random weights::

from tiny_models import MODEL_TYPES, make

tiny = make("llama")
tiny.model(**tiny.inputs(padding="left"))
"""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any

import transformers
from torch import nn
from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES

from .inputs import Padding, inputs_of, real_lengths
from .overrides import OVERRIDES
from .sizes import VOCABULARY, tiny_config
from .skipped import SKIPPED
from .types import KINDS, Kind, class_name, kind_of, parts_of_others
from .weights import seeded, spread

__all__ = [
    "KINDS",
    "MODEL_TYPES",
    "SKIPPED",
    "UNKNOWN",
    "VOCABULARY",
    "Kind",
    "Padding",
    "Tiny",
    "make",
    "parts_of_others",
    "real_lengths",
]  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Tiny:
    """A tiny model.

    Attributes:
        model_type: its type, as transformers names it.
        kind: what it reads, and how.
        model: the model, in eval mode, with float32 weights on the CPU.
    """

    model_type: str
    kind: Kind
    model: nn.Module

    def inputs(self, rows: int = 2, length: int = 9, padding: Padding = None) -> dict[str, Any]:
        """What to call the model with. Equal arguments give equal inputs.

        Args:
            rows: the size of the batch.
            length: the number of tokens of each text, with padding. A decoder gets 2 fewer.
            padding: "left" or "right": row n has `real_lengths` tokens, the first row `length`.
        """
        return inputs_of(self.model, self.kind, rows, length, padding)


def make(model_type: str, **fields: Any) -> Tiny:
    """A tiny model of a type, the same in each run.

    Args:
        model_type: one of `MODEL_TYPES`.
        fields: fields of its configuration to set beside those of `OVERRIDES`.
    """
    kind = kind_of(model_type)
    assert kind is not None, f"no task lists {model_type}"
    model_class = getattr(transformers, class_name(model_type))
    config = tiny_config(CONFIG_MAPPING[model_type], {**OVERRIDES.get(model_type, {}), **fields})
    with warnings.catch_warnings(), seeded(0):
        warnings.simplefilter("ignore")
        model = model_class(config).float().eval()
        spread(model, 0)
    return Tiny(model_type, kind, model)


# The types of each kind that can be made.
MODEL_TYPES: dict[Kind, tuple[str, ...]] = {
    kind: tuple(
        name for name in CONFIG_MAPPING_NAMES if kind_of(name) == kind and name not in SKIPPED
    )
    for kind in KINDS
}


def __getattr__(name: str) -> Any:
    """UNKNOWN: the types that are neither made, nor skipped, nor a part of one that is made.

    It is found when it is asked for, because that imports all configurations.
    """
    if name != "UNKNOWN":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return tuple(
        name
        for name in CONFIG_MAPPING_NAMES
        if kind_of(name) is None and name not in SKIPPED and name not in parts_of_others()
    )
