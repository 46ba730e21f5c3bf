"""Steps of models of which parts are compiled, and what compiled code cannot pass to a capture."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from llm_instrumentation import (
    ActivationReader,
    InstrumentationConfig,
    capture_activations,
    prepare,
)
from llm_instrumentation.errors import UnsupportedError
from torch import nn

pytestmark = pytest.mark.skipif(
    torch.__version__ < "2.13", reason="compiled code is captured from torch 2.13 on"
)
X = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def _fresh():
    torch.manual_seed(0)
    torch._dynamo.reset()
    with torch.no_grad():
        yield
    torch._dynamo.reset()


def compiled(function: Any) -> Any:
    return torch.compile(function, backend="aot_eager")


def configuration(where: str) -> InstrumentationConfig:
    return InstrumentationConfig.balanced().with_float32().with_compiled(where)


def contents(path) -> list[tuple[str, int | None, int, torch.Tensor]]:
    with ActivationReader(path) as reader:
        return [(one.name, one.step, one.call, one.to_torch()) for one in reader]


def steps(found) -> list[tuple[str, int | None, int]]:
    return [one[:3] for one in found]


class Tower(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(6, 6)

    def forward(self, x):
        return torch.tanh(self.inner(x))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.tower, self.head = Tower(), nn.Linear(6, 3)

    def encode(self, x):
        return self.head(self.tower(x))

    def forward(self, x):
        return self.encode(x)


# ---- steps ------------------------------------------------------------------------


def tower_in_place(model):
    model.tower.compile(backend="aot_eager")


def tower_wrapped(model):
    model.tower = compiled(model.tower)


def tower_by_its_forward(model):
    model.tower.forward = compiled(model.tower.forward)


def head_in_place(model):  # a class of torch.nn, whose hooks are compiled with it
    model.head.compile(backend="aot_eager")


def method_and_forward(model):
    model.encode, model.forward = compiled(model.encode), compiled(model.forward)


def method_and_head(model):
    model.encode = compiled(model.encode)
    head_in_place(model)


@pytest.mark.parametrize("where", ["auto", "inside", "eager"])
@pytest.mark.parametrize(
    "compile_it",
    [
        tower_in_place, tower_wrapped, tower_by_its_forward, head_in_place, method_and_forward,
        method_and_head,
    ],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:the model is compiled. it runs eagerly")
def test_each_call_of_a_method_is_a_step(compile_it, where, tmp_path):
    """As in CLIP's get_text_features, which calls one part and then another."""
    model = Model().eval()

    def run():
        model.encode(X)
        model.encode(X * 2)
        model(X * 3)

    with capture_activations(model, tmp_path / "plain", config=configuration("eager")):
        run()
    compile_it(model)
    with capture_activations(model, tmp_path / "compiled", config=configuration(where)):
        run()
    expected, found = contents(tmp_path / "plain"), contents(tmp_path / "compiled")
    assert steps(found) == steps(expected)
    assert {step for _, step, _ in steps(found)} == {0, 1, 2}
    for (*_, value), (*_, other) in zip(expected, found, strict=True):
        torch.testing.assert_close(other, value)


@pytest.mark.parametrize("place", ["in place", "forward"])
def test_a_forward_that_is_called_past_the_hooks_is_a_step(place, tmp_path):
    model = Model().eval()
    if place == "in place":
        model.compile(backend="aot_eager")
    else:
        model.forward = compiled(model.forward)
    with capture_activations(model, tmp_path / "run"):
        model.forward(X)
        model.forward(X)
        model(X)
    inner = [step for name, step, _ in steps(contents(tmp_path / "run")) if name == "tower"]
    assert inner == [0, 1, 2]


def test_each_call_of_a_compiled_function_of_parts_is_a_step(tmp_path):
    model = Model().eval()
    model.compile(backend="aot_eager")
    function = compiled(lambda x: model.head(model.tower(x)) + model.head(x))
    with capture_activations(model, tmp_path / "run", config=configuration("inside")):
        function(X)
        model(X)
        function(X)
    found = steps(contents(tmp_path / "run"))
    assert [step for name, step, _ in found if name == "tower"] == [0, 1, 2]
    assert [(step, call) for name, step, call in found if name == "head"] == [
        (0, 0), (0, 1), (1, 0), (2, 0), (2, 1),
    ]  # fmt: skip


