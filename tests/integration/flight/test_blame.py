"""The first tensor of a capture that went wrong is found, and the ranges of the layers are told."""

from __future__ import annotations

import contextlib
import json
import math
import random
import re
import warnings

import pytest
import torch
from llm_instrumentation import InstrumentationConfig, capture_activations, for_request
from llm_instrumentation.analysis.blame import blame
from llm_instrumentation.cli.strap import STRAP
from llm_instrumentation.errors import InvalidArgumentError, NotFoundError
from llm_instrumentation.flight import flight_recorder
from llm_instrumentation.report import render_report
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM


@pytest.fixture
def model():
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)))


@pytest.fixture
def strap(capsys, monkeypatch):
    """Runs the command in this process, and returns its output."""
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)  # which the command sets

    def run(*arguments):
        assert STRAP.run("strap", [str(argument) for argument in arguments]) == 0
        return capsys.readouterr().out

    return run


def shown(page):
    """What a page says, without its tags."""
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", page))


def capture(model, path, batches, dtype=None):
    config = InstrumentationConfig.fast_capture()
    if dtype is None:
        config = config.with_float32()
    with torch.no_grad(), capture_activations(model, path, config=config):
        for number, batch in enumerate(batches):
            with for_request(f"request {number}"):
                model(batch)
    return path


@pytest.mark.parametrize("seed", range(6))
def test_the_first_value_that_is_not_finite(model, tmp_path, seed):
    rng = random.Random(seed)
    layer, step, element = rng.randrange(4), rng.randrange(1, 6), rng.randrange(5 * 8)
    value = rng.choice([math.nan, math.inf, -math.inf])
    steps = iter(range(6))
    current = [-1]

    def plant(module, args, output):
        if current[0] == step:
            output.view(-1)[element] = value

    model.register_forward_pre_hook(lambda *_: current.__setitem__(0, next(steps)))
    model[layer][0].register_forward_hook(plant)
    path = capture(model, tmp_path / "run.stream", [torch.randn(5, 8) for _ in range(6)])
    found = blame(path)
    first = found.first
    assert (first.layer, first.step, first.element, first.elements) == (
        f"{layer}.0", step, element, 40,
    )  # fmt: skip
    assert first.request == f"request {step}" and first.times is None and first.not_finite == 1
    assert first.value == value or (math.isnan(value) and math.isnan(first.value))
    ranges = {one.name: one for one in found.layers}
    assert found.steps == 6 and len(ranges) == 13
    for name, one in ranges.items():
        assert one.tensors == 6 and 0 < one.usual <= one.largest < 10, name
        before = name.split(".")[0] < str(layer) and name != ""
        if before:
            assert one.first_bad_step is None and one.not_finite == 0
    assert ranges[f"{layer}.0"].first_bad_step == step


def test_an_outlier_where_all_values_are_finite(model, tmp_path):
    batches = [torch.randn(5, 8) for _ in range(6)]
    batches[4][2, 3] = 30000.0
    path = capture(model, tmp_path / "run.stream", batches)
    first = blame(path).first
    assert (first.layer, first.step, first.not_finite) == ("0.0", 4, 0)
    assert first.times > 1000 and abs(first.value) > 1000
    assert blame(path, times=1e9).first is None
    assert blame(path, steps=1).first is None  # nothing before it says what is usual
    assert blame(path, steps=1).steps == 1


def test_values_beyond_float16_are_finite(tmp_path):
    class Large(nn.Module):
        def forward(self, x):
            return x * 1e6

    path = capture(Large(), tmp_path / "run.stream", [torch.ones(2, 3)] * 4, torch.float16)
    found = blame(path)
    assert found.first is None and found.layers[0].largest == 1e6


def test_a_dump_of_a_flight_recorder(model, tmp_path, strap):
    with torch.no_grad(), flight_recorder(model, tmp_path / "run") as recorder:
        for _ in range(5):
            model(torch.randn(5, 8))
        model[2][0].weight[1, 1] = torch.nan
        with for_request("the bad one"):
            model(torch.randn(5, 8))
    (dump,) = recorder.dumps
    first = blame(dump.path).first
    assert (first.layer, first.step, first.element) == (
        dump.trigger.layer, dump.trigger.step, dump.trigger.element,
    )  # fmt: skip
    told = strap("blame", dump.path)
    assert "first    2.0\n" in told and "the bad one" in told and "nan at element 1 of 40" in told
    assert json.loads(strap("blame", dump.path, "--json"))["first"]["layer"] == "2.0"


