"""What hooks cannot capture is noted, warned of or refused."""

from __future__ import annotations

import warnings
from types import SimpleNamespace

import pytest
import torch
from hooked_models import hooks_of
from llm_instrumentation import ActivationReader, InstrumentationConfig, capture_activations
from llm_instrumentation.errors import CaptureError, UnsupportedError
from torch import Tensor, nn


class Returns(nn.Module):
    """Returns a tensor of its layer, and the object that it was made with."""

    def __init__(self, output: object) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.output = output

    def forward(self, x: Tensor) -> tuple[Tensor, object]:
        return self.layer(x), self.output


class Wrapper(Tensor):
    """A tensor that holds another one and has no memory of its own."""

    @staticmethod
    def __new__(cls, held: Tensor) -> Wrapper:
        made = Tensor._make_wrapper_subclass(cls, held.shape, dtype=held.dtype)
        made.held = held
        return made

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        held = (arg.held if isinstance(arg, Wrapper) else arg for arg in args)
        return cls(function(*held, **(kwargs or {})))


UNSUPPORTED = {
    "meta": lambda: torch.empty(3, 4, device="meta"),
    "wrapper": lambda: Wrapper(torch.ones(3)),
}


@pytest.mark.parametrize("rate", [None, 0.5])
@pytest.mark.parametrize("kind", UNSUPPORTED)
def test_a_tensor_that_cannot_be_stored_is_noted(kind, rate, path):
    model, x = Returns(UNSUPPORTED[kind]()), torch.randn(4, 6)
    config = InstrumentationConfig.balanced()
    if rate is not None:
        config.with_sampling(rate)
    with torch.no_grad(), pytest.warns(RuntimeWarning, match="output of layer '' is not") as told:
        with capture_activations(model, path, config=config) as framework:
            for _ in range(3):
                output = model(x)
    assert output[1] is model.output
    assert len(told) == 1  # one warning for each layer and reason, not for each step
    stats = framework.stats()
    assert (stats.failed, stats.tensors) == (3, 6)
    with ActivationReader(path) as reader:
        assert [(a.name, a.step) for a in reader.missing] == [("[1]", n) for n in range(3)]
        assert all(a.error for a in reader.missing)
        assert [a.name for a in reader] == ["layer", ""] * 3
        if rate is None:
            assert torch.equal(reader[""][2].to_torch(), output[0].half())


def test_transformed_calls_are_noted(mlp, path, read):
    """Inside torch.func tensors wrap other tensors and have no values to capture."""
    model = nn.Sequential(mlp[0], nn.Tanh())
    with pytest.warns(RuntimeWarning, match=r"wraps others .* as in torch\.func"):
        with capture_activations(model, path) as framework:
            model(torch.ones(2, 6))
            torch.func.vmap(model)(torch.ones(5, 2, 6))
    assert framework.stats().failed == 3
    assert [name for name, _ in read(path)] == ["0", "1", ""]


def test_a_dense_tensor_between_others(path, read):
    """A layer may return dense tensors and tensors without values in turn."""
    model, x = nn.Sequential(nn.Identity()), torch.eye(3)
    with pytest.warns(RuntimeWarning, match="no values to capture"):
        with capture_activations(model, path) as framework:
            for output in (x, x.to("meta"), x, x.to("meta"), x):
                model(output)
    assert framework.stats().failed == 4
    assert [name for name, _ in read(path)] == ["0", ""] * 3
    assert all(torch.equal(value, x.half()) for _, value in read(path))


def test_a_name_that_is_too_long_costs_only_that_output(path, read):
    """A packet's name has at most 65,535 bytes. Other outputs are captured."""

    class Keys(nn.Module):
        def forward(self, x: Tensor, key: str) -> dict[str, Tensor]:
            return {"before": x, key: x + 1, "behind": x + 2}

    model, x = Keys(), torch.eye(3)
    keys = ["short", "k" * 70_000, "k" * 70_000, "l" * 70_000, "short"]
    with pytest.warns(RuntimeWarning, match=r"output of layer '' is not .* at most 65535") as told:
        with capture_activations(model, path) as framework:
            for key in keys:
                model(x, key)
    assert len(told) == 1  # one warning for all names of the layer
    stats = framework.stats()
    assert (stats.failed, stats.tensors) == (3, 12)
    with ActivationReader(path) as reader:
        assert [a.step for a in reader.missing] == [1, 2, 3]
        for missing in reader.missing:
            letter = "l" if missing.step == 3 else "k"
            assert missing.path.startswith(f"['{letter * 100}") and len(missing.path) < 1000
            assert "at most 65535" in missing.error
        for name in ("['before']", "['behind']"):
            assert [a.step for a in reader[name]] == [0, 1, 2, 3, 4]
        assert [a.step for a in reader["['short']"]] == [0, 4]


def test_names_that_are_never_the_same_do_not_end_the_capture(path):
    """The library keeps the names of all layers, up to 64 MiB.

    Beyond that, outputs with new names are counted as failed. Other outputs are captured.
    """

    class Keys(nn.Module):
        def forward(self, x: Tensor, key: str) -> dict[str, Tensor]:
            return {"before": x, key: x + 1, "behind": x + 2}

    model, x, calls = Keys(), torch.eye(3), 600
    with pytest.warns(RuntimeWarning, match="names made anew for each tensor") as told:
        with capture_activations(model, path) as framework:
            for i in range(calls):
                model(x, f"{i}" + "k" * 60_000)
    stats = framework.stats()
    assert len(told) == 1 and 0 < stats.failed < 100
    assert stats.tensors == 3 * calls - stats.failed
    with ActivationReader(path) as reader:
        assert len(reader["['behind']"]) == calls
        assert len(reader.missing) == stats.failed


