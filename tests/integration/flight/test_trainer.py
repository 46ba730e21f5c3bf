"""A training by the Trainer of transformers, in which a weight becomes NaN."""

from __future__ import annotations

import pytest
import torch
from llm_instrumentation import ActivationReader, InstrumentationConfig
from llm_instrumentation.analysis.blame import blame
from llm_instrumentation.errors import InvalidStateError
from llm_instrumentation.flight import flight_recorder, trainer_callback
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

pytest.importorskip("accelerate")

LAYER = "model.layers.1.mlp.down_proj"


class Spoils(TrainerCallback):
    """Puts NaN into a weight before a step of the training."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_begin(self, args, state, control, model: nn.Module, **others):
        if state.global_step == self.step:
            with torch.no_grad():
                model.get_submodule(LAYER).weight[3, 0] = torch.nan


def training(folder, steps: int, *callbacks: TrainerCallback) -> Trainer:
    """A Trainer of a small Llama."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
            vocab_size=50,
        )
    )  # fmt: skip
    ids = torch.randint(50, (24, 12))
    data = [{"input_ids": row, "labels": row} for row in ids]
    arguments = TrainingArguments(
        folder / "out", per_device_train_batch_size=2, max_steps=steps, use_cpu=True, report_to=[],
        save_strategy="no", logging_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    return Trainer(model, arguments, train_dataset=data, callbacks=[*callbacks])


def test_the_layer_and_the_step_are_found(tmp_path):
    trainer = training(tmp_path, 12, Spoils(9))
    config = InstrumentationConfig.balanced().with_gradients()
    with flight_recorder(
        trainer.model, tmp_path / "run", config=config, after=0, steps=5
    ) as recorder:
        trainer.train()
    (dump,) = recorder.dumps
    assert (dump.trigger.layer, dump.trigger.step, dump.trigger.value) == (LAYER, 9, "nan")
    with ActivationReader(dump.path) as reader:
        assert reader.steps == (5, 6, 7, 8, 9)
        assert {one.step for one in reader.select(f"{LAYER}!grad")} == {5, 6, 7, 8, 9}
    first = blame(dump.path).first
    assert (first.layer, first.step) == (LAYER, 9)


class Stops(TrainerCallback):
    """Raises in the training."""

    def on_step_begin(self, args, state, control, **others):
        raise InterruptedError


def test_the_callback_records_each_training(tmp_path):
    recording = trainer_callback(tmp_path / "run", after=0, memory_gb=0.05)
    assert recording.recorder is None
    trainer = training(tmp_path, 4, recording, Spoils(2))
    trainer.train()
    (dump,) = recording.recorder.dumps
    assert (dump.trigger.layer, dump.trigger.step, dump.trigger.value) == (LAYER, 2, "nan")
    with pytest.raises(InvalidStateError, match="not running"):
        recording.recorder.stats()
    trainer.add_callback(Stops())
    with pytest.raises(InterruptedError):
        trainer.train()
    left = recording.recorder
    assert left.stats().steps == 0  # it runs on
    trainer.remove_callback(Stops)
    trainer.train()
    assert recording.recorder is not left
    with pytest.raises(InvalidStateError, match="not running"):
        left.stats()
    with pytest.raises(TypeError, match="memory_mb"):
        trainer_callback(tmp_path / "run", memory_mb=2)
