"""A flight recorder keeps the last steps, and writes them when something goes wrong."""

from __future__ import annotations

import json
import os
import random
import signal
import time

import pytest
import torch
from llm_instrumentation import ActivationReader, InstrumentationConfig, for_request
from llm_instrumentation.analysis.blame import blame
from llm_instrumentation.errors import InvalidArgumentError, InvalidStateError, NotFoundError
from llm_instrumentation.flight import FlightRecorder, flight_recorder, load_trigger
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM


def whole():
    """Stores values as they are."""
    return InstrumentationConfig.fast_capture().with_float32()


class Model:
    """A small Llama. It keeps what each module returned in each step, by plain hooks."""

    def __init__(self, dtype=torch.float32) -> None:
        torch.manual_seed(0)
        self.model = LlamaForCausalLM(
            LlamaConfig(
                hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=2,
                vocab_size=50,
            )
        ).eval().to(dtype)  # fmt: skip
        self.seen: list[list[tuple[str, torch.Tensor]]] = []
        self.fault: tuple[str, int] | None = None  # a module, and an element of what it returns
        self.value = torch.nan
        for name, module in self.model.named_modules():
            module.register_forward_hook(self._hook(name), prepend=True)

    def _hook(self, name):
        def keep(module, args, output):
            first = output[0] if isinstance(output, tuple) else output
            if not isinstance(first, torch.Tensor):
                first = output.last_hidden_state if "last_hidden_state" in output else output.logits
            if self.fault is not None and self.fault[0] == name:
                first.view(-1)[self.fault[1]] = self.value
            self.seen[-1].append((name, first.detach().clone()))

        return keep

    @torch.no_grad()
    def run(self, tokens: int = 12) -> None:
        torch.manual_seed(len(self.seen))
        self.seen.append([])
        self.model(torch.randint(50, (2, tokens)))


def check(path, model, first, last):
    """The dump has these steps whole: each module's output, bit for bit."""
    with ActivationReader(path) as reader:
        assert not reader.problem and reader.run.finished
        assert reader.steps == tuple(range(first, last + 1))
        for step in range(first, last + 1):
            seen = [(name, value) for name, value in model.seen[step] if name in reader.layers]
            assert len(seen) == 30
            for name, value in seen:
                (one,) = reader.select(name, steps=step)
                ours, theirs = one.to_torch(), value.contiguous()
                assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8)), (step, name)
        rows = reader.rows("lm_head")
        assert len(rows) == (last - first + 1) * 24
        assert rows.column("token_id") is not None