def test_a_name_that_cannot_be_written_costs_only_that_output(path):
    class Odd(str):
        def __repr__(self) -> str:
            return "\ud800\0"

    model = Returns({Odd("k"): torch.ones(3), "behind": torch.zeros(3)})
    with torch.no_grad(), pytest.warns(RuntimeWarning, match="is not captured: .*not UTF-8"):
        with capture_activations(model, path):
            model(torch.randn(4, 6))
    with ActivationReader(path) as reader:
        assert [a.name for a in reader] == ["layer", "", "[1]['behind']"]
        assert [a.path for a in reader.missing] == ["[1][\\ud800\\0]"]


def test_an_output_that_cannot_be_walked_costs_only_that_output(path, read):
    class Broken(dict):
        def items(self) -> object:
            raise KeyError("mine")

    model = Returns(Broken())
    with torch.no_grad(), pytest.warns(RuntimeWarning, match=r"is not captured: .*KeyError\('mine"):
        with capture_activations(model, path) as framework:
            model(torch.randn(4, 6))
            model(torch.randn(4, 6))
    assert framework.stats().failed == 2
    assert [name for name, _ in read(path)] == ["layer", "layer"]


def test_a_layer_is_warned_of_once_for_each_kind_of_error(path):
    """Errors with different texts give one warning. The index has each text."""

    class Broken(dict):
        def items(self) -> object:
            count.append(1)
            if len(count) % 2:
                raise KeyError(f"the {len(count)}th")
            raise ValueError(f"the {len(count)}th")

    class Named(dict):
        def items(self) -> object:
            count.append(1)
            return [("k" * 70_000 + str(len(count)), torch.ones(3))]

    for output, kinds in ((Broken(), 2), (Named(), 1), ({"a": torch.eye(3).to("meta")}, 1)):
        model, count = Returns(output), []
        with torch.no_grad(), warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            with capture_activations(model, path):
                for _ in range(10):
                    model(torch.randn(4, 6))
        assert len(told) == kinds
        with ActivationReader(path) as reader:
            assert len(reader.missing) == 10


def test_a_tensor_that_cannot_be_stored_does_not_hide_those_behind_it(path, read):
    class Three(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            return x, x.to("meta"), x + 1

    model, x = Three(), torch.eye(3)
    with pytest.warns(RuntimeWarning, match="no values to capture"):
        with capture_activations(model, path) as framework:
            model(x)
    assert framework.stats().failed == 1
    assert [name for name, _ in read(path)] == ["", "[2]"]
    assert torch.equal(dict(read(path))["[2]"], (x + 1).half())


def test_strict_captures_raise_inside_the_model(path, read):
    """With `with_strict` an output that cannot be captured raises out of the model's call."""
    model = Returns(torch.eye(3).to("meta"))
    config = InstrumentationConfig.balanced().with_strict()
    with torch.no_grad(), pytest.raises(UnsupportedError, match="meta"):
        with capture_activations(model, path, config=config):
            model(torch.randn(4, 6))
    assert [name for name, _ in read(path)] == ["layer", ""]
    assert hooks_of(model) == 0


def test_objects_that_hold_tensors_are_reported(path, read):
    model = Returns(SimpleNamespace(hidden=torch.ones(3)))
    with torch.no_grad(), pytest.warns(RuntimeWarning, match=r"not captured: types\.SimpleName"):
        with capture_activations(model, path):
            model(torch.randn(4, 6))
    assert [name for name, _ in read(path)] == ["layer", ""]


def test_objects_without_tensors_are_passed_over(path, read):
    model = Returns({"name": "x", "n": 3, "none": None, "config": SimpleNamespace(a=1)})
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error")
        with capture_activations(model, path):
            model(torch.randn(4, 6))
    assert [name for name, _ in read(path)] == ["layer", ""]


def test_a_capture_of_nothing_is_an_error(path):
    class Silent(nn.Module):
        def forward(self, x: Tensor) -> None:
            return None

    model = Silent()
    with pytest.raises(CaptureError, match=r"1 forward calls, but no output was captured to .*run"):
        with capture_activations(model, path):
            model(torch.ones(1))
    assert hooks_of(model) == 0


class Refusing(nn.Module):
    """Raises for None before it calls its layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x):
        if x is None:
            raise ValueError("nothing to look at")
        return self.layer(x)


def test_a_call_that_raised_does_not_count_as_hiding_modules(path):
    """The model raises before any module runs. This only gives a warning."""
    with pytest.warns(RuntimeWarning, match="no module ran in the block"):
        with capture_activations(Refusing(), path) as framework:
            with pytest.raises(ValueError, match="nothing to look at"):
                framework._models[0](None)
    assert framework.stats().steps == 1


def test_hidden_modules_are_an_error_also_while_an_exception_is_handled(path):
    """The model's call succeeds without its modules, within an except block."""
    model = Refusing()
    model.forward = lambda x: None
    config = InstrumentationConfig.balanced().with_layers("layer")
    with pytest.raises(CaptureError, match="1 forward calls, but no output was captured"):
        with capture_activations(model, path, config=config):
            try:
                raise ValueError
            except ValueError:
                model(torch.ones(2, 6))


def test_a_block_without_calls_gives_an_empty_capture(mlp, path, read):
    with capture_activations(mlp, path) as framework:
        pass
    assert framework.stats().steps == 0
    assert read(path) == []
