"""The operator is named that made the first value that is not finite."""

from __future__ import annotations

import pytest
import small_models
import torch
from llm_instrumentation import InstrumentationConfig
from llm_instrumentation.errors import NotFoundError, NotReproducedError, UnsupportedError
from llm_instrumentation.flight import flight_recorder, narrow
from torch import nn

IDS = torch.arange(2, 14).reshape(2, 6)


class Entropy(nn.Module):
    """Its logarithm is infinite where a value is 0, and 0 * inf is NaN."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, values, *, power=1):
        shares = torch.relu(values) ** power * self.scale
        logs = shares.log()
        shares.mul_(logs)  # in place
        return shares.view(-1, 4).sum(-1)


class Masked(nn.Module):
    """Infinities behind a mask are healthy; the fault is another one."""

    def forward(self, scores, factor):
        masked = scores.masked_fill(torch.ones(4, 4).triu(1).bool(), -torch.inf)
        return masked.softmax(-1) / factor


def dumped(model, tmp_path, *calls, config=None):
    config = config or InstrumentationConfig.fast_capture().with_inputs().with_float32()
    with torch.no_grad(), flight_recorder(model, tmp_path / "run", config=config) as recorder:
        for call in calls:
            call()
    (dump,) = recorder.dumps
    return dump.path


def test_a_logarithm_of_zero(tmp_path):
    model = nn.Sequential(nn.Identity(), Entropy())
    good, bad = torch.rand(3, 4) + 0.1, torch.tensor([[0.5, 0.5, -1.0, 0.5]])
    path = dumped(model, tmp_path, lambda: model(good), lambda: model(bad))
    found = narrow(model, path)
    assert (found.operator, found.module) == ("aten.log.default", "1")
    (operand,) = found.operands
    assert (operand.least, operand.largest, operand.not_finite) == (0.0, 0.5, 0)
    assert operand.name is None and operand.shape == found.shape == (1, 4)
    assert found.not_finite == 1 and found.offender.layer == "1" and found.offender.step == 1


def test_healthy_infinities_are_not_named(tmp_path):
    model = nn.ModuleDict({"attend": Masked()})
    scores, good, bad = torch.randn(4, 4), torch.ones(4, 4), torch.zeros(4, 4)
    path = dumped(
        model, tmp_path, lambda: model["attend"](scores, good),
        lambda: model["attend"](scores, factor=bad),
    )  # fmt: skip
    assert narrow(model, path).operator == "aten.div.Tensor"


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "bert", "mixtral"])
def test_a_parameter_of_a_model(architecture, tmp_path):
    model = small_models.build(architecture)
    names = [
        name for name, one in model.named_parameters()
        if one.ndim == 2 and ("layers.1" in name or "layer.1" in name or "h.1" in name)
    ]  # fmt: skip
    name = names[-1]
    layer = name.rpartition(".")[0]

    def spoil():
        model.get_parameter(name)[0, 0] = torch.inf
        model(input_ids=IDS)

    path = dumped(model, tmp_path, lambda: model(input_ids=IDS), spoil)
    found = narrow(model, path)
    assert found.module == layer == found.offender.layer
    assert found.operator.startswith("aten.") and "mm" in found.operator
    spoiled = [one for one in found.operands if one.not_finite]
    assert [(one.name, one.not_finite) for one in spoiled] == [(name, 1)]


def test_a_layer_of_which_only_the_whole_was_captured(tmp_path):
    model = small_models.build("llama")
    config = InstrumentationConfig.fast_capture().with_inputs().with_float32()
    config = config.with_layers(include=["model.layers.?"])
    inner = model.model.layers[1].post_attention_layernorm

    def spoil():
        inner.weight[3] = 1e38  # finite, and the next product is not
        model.model.layers[1].mlp.gate_proj.weight.mul_(1e3)
        model(input_ids=IDS, use_cache=False)

    path = dumped(
        model, tmp_path, lambda: model(input_ids=IDS, use_cache=False), spoil, config=config
    )
    found = narrow(model, path)
    assert found.offender.layer == "model.layers.1"
    assert found.module == "model.layers.1.mlp.gate_proj"
    assert not any(one.not_finite for one in found.operands)
    assert max(one.largest for one in found.operands) > 1e30


def test_what_cannot_be_told(tmp_path):
    model = nn.Sequential(nn.Identity(), Entropy())
    bad = torch.tensor([[0.5, 0.5, -1.0, 0.5], [0.3, 0.3, 0.3, 0.1]])
    plain = InstrumentationConfig.fast_capture().with_float32()
    without = dumped(model, tmp_path / "a", lambda: model(bad), config=plain)
    with pytest.raises(NotFoundError, match=r"no inputs of '1': capture them .*with_inputs"):
        narrow(model, without)
    path = dumped(model, tmp_path / "b", lambda: model(bad))
    assert narrow(model, path).operator == "aten.log.default"
    with pytest.raises(NotFoundError, match="no module '1'"):
        narrow(nn.Sequential(nn.Identity()), path)
    for scale, told in ((-1, "other values that are not finite"), (1.1, "differs by")):
        with torch.no_grad():
            model[1].scale.fill_(scale)  # other weights
        with pytest.raises(NotReproducedError, match=told):
            narrow(model, path)
    with torch.no_grad(), flight_recorder(model, tmp_path / "c") as recorder:
        model(bad[1:])
        recorder.dump()
    with pytest.raises(NotFoundError, match="all values are finite"):
        narrow(model, recorder.dumps[0].path)


def test_dropout_is_not_guessed(tmp_path):
    class Drops(nn.Module):
        def forward(self, x):
            return torch.dropout(x, 0.5, True) / 0.0

    model = nn.Sequential(nn.Identity(), Drops())
    path = dumped(model, tmp_path, lambda: model(torch.ones(8, 8)))
    with pytest.raises(NotReproducedError):
        narrow(model, path)


def test_gradients_and_given_values_are_refused(tmp_path):
    model = nn.Sequential(nn.Linear(2, 2))
    path = dumped(model, tmp_path, lambda: model(torch.full((1, 2), torch.nan)))
    with pytest.raises(UnsupportedError, match="is given to the module"):
        narrow(model, path)
