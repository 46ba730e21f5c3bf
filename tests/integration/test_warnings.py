"""A warning points to the line of the user's program that caused it, in whatever way it came."""

from __future__ import annotations

import contextlib
import threading
import warnings

import pytest
import torch
from llm_instrumentation import (
    InstrumentationConfig,
    InstrumentationFramework,
    capture_activations,
)
from torch import nn


def with_a_block(model, path):
    with capture_activations(model, path):
        pass


def with_a_framework(model, path):
    framework = InstrumentationFramework(InstrumentationConfig.balanced())
    framework.instrument_model(model)
    with framework.capture_activations(path):
        pass


def by_hand(model, path):
    block = capture_activations(model, path)
    block.__enter__()
    block.__exit__(None, None, None)


def in_a_stack(model, path):
    with contextlib.ExitStack() as stack:
        stack.enter_context(capture_activations(model, path))


def as_a_decorator(model, path):
    @capture_activations(model, path)
    def work():
        pass

    work()


def in_a_thread(model, path):
    thread = threading.Thread(target=with_a_block, args=(model, path))
    thread.start()
    thread.join()


@pytest.mark.parametrize(
    "captured", [with_a_block, with_a_framework, by_hand, in_a_stack, as_a_decorator, in_a_thread]
)
def test_warnings_of_the_beginning_and_of_the_end(captured, path):
    """Both point to this file, in whatever way the block is entered."""
    model = nn.Sequential(nn.Linear(2, 2))
    model.compile(backend="eager")  # a model of torch's own class runs eagerly then
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        captured(model, path)
    begin, end = told
    assert "the model is compiled" in str(begin.message)
    assert "no module ran in the block" in str(end.message)
    assert {begin.filename, end.filename} == {__file__}


class Nowhere(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.to("meta")


def test_a_warning_of_a_hook_points_to_the_call_of_the_model(path):
    model = Nowhere()
    with pytest.warns(RuntimeWarning, match="is not captured") as told:
        with capture_activations(model, path):
            model(torch.ones(2))
    assert {warning.filename for warning in told} == {__file__}


def record_by_hand(tracker):
    tracker.record_token(1, "a")


def stream(tracker):
    streamer = tracker.streamer()
    streamer.put([[1]])
    streamer.put([2])


@pytest.mark.parametrize("record", [record_by_hand, stream])
def test_a_warning_of_a_checkpoint_points_to_the_token(record, path):
    framework = InstrumentationFramework(InstrumentationConfig.balanced())
    framework.instrument_model(nn.Linear(2, 2))
    tokens = {"track_per_token": True, "checkpoint_interval_tokens": 1}
    with framework.capture_activations(path, **tokens) as tracker:
        tracker.on_checkpoint = lambda: 1 // 0
        with pytest.warns(RuntimeWarning, match="checkpoint after 1 tokens failed") as told:
            record(tracker)
        framework._models[0](torch.ones(2))
    assert [warning.filename for warning in told] == [__file__]
