"""Captures of only the last position, of each k-th step, and captures that pause."""

from __future__ import annotations

import threading

import pytest
import torch
from llm_instrumentation import (
    ActivationReader,
    InstrumentationConfig,
    InstrumentationFramework,
    capture_activations,
)
from llm_instrumentation.core import last_position
from torch import nn
from torch.utils.checkpoint import checkpoint

pytestmark = pytest.mark.usefixtures("each_kind_of_hooks")


def config() -> InstrumentationConfig:
    return InstrumentationConfig.balanced().with_float32()


X = torch.arange(24.0).reshape(2, 3, 4)


# ---- last position ----------------------------------------------------------------


def test_the_last_position_of_a_prompt_and_of_each_token(llama, ids, tmp_path):
    paths = tmp_path / "whole.stream", tmp_path / "last.stream"
    for path, chosen in zip(paths, [config(), config().with_last_position()], strict=True):
        with torch.no_grad(), capture_activations(llama, path, config=chosen):
            llama.generate(ids, max_new_tokens=4, do_sample=False)
    with ActivationReader(paths[0]) as whole, ActivationReader(paths[1]) as last:
        assert len(whole) == len(last) and len(whole) > 100
        prompts = 0
        for one, other in zip(whole, last, strict=True):
            assert (one.name, one.step, one.call) == (other.name, other.step, other.call)
            expected = one.to_torch()
            assert other.source_shape == expected.shape
            if expected.ndim == 3 and expected.shape[1] > 1:
                prompts += 1
                assert other.transform == "last_position"
                dense = other.to_dense()
                assert dense.shape == expected.shape and dense[:, :-1].isnan().all()
                assert torch.equal(dense[:, -1:], expected[:, -1:])
                expected = expected[:, -1:]
            else:
                assert other.transform is None
            assert torch.equal(other.to_torch(), expected)
        assert prompts > 20
        assert last["lm_head"].cat(dim=1).shape == (2, 4, 97)


def test_an_activation_knows_its_positions_in_the_source(path):
    with (
        torch.no_grad(),
        capture_activations(model := nn.Identity(), path, config=config().with_last_position()),
    ):
        model(X)
        model(X[0])  # has two dimensions, so its positions are unknown and it is stored whole
    with ActivationReader(path) as reader:
        last, whole = reader[""]
        assert last.shape == (2, 1, 4) and last.source_shape == (2, 3, 4)
        assert torch.equal(X.view(-1)[torch.tensor(last.positions)], last.to_torch().view(-1))
        assert whole.positions is None and torch.equal(whole.to_torch(), X[0])


def test_inputs_and_gradients_are_cut_too(path):
    model = nn.Identity()
    chosen = config().with_last_position().with_inputs().with_gradients()
    with capture_activations(model, path, config=chosen):
        (model(X.clone().requires_grad_() * 1) * X).sum().backward()
    with ActivationReader(path) as reader:
        for name in ("!input", "", "!grad"):
            assert torch.equal(reader[name][0].to_torch(), X[:, -1:])


def test_sparse_and_nested_tensors_are_kept_whole(path):
    parts = [torch.randn(2, 4), torch.randn(3, 4)]
    nested = torch.nested.nested_tensor(parts, layout=torch.jagged)
    with (
        torch.no_grad(),
        capture_activations(model := nn.Identity(), path, config=config().with_last_position()),
    ):
        model(nested)
        model(torch.ones(1, 2, 2).to_sparse())
    with ActivationReader(path) as reader:
        assert torch.equal(reader[".values"][0].to_torch(), torch.cat(parts))
        assert reader[".values"][0].transform == "nested"
        assert reader[".values"][1].transform == "sparse"


def test_samples_have_no_last_position():
    with pytest.raises(ValueError, match="last_position keeps no samples"):
        InstrumentationConfig.balanced().with_sampling(0.1).with_last_position()


# ---- steps ------------------------------------------------------------------------


