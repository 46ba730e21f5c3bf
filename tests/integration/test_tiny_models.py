"""Each model type of transformers is made, or skipped for a stated reason."""

from __future__ import annotations

import time

import pytest
import tiny_models
import torch
from tiny_models import MODEL_TYPES, SKIPPED, Tiny, make, parts_of_others
from torch import Tensor
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

NAMES = [name for names in MODEL_TYPES.values() for name in names]
SECONDS = 2.0


def test_every_type_is_made_or_skipped_or_a_part():
    assert tiny_models.UNKNOWN == (), "new types: make them, or list them in tiny_models/skipped.py"
    assert set(CONFIG_MAPPING_NAMES) <= {*NAMES, *SKIPPED, *parts_of_others()}
    assert len(NAMES) >= 150


def test_a_skipped_type_is_no_part_of_another():
    assert not SKIPPED.keys() & parts_of_others().keys()


def timed(model_type: str) -> tuple[float, Tiny]:
    began = time.thread_time()
    tiny = make(model_type)
    return time.thread_time() - began, tiny


@pytest.mark.slow
@pytest.mark.parametrize("model_type", NAMES)
def test_a_type_is_made_and_runs(model_type):
    took, tiny = timed(model_type)
    if took > SECONDS:  # the first time it imports modules
        took, tiny = timed(model_type)
    assert took < SECONDS
    for padding in (None, "left", "right"):
        with torch.no_grad():
            output = tiny.model(**tiny.inputs(padding=padding))
        tensors = [value for value in output.values() if isinstance(value, Tensor)]
        assert all(bool(value.isfinite().all()) for value in tensors)