def test_a_value_that_is_not_finite_is_found_and_its_steps_are_written(tmp_path):
    model = Model()
    with flight_recorder(model.model, tmp_path / "run", config=whole(), after=3) as recorder:
        for _ in range(20):
            model.run()
        model.fault = "model.layers.1.mlp.up_proj", 77
        model.run()
        model.fault = None
        for _ in range(10):
            model.run()
        stats = recorder.stats()
        assert stats.steps == 7 and stats.oldest_step == 24 and stats.held_back == 0
    (dump,) = recorder.dumps
    assert dump.path == tmp_path / "run-000001" and not dump.problem
    trigger = dump.trigger
    assert (trigger.kind, trigger.layer, trigger.step) == (
        "not finite", "model.layers.1.mlp.up_proj", 20,
    )  # fmt: skip
    assert (trigger.element, trigger.value, trigger.call) == (77, "nan", 0)
    check(dump.path, model, 0, 23)
    assert load_trigger(dump.path) == dump
    record = json.loads((dump.path / "trigger.json").read_text())
    assert record["trigger"]["reason"] == (
        "model.layers.1.mlp.up_proj has nan at element 77 in step 20"
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_first_offender_of_random_faults(tmp_path, dtype):
    model, random_ = Model(dtype), random.Random(3)
    names = [name for name, _ in model.model.named_modules() if "." in name]
    sizes: dict[str, int] = {}
    with flight_recorder(
        model.model, tmp_path / "run", memory_gb=0.05, config=whole(), after=0, pause_s=0
    ) as recorder:
        model.run()
        sizes = {name: value.numel() for name, value in model.seen[0]}
        planted = []
        for _ in range(20):
            for _ in range(random_.randrange(4)):
                model.run()
            name = random_.choice([name for name in names if name in sizes])
            element = random_.randrange(sizes[name])
            model.fault, model.value = (name, element), random_.choice([torch.nan, torch.inf])
            planted.append((len(model.seen), name, element, str(model.value)))
            model.run()
            model.fault = None
    found = [
        (one.trigger.step, one.trigger.layer, one.trigger.element, one.trigger.value)
        for one in recorder.dumps
    ]
    assert found == planted[-10:]  # the newest ten dumps are kept
    assert sorted(os.listdir(tmp_path)) == [f"run-{n:06d}" for n in range(11, 21)]
    first = planted[-2][0] + 1
    check(recorder.dumps[-1].path, model, first, planted[-1][0])


def test_the_oldest_steps_give_way(tmp_path):
    model = Model()
    with flight_recorder(
        model.model, tmp_path / "run", memory_gb=0.004, config=whole(), after=0
    ) as recorder:
        for _ in range(60):
            model.run()
        stats = recorder.stats()
        assert stats.gone_steps + stats.steps == 60 and 3 < stats.steps < 40
        assert stats.oldest_step == stats.gone_steps and stats.bytes <= 4e6
        assert 0 < stats.seconds < 60 and not stats.dropped
        path = recorder.dump("a look")
    (dump,) = recorder.dumps
    assert dump.path == path and dump.trigger.reason == "a look"
    assert (dump.first_step, dump.last_step) == (stats.oldest_step, 59)
    check(path, model, stats.oldest_step, 59)


def test_a_step_larger_than_the_memory_is_told(tmp_path):
    wide = nn.Sequential(*(nn.Linear(64, 64) for _ in range(40)))
    with (
        torch.no_grad(),
        pytest.warns(RuntimeWarning, match=r"found no room .* memory_gb = 0\.0011") as told,
        flight_recorder(wide, tmp_path / "run", memory_gb=0.0011, config=whole()) as recorder,
    ):
        wide(torch.ones(2000, 64))  # 20 MB in large tensors
        wide(torch.ones(32, 64))
        stats = recorder.stats()
        assert stats.steps == 1 and stats.oldest_step == 1 and 35 < stats.dropped < 41
        wide(torch.ones(150, 64))  # 1.5 MB
        assert recorder.stats().steps == 1
        assert stats.dropped < recorder.stats().dropped < stats.dropped + 41
        recorder.dump()
    assert len(told) == 1
    (dump,) = recorder.dumps
    with ActivationReader(dump.path) as reader:
        index = reader.index.to_pandas()
        missing = index[index.error.notna()]
        assert set(missing.step) == {2} and missing.error.str.contains("no room").all()


@pytest.mark.parametrize("limit", [{"steps": 3}, {"seconds": 0.5}], ids=str)
def test_steps_and_seconds_bound_what_is_kept(tmp_path, limit):
    model = Model()
    with flight_recorder(model.model, tmp_path / "run", config=whole(), **limit) as recorder:
        for _ in range(5):
            model.run()
        if "seconds" in limit:
            time.sleep(0.6)
            for _ in range(3):
                model.run()
        assert recorder.stats().steps == 3
        recorder.dump()
    last = len(model.seen) - 1
    check(recorder.dumps[0].path, model, last - 2, last)
    with pytest.raises(InvalidArgumentError, match="at least one step"):
        FlightRecorder(model.model, tmp_path / "run", steps=0)


def test_an_exception_that_leaves_the_model(tmp_path):
    model = Model()
    model.run()
    with (
        pytest.raises(ZeroDivisionError),
        flight_recorder(model.model, tmp_path / "run", config=whole()) as recorder,
    ):
        model.run()
        model.model.model.layers[1].register_forward_hook(lambda *_: 1 / 0, prepend=True)
        with for_request("the bad one"):
            model.run()
    (dump,) = recorder.dumps
    assert dump.trigger.kind == "exception" and dump.trigger.step == 1
    assert dump.trigger.reason == "ZeroDivisionError: division by zero"
    assert dump.trigger.request == "the bad one"
    with ActivationReader(dump.path) as reader:
        assert reader.steps == (0, 1)
        assert "model.layers.0" in {one.name for one in reader.select(steps=1)}


def test_an_exception_of_the_block_alone(tmp_path):
    model = Model()
    with (
        pytest.raises(KeyError),
        flight_recorder(model.model, tmp_path / "run", config=whole()) as recorder,
    ):
        model.run()
        raise KeyError("data")
    (dump,) = recorder.dumps
    assert dump.trigger.reason == "KeyError: 'data'"
    check(dump.path, model, 0, 0)


def test_a_condition_on_what_the_model_returns(tmp_path):
    model, asked = Model(), []

    def condition(output):
        asked.append(output.logits.shape)
        return f"{len(asked)} steps" if len(asked) == 5 else None

    with flight_recorder(
        model.model, tmp_path / "run", config=whole(), condition=condition, after=1
    ) as recorder:
        for _ in range(8):
            model.run()
    (dump,) = recorder.dumps
    assert (dump.trigger.kind, dump.trigger.reason, dump.trigger.step) == (
        "condition", "5 steps", 4,
    )  # fmt: skip
    check(dump.path, model, 0, 5)
    assert len(asked) == 8


def test_a_condition_that_raises_is_told_once(tmp_path):
    model = Model()
    with (
        pytest.warns(RuntimeWarning, match=r"asked no more: it raised ZeroDivisionError") as told,
        flight_recorder(model.model, tmp_path / "run", condition=lambda output: 1 / 0) as recorder,
    ):
        for _ in range(5):
            model.run()
    assert len(told) == 1 and not recorder.dumps


def test_a_signal(tmp_path):
    model = Model()
    before = signal.getsignal(signal.SIGUSR1)
    with flight_recorder(
        model.model, tmp_path / "run", config=whole(), signal=signal.SIGUSR1, after=1
    ) as recorder:
        model.run()
        model.run()
        os.kill(os.getpid(), signal.SIGUSR1)
        model.run()
        model.run()
    (dump,) = recorder.dumps
    assert (dump.trigger.kind, dump.trigger.reason) == ("signal", "SIGUSR1")
    check(dump.path, model, 0, 2)
    assert signal.getsignal(signal.SIGUSR1) is before


def test_triggers_pause_after_a_dump(tmp_path):
    model = Model()
    model.fault = "model.layers.0", 0
    with flight_recorder(model.model, tmp_path / "run", config=whole(), after=1) as recorder:
        for _ in range(9):
            model.run()
        assert recorder.stats().held_back == 8
    assert len(recorder.dumps) == 1


def test_what_cannot_be(tmp_path):
    model = Model()
    with pytest.raises(InvalidArgumentError, match="after = -1"):
        FlightRecorder(model.model, tmp_path / "run", after=-1)
    with pytest.raises(TypeError, match="must be a torch.nn.Module"):
        FlightRecorder("model")
    recorder = FlightRecorder(model.model, tmp_path / "run")
    for call in (recorder.dump, recorder.stats):
        with pytest.raises(InvalidStateError, match="not running"):
            call()
    recorder.stop()
    with recorder, pytest.raises(InvalidStateError, match="running already"):
        recorder.start()
    with pytest.raises(NotFoundError, match="is no dump"):
        load_trigger(tmp_path)
    assert not recorder.dumps


def test_a_folder_that_cannot_be_written_lets_the_model_go_on(tmp_path):
    model = Model()
    (tmp_path / "file").write_text("")
    with (
        pytest.warns(RuntimeWarning, match="cannot write a dump"),
        flight_recorder(model.model, tmp_path / "file" / "run", config=whole()) as recorder,
    ):
        model.fault = "model.layers.0", 0
        model.run()
        assert recorder.stats().steps == 1  # nothing is lost
    assert not recorder.dumps


def test_two_recorders_and_a_capture_of_one_model(tmp_path):
    from llm_instrumentation import capture_activations

    model = Model()
    with (
        flight_recorder(model.model, tmp_path / "a", config=whole()) as first,
        flight_recorder(model.model, tmp_path / "b", config=whole()) as second,
        capture_activations(model.model, tmp_path / "run.stream", config=whole()),
    ):
        for _ in range(3):
            model.run()
        first.dump()
        model.run()
        second.dump()
    check(first.dumps[0].path, model, 0, 3)
    check(second.dumps[0].path, model, 0, 3)


class Root(nn.Module):
    """The gradient of a root is infinite where the value is 0."""

    def forward(self, x):
        return x.sqrt()


def test_a_gradient_that_is_not_finite(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), Root())
    config = whole().with_gradients()
    with flight_recorder(model, tmp_path / "run", config=config, after=0) as recorder:
        model(torch.ones(1, 4)).sum().backward()
        model(torch.ones(1, 4))
    (dump,) = recorder.dumps
    assert (dump.trigger.layer, dump.trigger.path) == ("1", "!grad")
    assert dump.trigger.step == 0 and dump.trigger.value == "inf"
    with ActivationReader(dump.path) as reader:
        assert "1!grad" in reader.layers


