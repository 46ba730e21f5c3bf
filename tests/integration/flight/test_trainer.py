"""A training by the Trainer of transformers, in which a weight becomes NaN."""

from __future__ import annotations

import pytest
import torch
from llm_instrumentation import ActivationReader, InstrumentationConfig
from llm_instrumentation.analysis.blame import blame
from llm_instrumentation.flight import flight_recorder
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


def test_the_layer_and_the_step_are_found(tmp_path):
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
            vocab_size=50,
        )
    )  # fmt: skip
    ids = torch.randint(50, (24, 12))
    data = [{"input_ids": row, "labels": row} for row in ids]
    config = InstrumentationConfig.balanced().with_gradients()
    arguments = TrainingArguments(
        tmp_path / "out", per_device_train_batch_size=2, max_steps=12, use_cpu=True, report_to=[],
        save_strategy="no", logging_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    trainer = Trainer(model, arguments, train_dataset=data, callbacks=[Spoils(9)])
    with flight_recorder(model, tmp_path / "run", config=config, after=0, steps=5) as recorder:
        trainer.train()
    (dump,) = recorder.dumps
    assert (dump.trigger.layer, dump.trigger.step, dump.trigger.value) == (LAYER, 9, "nan")
    with ActivationReader(dump.path) as reader:
        assert reader.steps == (5, 6, 7, 8, 9)
        assert {one.step for one in reader.select(f"{LAYER}!grad")} == {5, 6, 7, 8, 9}
    first = blame(dump.path).first
    assert (first.layer, first.step) == (LAYER, 9)
