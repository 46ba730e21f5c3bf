"""Interventions that put values of a capture into a model."""

from __future__ import annotations

import copy

import pytest
import torch
from intervened import LAYER, MLP, captured, hooks, inputs_of, output_of, result
from llm_instrumentation import ActivationReader, InstrumentationConfig, capture_activations
from llm_instrumentation.analysis.reader import UnknownActivationError
from llm_instrumentation.errors import InvalidArgumentError
from llm_instrumentation.interventions import Site, intervene, replace


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


def test_the_clean_value_of_a_trained_model_restores_its_result(minilm, tmp_path):
    model, given = minilm.model, minilm.inputs
    clean = result(model, given)
    corrupted = {**given, "input_ids": given["input_ids"].flip(0)}
    assert not torch.equal(result(model, corrupted), clean)
    with captured(model, given, tmp_path / "clean.stream") as reader:
        for layer in ("embeddings", "encoder.layer.2", "encoder.layer.5"):
            with intervene(model, replace(layer, reader)):
                patched = result(model, {**corrupted})
            assert torch.equal(patched, clean), layer


def test_values_of_a_capture_are_a_reader_a_view_or_an_activation(llama, ids, clean, tmp_path):
    other = ids.flip(1)
    with captured(llama, ids, tmp_path / "clean.stream") as reader:
        one = reader[LAYER][0]
        for values in (reader, reader.select("model.layers.*"), one, one.to_torch()):
            with intervene(llama, replace(LAYER, values)):
                assert torch.equal(result(llama, other), clean)
        with intervene(llama, replace(LAYER, reader, positions=-1)):
            patched = output_of(llama, LAYER, other)
        expected = output_of(llama, LAYER, other)
        expected[:, -1] = one.to_torch()[:, -1]
        assert torch.equal(patched, expected)


def test_a_capture_in_float16_is_put_back_as_float32(llama, ids, clean, tmp_path):
    with captured(llama, ids, tmp_path / "clean.stream", exact=False) as reader:
        assert reader[LAYER][0].dtype == "float16"
        found = output_of(llama, LAYER, ids, replace(LAYER, reader))
        assert torch.equal(found, reader[LAYER][0].to_torch().float())


def test_the_tensors_of_a_step_and_call_are_taken(llama, ids, tmp_path):
    config = InstrumentationConfig.balanced().with_float32()
    batches, copied = [ids, ids.flip(0), ids.flip(1)], copy.deepcopy(llama)
    with capture_activations(llama, tmp_path / "a.stream", config=config):
        for batch in batches:
            result(llama, batch)
    with ActivationReader(tmp_path / "a.stream") as reader:
        with intervene(llama, replace(LAYER, reader, first_step=1)) as applied:
            for batch in batches[1:]:
                assert torch.equal(result(llama, ids), result(copied, batch))
            with pytest.raises(InvalidArgumentError, match="no activations .* of step 3, call 0"):
                result(llama, ids)
        assert (applied.counts, applied.steps) == ([2], 3)


def test_captured_inputs_need_a_capture_of_inputs(llama, ids, tmp_path):
    with capture_activations(llama, tmp_path / "a.stream"):
        result(llama, ids)
    with ActivationReader(tmp_path / "a.stream") as reader:
        site = Site(f"{LAYER}.self_attn", head=0)
        with intervene(llama, replace(site, reader), unused="ignore"):
            with pytest.raises(UnknownActivationError, match="with_inputs"):
                result(llama, ids)
        with intervene(llama, replace(MLP, reader.select("*.norm")), unused="ignore"):
            with pytest.raises(UnknownActivationError, match="no activation named"):
                result(llama, ids)


def test_parts_of_tensors_are_not_put_back(llama, ids, tmp_path):
    config = InstrumentationConfig.balanced().with_last_position()
    with capture_activations(llama, tmp_path / "a.stream", config=config):
        result(llama, ids)
    with ActivationReader(tmp_path / "a.stream") as reader:
        with intervene(llama, replace(LAYER, reader), unused="ignore"):
            with pytest.raises(InvalidArgumentError, match="last_position of a tensor"):
                result(llama, ids)
