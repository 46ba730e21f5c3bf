"""Hooks capture the outputs of modules in every mode of running, and number their steps."""

from __future__ import annotations

import contextlib
import copy
import threading
import time

import pytest
import torch
from hooked_models import balanced, hooks_of
from llm_instrumentation import ActivationReader, InstrumentationConfig, capture_activations
from torch import Tensor, nn

# ---- how the model runs -----------------------------------------------------------


@pytest.mark.parametrize(
    "mode", [torch.no_grad, torch.inference_mode, torch.enable_grad, contextlib.nullcontext]
)
def test_every_gradient_mode(mode, llama, ids, path, watching, assert_captured):
    """A capture works in every gradient mode, and does not change the mode."""
    with mode(), watching(llama) as seen, capture_activations(llama, path):
        output = llama(ids).logits
    assert_captured(path, seen)
    assert output.requires_grad == (mode in (torch.enable_grad, contextlib.nullcontext))


def test_training_is_not_disturbed(build, ids, path, watching, assert_captured):
    def losses_and_gradients(model: nn.Module) -> tuple[list[float], list[Tensor]]:
        torch.manual_seed(3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = []
        for _ in range(3):
            optimizer.zero_grad()
            loss = model(ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses, [parameter.grad for parameter in model.parameters()]

    alone = losses_and_gradients(build("llama").train())
    model = build("llama").train()
    with watching(model) as seen, capture_activations(model, path) as framework:
        captured = losses_and_gradients(model)
    assert captured[0] == alone[0]
    assert all(map(torch.equal, captured[1], alone[1]))
    assert_captured(path, seen)
    assert framework.stats().steps == 3


def test_a_value_is_captured_before_the_next_module_changes_it_in_place(mlp, x, path, read):
    with torch.no_grad():
        linear = mlp[0](x)
        with capture_activations(mlp, path):
            mlp(x)
    values = dict(read(path))
    assert torch.equal(values["0"], linear.half())
    assert torch.equal(values["1"], linear.relu().half())
    assert (values["0"] < 0).any()


def test_a_caller_may_change_the_output_at_once(mlp, x, path, read):
    with torch.no_grad():
        expected = mlp(x)
        with capture_activations(mlp, path):
            for _ in range(200):
                mlp(x).fill_(7)
    values = [value for name, value in read(path) if name == ""]
    assert len(values) == 200
    assert all(torch.equal(value, expected.half()) for value in values)


def test_outputs_without_contiguous_memory(path, watching, assert_captured):
    """Views, transposed, strided and conjugated outputs are captured bit for bit."""

    class Views(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            return (
                x.T, x[:, ::2], x[:, None].expand(-1, 3, -1), x.permute(2, 0, 1) if x.ndim > 2
                else x.flip(0), x[2:3, 1], x.as_strided((3, 2), (1, 2)), x.diagonal(),
                x.unfold(1, 3, 1), x[0, 0], x[:0], x.T.bfloat16(), x.T.long(), x.T > 0,
                torch.complex(x, -x).T.conj(), torch.view_as_complex(x.reshape(-1, 2)).conj().imag,
            )  # fmt: skip

    model = Views()
    with watching(model) as seen, capture_activations(model, path, preset="max"):
        model(torch.randn(6, 8))
    assert_captured(path, seen)
    assert len(seen) == 15


def test_a_layer_whose_output_changes(path, watching, assert_captured):
    """A hook keeps facts of an output for the next call, and checks that they still fit."""
    x = torch.randn(4, 6)
    z = torch.complex(x, -x)
    outputs = [
        x, x, x.reshape(6, 4), x.T, x.half(), x.long(), x, (x, x.T), x.to_sparse().to_dense(), z,
        z.conj(), z.conj().imag, torch._neg_view(x), nn.Parameter(x), x[:0], x.sum(), x,
    ]  # fmt: skip
    model = nn.Sequential(nn.Identity())
    with torch.no_grad(), watching(model) as seen, capture_activations(model, path) as framework:
        for output in outputs:
            model(output)
    assert_captured(path, [(name, tensor.resolve_neg()) for name, tensor in seen])
    assert framework.stats().failed == 0
    with ActivationReader(path) as reader:
        assert [a.step for a in reader["0"]] == list(range(len(outputs)))


@pytest.mark.parametrize("preset", ["fast_capture", "balanced", "max"])
def test_empty_tensors_and_scalars(preset, path, read):
    """Empty tensors and scalars are captured with their shapes."""

    class Odd(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            return x[:0], x.sum(), torch.empty(0, 3, 2, dtype=torch.int32)

    model = Odd()
    with capture_activations(model, path, preset=preset):
        model(torch.ones(4, 6))
    assert [(name, tuple(value.shape)) for name, value in read(path)] == [
        ("", (0, 6)),
        ("[1]", ()),
        ("[2]", (0, 3, 2)),
    ]


def test_an_exception_of_the_model_comes_through(path, read):
    class Breaks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(6, 6)

        def forward(self, x: Tensor, fail: bool) -> Tensor:
            x = self.first(x)
            if fail:
                raise KeyError("inside the model")
            return x

    model, x = Breaks(), torch.randn(4, 6)
    with torch.no_grad(), capture_activations(model, path) as framework:
        with pytest.raises(KeyError, match="inside the model"):
            model(x, fail=True)
        model(x, fail=False)  # the next call is a new step
    assert framework.stats().steps == 2
    with ActivationReader(path) as reader:
        assert [(a.name, a.step) for a in reader] == [("first", 0), ("first", 1), ("", 1)]


def test_packets_from_before_an_exception_of_the_block_are_kept(mlp, x, path, read):
    with pytest.raises(KeyError, match="mine"), capture_activations(mlp, path):
        mlp(x)
        raise KeyError("mine")
    assert [name for name, _ in read(path)] == ["0", "1", "2", ""]
    assert hooks_of(mlp) == 0


# ---- steps and calls --------------------------------------------------------------


def test_each_outermost_call_is_a_step(mlp, x, path):
    with torch.no_grad(), capture_activations(mlp, path):
        for _ in range(3):
            mlp(x)
    with ActivationReader(path) as reader:
        assert reader.steps == (0, 1, 2)
        assert reader.tokens == ()  # without a tracker there are no tokens
        assert [a.step for a in reader["0"]] == [0, 1, 2]
        assert [a.call for a in reader["0"]] == [0, 0, 0]


def test_shared_modules_count_their_calls(path, watching, assert_captured):
    torch.manual_seed(0)
    shared = nn.Linear(6, 6)
    model = nn.Sequential(shared, nn.ReLU(), shared, nn.ReLU(), shared)
    with torch.no_grad(), watching(model) as seen, capture_activations(model, path):
        model(torch.randn(4, 6))
        model(torch.randn(4, 6))
    assert_captured(path, seen)  # a shared module is captured under the first of its names
    with ActivationReader(path) as reader:
        assert [(a.step, a.call) for a in reader["0"]] == [
            (0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2),
        ]  # fmt: skip
        assert torch.equal(
            reader["0"].at(step=1, call=2).to_torch(), reader[""].at(step=1).to_torch()
        )


def test_a_model_that_calls_itself_is_one_step(path):
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 6)

        def forward(self, x: Tensor, depth: int = 3) -> Tensor:
            return self.layer(x) if depth == 0 else self(x, depth - 1) + 1

    model = Twice()
    with torch.no_grad(), capture_activations(model, path) as framework:
        model(torch.randn(2, 6))
    assert framework.stats().steps == 1
    with ActivationReader(path) as reader:
        assert [(a.name, a.step, a.call) for a in reader] == [
            ("layer", 0, 0), ("", 0, 0), ("", 0, 1), ("", 0, 2), ("", 0, 3),
        ]  # fmt: skip


# ---- several at once --------------------------------------------------------------


def test_several_models_in_one_capture(mlp, x, path, watching, assert_captured):
    """Models of one class get different names. Each call of a model is a step."""
    other = copy.deepcopy(mlp)
    gate = nn.Linear(6, 2)
    framework = balanced(mlp, other, gate)
    framework.instrument_model(mlp)  # the model is registered already, so this changes nothing
    with torch.no_grad(), framework.capture_activations(path):
        gate(x)
        mlp(x)
        other(x + 1)
    with ActivationReader(path) as reader:
        assert [(a.model, a.name, a.step) for a in reader] == [
            ("linear", "", 0),
            *[("sequential", name, 1) for name in ("0", "1", "2", "")],
            *[("sequential#2", name, 2) for name in ("0", "1", "2", "")],
        ]
        first, second = [a.to_torch() for a in reader["2"]]
    with torch.no_grad():
        assert torch.equal(first, mlp(x).half())
        assert torch.equal(second, other(x + 1).half())


def test_captures_may_be_nested(mlp, x, tmp_path, read):
    outer, inner = tmp_path / "outer.stream", tmp_path / "inner.stream"
    with torch.no_grad(), capture_activations(mlp, outer):
        mlp(x)
        with capture_activations(mlp, inner, preset="fast_capture"):
            mlp(x + 1)
        assert hooks_of(mlp) > 0
        mlp(x + 2)
    assert hooks_of(mlp) == 0
    assert len(read(outer)) == 12
    assert len(read(inner)) == 4
    with ActivationReader(outer) as a, ActivationReader(inner) as b:
        assert b.steps == (0,)
        for layer in b.layers:
            assert torch.equal(a[layer].at(step=1).to_torch(), b[layer][0].to_torch())


def test_a_framework_may_capture_again(mlp, x, tmp_path, read):
    framework = balanced(mlp)
    for n in (1, 2):
        with torch.no_grad(), framework.capture_activations(tmp_path / f"{n}.stream"):
            for _ in range(n):
                mlp(x)
        assert framework.stats().steps == n
        assert framework.stats().path == str(tmp_path / f"{n}.stream")
        assert len(read(tmp_path / f"{n}.stream")) == 4 * n


def test_a_framework_may_capture_twice_at_once(mlp, x, tmp_path, read):
    framework = balanced(mlp)
    with torch.no_grad(), framework.capture_activations(tmp_path / "a.stream"):
        with framework.capture_activations(tmp_path / "b.stream"):
            mlp(x)
        mlp(x)
        assert framework.stats().path == str(tmp_path / "a.stream")
    assert len(read(tmp_path / "a.stream")) == 8
    assert len(read(tmp_path / "b.stream")) == 4


def test_a_capture_replaces_an_older_one(mlp, x, path, read):
    for n in (3, 1):
        with torch.no_grad(), capture_activations(mlp, path):
            for _ in range(n):
                mlp(x)
    assert len(read(path)) == 4


def test_threads_have_steps_of_their_own(mlp, path):
    """If several threads call one model, each call is a step with its own packets."""
    calls, errors = 40, []
    inputs = [torch.full((4, 6), float(i)) for i in range(2 * calls)]

    def work(mine: list[Tensor]) -> None:
        try:
            with torch.no_grad():
                for x in mine:
                    mlp(x)
                    time.sleep(0)
        except BaseException as error:
            errors.append(error)

    with capture_activations(mlp, path) as framework:
        threads = [threading.Thread(target=work, args=(inputs[i::2],)) for i in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert errors == []
    assert framework.stats().steps == 2 * calls
    with torch.no_grad():
        expected = sorted(mlp(x).half().flatten().tolist() for x in inputs)
    with ActivationReader(path) as reader:
        assert reader.steps == tuple(range(2 * calls))
        assert len({a.thread for a in reader}) == 2
        results = []
        for step in reader.steps:
            view = reader.select(steps=step)
            assert [(a.name, a.call) for a in view] == [("0", 0), ("1", 0), ("2", 0), ("", 0)]
            assert len({a.thread for a in view}) == 1
            results.append(view[3].to_torch().flatten().tolist())
    assert sorted(results) == expected


# ---- little memory ---------------------------------------------------------------


def test_dropping_never_waits_and_counts(path, read):
    config = InstrumentationConfig.fast_capture().with_drop_when_full().with_workers(1)
    config.with_memory_limit(0.004)
    model, x = nn.Identity(), torch.randn(256, 1024)  # each packet has 0.5 MB
    with capture_activations(model, path, config=config) as framework:
        for _ in range(400):
            model(x)
    stats = framework.stats()
    assert stats.tensors + stats.dropped == 400
    assert stats.dropped > 0
    assert stats.dropped_bytes == stats.dropped * x.nbytes
    assert stats.stalls == 0
    assert stats.memory_peak <= stats.memory_limit
    values = read(path)
    assert len(values) == stats.tensors
    assert all(torch.equal(value, x.half()) for _, value in values)
    with ActivationReader(path) as reader:
        assert len(reader.missing) == stats.dropped
        assert {a.step for a in reader} | {a.step for a in reader.missing} == set(range(400))


def test_blocking_loses_nothing_in_little_memory(path, read):
    config = InstrumentationConfig.fast_capture().with_workers(1).with_memory_limit(0.004)
    config.with_throughput(1e-9)  # no warning of a slow disk
    model, x = nn.Identity(), torch.randn(256, 1024)
    with capture_activations(model, path, config=config) as framework:
        for _ in range(100):
            model(x)
    stats = framework.stats()
    assert (stats.tensors, stats.dropped) == (100, 0)
    assert stats.memory_peak <= stats.memory_limit
    assert all(torch.equal(value, x.half()) for _, value in read(path))