def test_a_small_module_of_torch(tmp_path):
    layer = nn.Linear(3, 3)
    with flight_recorder(layer, tmp_path / "run") as recorder:
        layer(torch.full((1, 3), torch.inf))
    assert recorder.dumps[0].trigger.value in ("nan", "inf", "-inf")


def test_an_outlier(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    with (
        torch.no_grad(),
        flight_recorder(
            model, tmp_path / "run", outlier=100, not_finite=False, pause_s=0, after=0
        ) as recorder,
    ):
        for _ in range(20):
            model(torch.randn(2, 8))
        model[2].bias[3] = -3000.0
        with for_request("the bad one"):
            model(torch.randn(2, 8))
        model[2].bias[3] = torch.nan
        model(torch.randn(2, 8))  # is no trigger here
    (dump,) = recorder.dumps
    trigger = dump.trigger
    assert (trigger.kind, trigger.layer, trigger.step) == ("outlier", "2", 20)
    assert trigger.element in (3, 11) and float(trigger.value) == pytest.approx(-3000, rel=1e-2)
    assert 0.3 < trigger.usual < 3 and trigger.request == "the bad one"
    assert "times the usual" in trigger.reason
    assert load_trigger(dump.path) == dump
    first = blame(dump.path).first
    assert (first.layer, first.step, first.element) == ("2", 20, trigger.element)
    for wrong in (1, 0, -3, float("nan"), float("inf")):
        with pytest.raises(InvalidArgumentError, match="outlier = "):
            FlightRecorder(model, tmp_path / "run", outlier=wrong)
