"""Copies, pickles and scripted parts of a model that is being captured."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref

import pytest
import torch
from llm_instrumentation import ActivationReader, capture_activations
from torch import Tensor, nn


@pytest.fixture
def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))


X = torch.randn(4, 6, generator=torch.Generator().manual_seed(2))


def saved_and_loaded(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize(
    "copied",
    [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model)), saved_and_loaded],
    ids=["deepcopy", "pickle", "torch.save"],
)
def test_a_copy_made_in_the_block_is_not_captured(copied, mlp, path, read):
    with torch.no_grad(), capture_activations(mlp, path):
        twin = copied(mlp)
        expected = mlp(X)
        assert torch.equal(twin(X), expected)
    assert [name for name, _ in read(path)] == ["0", "1", "2", ""]
    with torch.no_grad():
        assert torch.equal(twin(X), expected)


def test_a_pickle_needs_nothing_of_ours(mlp, path):
    with capture_activations(mlp, path):
        mlp(X)
        pickled = pickle.dumps(mlp)
    assert b"llm_instrumentation" not in pickled


def test_an_average_of_the_weights_is_kept_beside_a_capture(mlp, path, read):
    from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

    with torch.no_grad(), capture_activations(mlp, path):
        average = AveragedModel(mlp, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        average.update_parameters(mlp)
        mlp(X)
        average(X)
    assert len(read(path)) == 4


def test_a_model_with_a_scripted_part(mlp, path, read):
    scripted = torch.jit.script(mlp[0])
    model = nn.Sequential(scripted, mlp[1], mlp[2])
    with torch.no_grad(), capture_activations(model, path) as framework:
        output = model(X)
    assert [name for name, _ in read(path)] == ["0", "1", "2", ""]
    assert torch.equal(read(path)[-1][1], output.half())
    assert framework.stats().silent == ()


def test_a_scripted_model_has_its_output_and_says_what_it_hides(mlp, path, read):
    scripted = torch.jit.script(mlp)
    with torch.no_grad(), pytest.warns(RuntimeWarning, match="nothing is captured of '0', '1'"):
        with capture_activations(scripted, path) as framework:
            scripted(X)
    assert [name for name, _ in read(path)] == [""]
    assert framework.stats().silent == ("0", "1", "2")


def test_a_model_is_let_go_after_the_block(path):
    """After the block the framework no longer keeps the model alive."""
    model = nn.Linear(6, 3)
    with torch.no_grad(), capture_activations(model, path) as framework:
        model(X)
    alive = weakref.ref(model)
    del model
    gc.collect()
    assert alive() is None
    assert framework.stats().steps == 1


def test_hooks_of_others_run_before_or_after_the_capture(mlp, path):
    """Results of hooks registered before the block are captured, those of later hooks are not."""

    def doubled(module: nn.Module, args: object, output: Tensor) -> Tensor:
        return output * 2

    with torch.no_grad():
        plain = mlp[0](X)
        handle = mlp[0].register_forward_hook(doubled)
        with capture_activations(mlp, path):
            mlp[2].register_forward_hook(doubled)
            last = mlp(X)
        handle.remove()
    with ActivationReader(path) as reader:
        assert torch.equal(reader["0"][0].to_torch(), (plain * 2).half())
        assert torch.equal(reader["2"][0].to_torch(), (last / 2).half())
        assert torch.equal(reader[""][0].to_torch(), last.half())