def run_of(steps: int, model: nn.Module, start: int = 0) -> None:
    with torch.no_grad():
        for k in range(start, start + steps):
            model(torch.full((2, 2), float(k)))


def steps_in(path) -> list[tuple[int, float]]:
    """The step and the value of each packet of the first layer."""
    with ActivationReader(path) as reader:
        return [(a.step, a.to_torch().mean().item()) for a in reader["0"]]


def net() -> nn.Module:
    return nn.Sequential(nn.Identity(), nn.ReLU())


@pytest.mark.parametrize("every", [1, 3, 100])
def test_every_third_step(path, every):
    """`with_every(n)` captures each n-th step and counts the others as skipped."""
    with capture_activations(model := net(), path, config=config().with_every(every)) as capture:
        run_of(10, model)
    kept = list(range(0, 10, every))
    assert steps_in(path) == [(k, float(k)) for k in kept]
    stats = capture.stats()
    assert stats.steps == 10 and stats.skipped_steps == 10 - len(kept)
    assert stats.tensors == 3 * len(kept)


def test_every_third_step_of_a_resumed_capture(path):
    """A resumed capture counts its steps on, and captures multiples of three."""
    framework = InstrumentationFramework(config().with_every(3))
    framework.instrument_model(model := net())
    for start, resume in ((0, False), (5, True)):
        with framework.capture_activations(
            path, track_per_token=True, resume_from_checkpoint=resume
        ):
            run_of(5, model, start)
    # The last step in the stream is 3, so the resumed capture counts its five steps from 4. Among
    # them only 6 is a multiple of 3.
    assert steps_in(path) == [(0, 0.0), (3, 3.0), (6, 7.0)]


def test_steps_that_begin_while_it_pauses_are_left_out(path):
    with capture_activations(model := net(), path, config=config()) as capture:
        run_of(2, model)
        with capture.paused():
            run_of(3, model, 2)
        run_of(1, model, 5)
        capture.pause()
        with capture.paused():  # at its end the capture still pauses, as before
            run_of(1, model, 6)
        run_of(1, model, 7)
        capture.resume()
        run_of(1, model, 8)
    assert steps_in(path) == [(0, 0.0), (1, 1.0), (5, 5.0), (8, 8.0)]
    assert capture.stats().skipped_steps == 5


def test_a_step_under_way_is_captured_to_its_end(path):
    model = net()
    with capture_activations(model, path, config=config()) as capture:
        model[0].register_forward_hook(lambda *_: capture.pause())
        run_of(2, model)
    with ActivationReader(path) as reader:
        assert [(a.name, a.step) for a in reader] == [("0", 0), ("1", 0), ("", 0)]


def test_tokens_are_counted_while_it_pauses(path):
    framework = InstrumentationFramework(config())
    framework.instrument_model(model := net())
    with framework.capture_activations(path, track_per_token=True) as tracker:
        for k in range(4):
            (framework.pause if k % 2 else framework.resume)()
            run_of(1, model, k)
            tracker.record_token(k, str(k))
    with ActivationReader(path) as reader:
        assert [(a.step, a.token) for a in reader["0"]] == [(0, 0), (2, 2)]
        assert len(reader.token_metadata["tokens"]) == 4


def test_gradients_of_a_captured_step_come_while_it_pauses(path):
    model = nn.Linear(2, 2)
    with capture_activations(model, path, config=config().with_gradients()) as capture:
        loss = model(torch.ones(2, 2)).sum()
        with capture.paused():
            model(torch.ones(2, 2)).sum().backward()
            loss.backward()
    with ActivationReader(path) as reader:
        assert [(a.name, a.step) for a in reader] == [("", 0), ("!grad", 0)]


