"""Compiled models run eagerly while they are captured, and compiled again afterwards."""

from __future__ import annotations

import os
import shutil
import warnings

import pytest
import torch
from llm_instrumentation import ActivationReader, InstrumentationConfig, capture_activations
from torch import nn

pytestmark = pytest.mark.skipif(
    not hasattr(torch.compiler, "set_stance"), reason="this torch cannot leave compiled code"
)

EAGERLY = pytest.warns(RuntimeWarning, match="the model is compiled: it runs eagerly")


class Counter:
    """A backend that runs the traced graph and counts how often."""

    def __init__(self) -> None:
        self.runs = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[torch.Tensor]):
        def run(*args: torch.Tensor):
            self.runs += 1
            return graph(*args)

        return run


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))


@pytest.mark.parametrize("in_place", [False, True], ids=["wrapped", "in place"])
@pytest.mark.parametrize("warmed", [False, True], ids=["cold", "warm"])
def test_a_compiled_model_is_captured_in_full(in_place, warmed, mlp, path, watching,
                                              assert_captured):  # fmt: skip
    x, backend = torch.randn(4, 6), Counter()
    with torch.no_grad(), watching(mlp) as seen:
        expected = mlp(x)
    if in_place:
        mlp.compile(backend=backend)
    compiled = mlp if in_place else torch.compile(mlp, backend=backend)
    with torch.no_grad():
        if warmed:
            compiled(x)
        runs = backend.runs
        with EAGERLY, capture_activations(compiled, path) as framework:
            assert torch.equal(compiled(x), expected)
        assert backend.runs == runs
        assert_captured(path, seen)
        assert framework.stats().steps == 1

        compiled(x)
        assert backend.runs == runs + 1


def test_a_model_with_a_compiled_part(mlp, path, read):
    backend = Counter()
    mlp[2] = torch.compile(mlp[2], backend=backend)
    x = torch.randn(4, 6)
    with torch.no_grad():
        mlp(x)
        with EAGERLY, capture_activations(mlp, path):
            mlp(x)
        mlp(x)
    assert backend.runs == 2
    assert [name for name, _ in read(path)] == ["0", "1", "2", ""]


def test_the_original_of_a_compiled_model(mlp, path, read):
    """Called by itself, it is captured like any other model."""
    torch.compile(mlp, backend=Counter())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with torch.no_grad(), capture_activations(mlp, path):
            mlp(torch.randn(4, 6))
    assert [name for name, _ in read(path)] == ["0", "1", "2", ""]


def test_a_compiled_decoder(llama, ids, path):
    compiled = torch.compile(llama, backend=Counter())
    with torch.no_grad(), EAGERLY, capture_activations(compiled, path):
        for length in (4, 5):
            output = compiled(ids[:, :length])
    with ActivationReader(path) as reader:
        assert reader.steps == (0, 1)
        assert {a.model for a in reader} == {"llama"}
        assert not any("_orig_mod" in name for name in reader.layers)
        assert torch.equal(reader["['logits']"][1].to_torch(), output.logits.half())


def test_layers_of_a_compiled_model_are_selected_by_their_own_names(mlp, path, read):
    compiled = torch.compile(mlp, backend=Counter())
    config = InstrumentationConfig.balanced().with_layers("2")
    with torch.no_grad(), EAGERLY, capture_activations(compiled, path, config=config):
        compiled(torch.randn(4, 6))
    assert [name for name, _ in read(path)] == ["2"]


def test_a_failed_capture_leaves_the_model_compiled(mlp, path, tmp_path):
    backend = Counter()
    compiled, x = torch.compile(mlp, backend=backend), torch.randn(4, 6)
    with torch.no_grad():
        with pytest.raises(FileNotFoundError):
            with capture_activations(compiled, tmp_path / "missing" / "run.stream"):
                pass
        with pytest.raises(KeyError), EAGERLY, capture_activations(compiled, path):
            raise KeyError
        compiled(x)
    assert backend.runs == 1


CC = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")


@pytest.mark.skipif(CC is None, reason="inductor needs a C++ compiler")
def test_generated_code_runs_again_afterwards(mlp, path, watching, assert_captured):
    compiled, x = torch.compile(mlp), torch.randn(4, 6)
    with torch.no_grad():
        before = compiled(x)
        with watching(mlp) as seen:
            mlp(x)
        with EAGERLY, capture_activations(compiled, path):
            compiled(x)
        assert torch.equal(compiled(x), before)
    assert_captured(path, seen)