def test_a_report_of_a_dump_says_what_went_wrong(model, tmp_path):
    with torch.no_grad(), flight_recorder(model, tmp_path / "run") as recorder:
        for _ in range(5):
            model(torch.randn(5, 8))
        model[2][0].weight[1, 1] = torch.nan
        with for_request("the bad one"):
            model(torch.randn(5, 8))
    (dump,) = recorder.dumps
    page = render_report(dump.path)
    assert "What went wrong" in page and dump.trigger.reason in page and "the bad one" in page
    (stream,) = dump.path.glob("*.stream")
    assert "What went wrong" not in render_report(stream)  # a part of the run, without the trigger
    (dump.path / "trigger.json").write_text("{}")
    assert "trigger.json is damaged" in render_report(dump.path)


class Words:
    """A tokenizer of 50 words."""

    def __len__(self):
        return 50

    def decode(self, ids):
        return " ".join(f"word{number}" for number in ids)


@pytest.mark.parametrize(
    ("value", "what"),
    [(torch.nan, "values that are not finite"), (1e6, "the largest magnitude")],
)
def test_a_report_of_a_dump_has_the_tokens_that_went_wrong(tmp_path, value, what):
    torch.manual_seed(0)
    llama = LlamaForCausalLM(
        LlamaConfig(
            hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=2,
            vocab_size=50,
        )
    ).eval()  # fmt: skip

    def spoil(module, args, output):
        if (args[0] == 0).any():
            output[1, 2, 7] = value  # the second text, its third token
        return output

    llama.model.embed_tokens.register_forward_hook(spoil, prepend=True)
    recorder = flight_recorder(llama, tmp_path / "run", outlier=100.0, after=0)
    with torch.no_grad(), recorder:
        for _ in range(17):
            llama(input_ids=torch.tensor([[11, 12, 13, 14], [21, 22, 23, 24]]))
        with for_request("the bad one"):
            llama(input_ids=torch.tensor([[31, 32, 33, 34], [41, 42, 0, 44]]))
    (dump,) = recorder.dumps
    assert dump.trigger.layer == "model.embed_tokens" and dump.trigger.step == 17
    page = shown(render_report(dump.path, tokenizer=Words()))
    assert f"Tokens with {what}: 1 of the 8 of that call." in page
    assert "padding word0 1 2 " in page
    assert "to the end of step 17: word41 word42 word0 word44" in page
    assert "in step 17 for request the bad one" in page
    assert "to the end of step 17: 41 42 0 44" in shown(render_report(dump.path))


def test_progress_counts_the_tensors(model, tmp_path, monkeypatch):
    path, told = capture(model, tmp_path / "run.stream", [torch.randn(5, 8)] * 3), []

    @contextlib.contextmanager
    def bar(what, show):
        told.append((what, show))
        yield lambda *counts: told.append(counts)

    monkeypatch.setattr("llm_instrumentation.analysis.blame.steps_bar", bar)
    blame(path)
    assert told == [("reading tensors", None), *((number, 39, "") for number in range(39))]


def test_a_healthy_capture(model, tmp_path, strap):
    path = capture(model, tmp_path / "run.stream", [torch.randn(5, 8) for _ in range(6)])
    assert blame(path).first is None
    assert "no value is infinite, NaN or far beyond the usual" in strap("blame", path)


def test_what_cannot_be(tmp_path, model):
    with pytest.raises(NotFoundError):
        blame(tmp_path / "missing.stream")
    path = capture(nn.Identity(), tmp_path / "run.stream", [torch.ones(3, dtype=torch.int64)])
    with pytest.raises(NotFoundError, match="no tensor of floats"):
        blame(path)
    for wrong in ({"steps": 0}, {"times": 1.0}, {"times": math.nan}):
        with pytest.raises(InvalidArgumentError, match="at least one step"):
            blame(path, **wrong)