def test_blocks_that_are_compiled_in_a_compiled_model(tmp_path):
    model = Model().eval()
    tower_in_place(model)
    outer = torch.compile(model, backend="aot_eager", fullgraph=True)
    with capture_activations(outer, tmp_path / "run", config=configuration("inside")):
        outer(X)
    assert {name for name, *_ in contents(tmp_path / "run")} == {
        "", "head", "tower", "tower.inner",
    }  # fmt: skip


# ---- what cannot be emitted -------------------------------------------------------


class Region(nn.Module):
    """A layer whose compiled code is that of the first layer, for all of them."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(6, 6)

    @torch.compiler.nested_compile_region
    def forward(self, x):
        return x + torch.relu(self.up(x))


def test_a_model_of_regions_keeps_its_values(tmp_path):
    model = nn.Sequential(Region(), Region(), Region()).eval()
    expected = model(X)
    outer = compiled(model)
    outputs = []
    with (
        pytest.warns(
            RuntimeWarning, match=r"eagerly .* Region\.forward is a nested_compile_region"
        ),
        capture_activations(outer, tmp_path / "run", config=configuration("auto")),
    ):
        outputs.append(outer(X))
    torch.testing.assert_close(outputs[0], expected)
    last = next(value for name, _, _, value in contents(tmp_path / "run") if name == "2")
    torch.testing.assert_close(last, expected)
    with pytest.raises(UnsupportedError, match="nested_compile_region"):
        prepare(outer, configuration("inside"))


class Complex(nn.Module):
    def forward(self, x):
        return torch.complex(x, x + 1)


class Wrapping(nn.Module):
    def forward(self, x):
        from torch.testing._internal.two_tensor import TwoTensor

        return TwoTensor(x, x + 1)


class Around(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner, self.last = inner, nn.Linear(6, 6)

    def forward(self, x):
        found = self.inner(x)
        return self.last(found.real if found.is_complex() else found.a)


@pytest.mark.parametrize(("inner", "told"), [(Complex, "torch.complex64"), (Wrapping, "TwoTensor")])
def test_tensors_that_the_compiler_cannot_pass_on_are_told(inner, told, tmp_path):
    model = Around(inner()).eval()
    expected = model(X)
    outer = compiled(model)
    outputs = []
    with pytest.warns(RuntimeWarning, match=rf"not captured: {told} inside compiled code"):
        with capture_activations(outer, tmp_path / "run", config=configuration("inside")):
            outputs.append(outer(X))
    torch.testing.assert_close(outputs[0], expected)
    assert {name for name, *_ in contents(tmp_path / "run")} == {"", "last"}


def test_a_hook_that_is_added_behind_a_prepared_one_is_told(tmp_path):
    model = Model().eval()
    outer = compiled(model)
    prepared = prepare(outer, configuration("inside"))
    handle = model.head.register_forward_hook(lambda module, args, output: output * 2)
    with pytest.warns(RuntimeWarning, match="a Linear got a hook after an earlier prepare"):
        with capture_activations(outer, tmp_path / "run", config=configuration("inside")):
            outer(X)
    prepared.close()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with (
            prepare(outer, configuration("inside")),
            capture_activations(outer, tmp_path / "again", config=configuration("inside")),
        ):
            changed = outer(X)
    handle.remove()
    head = next(value for name, _, _, value in contents(tmp_path / "again") if name == "head")
    torch.testing.assert_close(head, changed)


@pytest.mark.parametrize("mode", [torch.inference_mode, lambda: torch.device("meta")])
def test_a_capture_that_is_opened_in_another_mode(mode, tmp_path):
    model = Model().eval()
    outer = compiled(model)
    with mode():
        capture = capture_activations(outer, tmp_path / "run", config=configuration("inside"))
        capture.__enter__()
    outer(X)
    with torch.inference_mode():
        outer(X)
    capture.__exit__(None, None, None)
    assert [step for name, step, _ in steps(contents(tmp_path / "run")) if name == "head"] == [0, 1]