def test_steps_of_threads_are_left_out_one_by_one(path):
    """Steps are counted over all threads, and each second one is captured."""
    model = net()
    with capture_activations(model, path, config=config().with_every(2)) as capture:
        threads = [threading.Thread(target=run_of, args=(50, model)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    with ActivationReader(path) as reader:
        assert sorted(a.step for a in reader["1"]) == list(range(0, 200, 2))
    assert capture.stats().skipped_steps == 100


def test_a_capture_that_left_out_all_steps_warns(path):
    with (
        pytest.warns(RuntimeWarning, match="no module ran in the block: all 2 steps were left out"),
        capture_activations(model := net(), path, config=config()) as capture,
        capture.paused(),
    ):
        run_of(2, model)
    assert capture.stats().tensors == 0


def test_only_a_running_capture_pauses(path):
    framework = InstrumentationFramework(config())
    for call in (framework.pause, framework.resume, framework.paused().__enter__):
        with pytest.raises(RuntimeError, match="no capture is running"):
            call()


@pytest.mark.parametrize("bad", [0, -1, 1.5, True, "2"])
def test_a_bad_number_of_steps_is_named(bad):
    with pytest.raises(ValueError, match="every must be an integer from 1"):
        InstrumentationConfig.balanced().with_every(bad)


def test_a_damaged_shape_is_an_error():
    good = last_position.parameters_json((2, 3, 4))
    positions, shape = last_position.positions_from_parameters(good, 8)
    assert positions.tolist() == [8, 9, 10, 11, 20, 21, 22, 23] and shape == (2, 3, 4)
    for bad in ("", "{}", "[]", '{"source_shape": [2, 3]}', '{"source_shape": [2, 0, 4]}',
                '{"source_shape": [2, 3, 5]}', '{"source_shape": [8, 9223372036854775807, 1]}',
                '{"source_shape": 3}', '{"source_shape": [2, 3, "4"]}'):  # fmt: skip
        with pytest.raises(ValueError, match="last position"):
            last_position.positions_from_parameters(bad, 8)


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputation_for_a_step_that_is_left_out_is_left_out(path, reentrant):
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(2, 2), nn.ReLU())

        def forward(self, x):
            return checkpoint(self.inner, x, use_reentrant=reentrant)

    model, x = Checkpointed(), torch.ones(2, 2, requires_grad=True)
    chosen = config().with_every(2).with_inputs().with_gradients()
    with capture_activations(model, path, config=chosen) as capture:
        model(x).sum().backward()
        had = capture.stats().tensors
        model(x).sum().backward()
        with capture.paused():
            model(x).sum().backward()
    assert capture.stats().tensors == had > 10


def test_pauses_may_overlap(path):
    with capture_activations(model := net(), path, config=config()) as capture:
        first, second = capture.paused(), capture.paused()
        first.__enter__()
        second.__enter__()
        first.__exit__(None, None, None)
        run_of(1, model)  # the second pause still lasts
        second.__exit__(None, None, None)
        run_of(1, model, 1)
    assert steps_in(path) == [(1, 1.0)]


def test_the_gradient_of_a_leaf_follows_the_step_before_it(path):
    """A leaf's gradient belongs to no step. It is captured if the thread's last step was."""
    leaf = torch.ones(2, 2, requires_grad=True)
    chosen = config().with_every(2).with_gradients()
    with capture_activations(model := net(), path, config=chosen) as capture:
        for _ in range(4):
            model(leaf).sum().backward()
        with capture.paused():
            model(leaf).sum().backward()
    with ActivationReader(path) as reader:
        assert len(reader["0!grad"]) == 2


def test_a_capture_warns_of_modules_that_ran_only_while_it_paused(path):
    model = nn.ModuleDict({"one": nn.Linear(2, 2), "other": nn.Linear(2, 2)})
    model.forward = lambda x, name: model[name](x)
    with (
        pytest.warns(RuntimeWarning, match="'other': not called but perhaps in the 1 steps that"),
        torch.no_grad(),
        capture_activations(model, path, config=config()) as capture,
    ):
        model(torch.ones(2, 2), "one")
        with capture.paused():
            model(torch.ones(2, 2), "other")
