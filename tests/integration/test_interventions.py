"""Interventions on models of transformers, beside the same results reached another way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from llm_instrumentation import ActivationReader, InstrumentationConfig, capture_activations
from llm_instrumentation.interventions import intervene, replace
from torch import Tensor, nn


def inputs_of(architecture: str, ids: Tensor) -> dict[str, Tensor]:
    given = {"input_ids": ids}
    return given | {"decoder_input_ids": ids[:, :5]} if architecture == "t5" else given


def result(model: nn.Module, given: dict[str, Tensor]) -> Tensor:
    with torch.no_grad():
        output: Any = model(**given)
    found: Tensor = output["logits"] if "logits" in output else output["last_hidden_state"]
    return found


def captured(model: nn.Module, given: dict[str, Tensor], path: Path) -> ActivationReader:
    config = InstrumentationConfig.balanced().with_float32().with_inputs()
    with torch.no_grad(), capture_activations(model, path, config=config):
        model(**given)
    return ActivationReader(path)


def hooks(model: nn.Module) -> list[Any]:
    """All that hooks leave in a model."""
    return [
        {name: dict(value) for name, value in vars(part).items() if "hooks" in name and value}
        for part in model.modules()
    ]


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "bert", "mixtral", "t5"])
def test_the_clean_value_of_each_layer_changes_no_bit(build, ids, tmp_path, architecture):
    model, given = build(architecture), inputs_of(architecture, ids)
    clean, before = result(model, given), hooks(model)
    with captured(model, given, tmp_path / "clean.stream") as reader:
        assert len(reader.layers) > 60
        for layer in reader.layers:
            with intervene(model, replace(layer, reader)) as applied:
                patched = result(model, given)
            assert torch.equal(patched, clean), layer
            assert applied.counts == [len(reader[layer])], layer
    assert hooks(model) == before
