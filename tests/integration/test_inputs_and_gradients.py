"""Captures of the inputs of modules, and of the gradients of their outputs."""

from __future__ import annotations

import contextlib
import copy
import gc
import threading
import weakref
from collections import defaultdict
from typing import Any

import pytest
import torch
from llm_instrumentation import (
    ActivationReader,
    InstrumentationConfig,
    InstrumentationFramework,
    capture_activations,
)
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers_cache import CACHE_NAME

pytestmark = pytest.mark.usefixtures("each_kind_of_hooks")


def whole() -> InstrumentationConfig:
    """A configuration that stores all tensors bit for bit."""
    return InstrumentationConfig.balanced().with_float32()


def captured(path) -> dict[str, list[Tensor]]:
    """The tensors of a capture by name, in capture order."""
    found: dict[str, list[Tensor]] = defaultdict(list)
    with ActivationReader(path) as reader:
        for activation in reader:
            found[activation.name].append(activation.to_torch())
    return dict(found)


def expect_equal(got: dict[str, list[Tensor]], expected: dict[str, list[Tensor]]) -> None:
    assert got.keys() == expected.keys()
    for name, tensors in expected.items():
        assert len(got[name]) == len(tensors), name
        for one, other in zip(got[name], tensors, strict=True):
            assert one.dtype == other.dtype, name
            assert torch.equal(one, other), name


class Mixed(nn.Module):
    """Takes positional and keyword tensors, tensors in a list, and other objects."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor, flag: bool, y: Any = None, *, mask: Tensor, cache: Any = None):
        return self.inner(x) * mask + sum(y or [])


X = torch.arange(8.0).reshape(2, 4)


# ---- inputs -----------------------------------------------------------------------


def test_inputs_have_the_names_of_their_places(path):
    model, mask = Mixed(), torch.ones(4)
    with torch.no_grad(), capture_activations(model, path, config=whole().with_inputs()):
        out = model(X, True, [X + 1, X + 2], mask=mask)
    got = captured(path)
    expect_equal(
        got,
        {
            "!input": [X],
            "[2][0]!input": [X + 1],
            "[2][1]!input": [X + 2],
            "['mask']!input": [mask],
            "inner!input": [X],
            "inner": got["inner"],
            "": [out],
        },
    )
    with ActivationReader(path) as reader:
        assert next(a.name for a in reader) == "!input"  # an input comes before the outputs
        assert {(a.step, a.call) for a in reader} == {(0, 0)}


def test_an_input_has_the_values_from_before_the_module_changes_them(path):
    model = nn.Sequential(nn.Identity(), nn.ReLU(inplace=True))
    given = torch.tensor([-1.0, 2.0])
    with torch.no_grad(), capture_activations(model, path, config=whole().with_inputs()):
        model(given)
    got = captured(path)
    assert got["1!input"][0].tolist() == [-1.0, 2.0]
    assert got["1"][0].tolist() == [0.0, 2.0]


def test_each_call_of_a_shared_module_has_its_input(path):
    shared = nn.Linear(4, 4)
    model = nn.Sequential(shared, nn.ReLU(), shared)
    with torch.no_grad(), capture_activations(model, path, config=whole().with_inputs()):
        for _ in range(2):
            model(X)
    with ActivationReader(path) as reader:
        inputs = [(a.step, a.call, a.to_torch()) for a in reader["0!input"]]
        outputs = [(a.step, a.call) for a in reader["0"]]
        relu = [a.to_torch() for a in reader["1"]]
    assert outputs == [at[:2] for at in inputs] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert torch.equal(inputs[0][2], X) and torch.equal(inputs[1][2], relu[0])


def test_inputs_of_a_real_model_are_what_plain_hooks_see(minilm, path):
    expected: dict[str, list[Tensor]] = defaultdict(list)
    handles = []
    for name, module in minilm.model.named_modules():

        def keep(module: nn.Module, args: Any, kwargs: Any, name: str = name) -> None:
            for i, value in enumerate(args):
                if isinstance(value, Tensor):
                    at = f"{name}[{i}]" if i else name
                    expected[f"{at}!input"].append(value.detach().clone())
            for key, value in kwargs.items():
                if isinstance(value, Tensor):
                    expected[f"{name}[{key!r}]!input"].append(value.detach().clone())

        handles.append(module.register_forward_pre_hook(keep, with_kwargs=True))
    config = whole().with_inputs()
    with torch.no_grad(), capture_activations(minilm.model, path, config=config):
        minilm.model(**minilm.inputs)
    for handle in handles:
        handle.remove()
    got = {name: of for name, of in captured(path).items() if name.endswith("!input")}
    assert len(got) > 60
    expect_equal(got, dict(expected))


def test_a_capture_warns_of_an_argument_that_cannot_be_walked(path):
    class Odd(dict):
        def items(self):
            raise RuntimeError("no items")

    class Takes(nn.Module):
        def forward(self, x, odd):
            return x

    model = Takes()
    with (
        pytest.warns(RuntimeWarning, match="an input of layer '' is not captured.*no items"),
        capture_activations(model, path, config=whole().with_inputs()) as capture,
    ):
        model(X, Odd(a=X))
    assert capture.stats().failed == 1
    assert captured(path).keys() == {""}
    with ActivationReader(path) as reader:
        assert [m.name for m in reader.missing] == ["!input"]


def test_an_argument_of_an_unknown_type_is_not_called_an_output(path):
    class Holder:
        def __init__(self) -> None:
            self.held = X

    class Takes(nn.Module):
        def forward(self, x: Tensor, holder: Holder) -> Tensor:
            return x

    with (
        pytest.warns(RuntimeWarning, match=r"^objects of these types hold tensors.*Holder"),
        capture_activations(model := Takes(), path, config=whole().with_inputs()),
    ):
        model(X, Holder())


# ---- gradients --------------------------------------------------------------------


@contextlib.contextmanager
def retaining(model: nn.Module):
    """Collects the outputs of all modules, with `retain_grad`: torch itself keeps the gradients."""
    kept: list[tuple[str, Tensor]] = []
    handles = []
    for name, module in model.named_modules():

        def keep(module: nn.Module, args: Any, output: Any, name: str = name) -> None:
            output = output[0] if isinstance(output, tuple) else output
            output = getattr(output, "logits", output)
            output = getattr(output, "last_hidden_state", output)
            if isinstance(output, Tensor) and output.requires_grad:
                output.retain_grad()
                kept.append((name, output))

        handles.append(module.register_forward_hook(keep))
    yield kept
    for handle in handles:
        handle.remove()


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "bert", "mixtral"])
def test_gradients_are_those_that_torch_computes(build, ids, path, architecture):
    model = build(architecture)
    config = whole().with_gradients()
    with retaining(model) as kept, capture_activations(model, path, config=config):
        out = model(ids)
        getattr(out, "logits", out[0]).square().mean().backward()
    got = captured(path)
    assert len(kept) > 20
    for name, tensor in kept:
        if tensor.grad is not None:
            gradients = [g for n, of in got.items() if n.endswith("!grad") for g in of
                         if n.partition("[")[0].removesuffix("!grad") == name]  # fmt: skip
            assert any(torch.equal(tensor.grad, g) for g in gradients), name


def test_gradients_belong_to_the_step_of_their_forward_pass(path):
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    config = whole().with_gradients()
    framework = InstrumentationFramework(config)
    framework.instrument_model(model)
    with framework.capture_activations(path, track_per_token=True) as tracker:
        first = model(X)
        tracker.record_token(1, "a")
        second = model(X + 1)
        second.sum().backward()  # the backward passes come in reverse order
        first.sum().backward()
    with ActivationReader(path) as reader:
        assert [(a.step, a.token, a.call) for a in reader["0!grad"]] == [(1, 1, 0), (0, 0, 0)]
        assert torch.equal(reader["1!grad"].at(step=0).to_torch(), torch.ones(2, 4))


def test_accumulated_and_repeated_backward_passes_give_a_gradient_each(path):
    model = nn.Linear(4, 4)
    with capture_activations(model, path, config=whole().with_gradients()):
        loss = model(X).sum()
        loss.backward(retain_graph=True)
        (3 * loss).backward()
    assert [g.unique().tolist() for g in captured(path)["!grad"]] == [[1.0], [3.0]]


def test_second_derivatives_are_captured_too(path):
    model = nn.Linear(4, 1)
    with capture_activations(model, path, config=whole().with_gradients()):
        y = model(X).pow(3).sum()
        (g,) = torch.autograd.grad(y, model.weight, create_graph=True)
        g.square().sum().backward()
    assert len(captured(path)["!grad"]) == 2


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_modules_give_each_gradient_once(path, reentrant):
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(4, 4), nn.ReLU())

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.inner, x, use_reentrant=reentrant)

    model = Checkpointed()
    plain = copy.deepcopy(model)
    with retaining(plain) as kept:
        plain.inner(X).sum().backward()
    expected = {name: tensor.grad for name, tensor in kept}
    with capture_activations(model, path, config=whole().with_gradients()):
        model(X.clone().requires_grad_()).sum().backward()
    got = captured(path)
    for name in ("inner.0", "inner.1"):
        (gradient,) = got[f"{name}!grad"]
        assert torch.equal(gradient, expected[name])


def test_an_output_that_is_changed_in_place_keeps_its_own_gradient(path):
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True))
    with torch.no_grad():
        model[0].weight.copy_(torch.eye(4))
        model[0].bias.fill_(-3.5)
    with capture_activations(model, path, config=whole().with_gradients()):
        (model(X) * 2).sum().backward()
    got = captured(path)
    assert torch.equal(got["1!grad"][0], torch.full((2, 4), 2.0))
    assert torch.equal(got["0!grad"][0], 2.0 * (X > 3.5))


def test_the_gradient_of_a_leaf_is_of_no_step(path):
    """The gradient is the sum over all uses of the leaf, so it belongs to no single step."""
    model, leaf = nn.Sequential(nn.Identity(), nn.Linear(4, 1)), X.clone().requires_grad_()
    with capture_activations(model, path, config=whole().with_gradients()):
        first, second = model(leaf), model(leaf)
        (first.sum() + 2 * second.sum()).backward()
        model(leaf).sum().backward()
    with ActivationReader(path) as reader:
        gradients = list(reader["0!grad"])
        assert [(a.step, a.token, a.call) for a in gradients] == [(None, None, 0)] * 2
        assert torch.allclose(gradients[0].to_torch(), 3 * gradients[1].to_torch())
        assert [a.step for a in reader["1!grad"]] == [1, 0, 2]
    assert not leaf._backward_hooks


def test_nothing_is_captured_after_the_block(path):
    """A backward pass after the block gives no gradients. The capture warns of it."""
    model = nn.Linear(4, 4)
    with (
        pytest.warns(RuntimeWarning, match="no gradient was computed.*call backward within"),
        capture_activations(model, path, config=whole().with_gradients()),
    ):
        loss = model(X).sum()
    loss.backward()
    assert captured(path).keys() == {""}


def test_a_block_without_gradients_says_so(path):
    with (
        pytest.warns(RuntimeWarning, match="no gradient was computed.*no_grad"),
        torch.no_grad(),
        capture_activations(model := nn.Linear(4, 4), path, config=whole().with_gradients()),
    ):
        model(X)


def test_training_goes_as_it_would_without_a_capture(path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.GELU(), nn.Linear(8, 1))
    twin = copy.deepcopy(model)

    def train(model: nn.Module) -> None:
        torch.manual_seed(1)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        for _ in range(5):
            optimizer.zero_grad()
            model(X).square().mean().backward()
            optimizer.step()

    train(twin)
    with capture_activations(model, path, config=whole().with_inputs().with_gradients()):
        train(model)
    for one, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(one, other)
    with ActivationReader(path) as reader:
        assert [a.step for a in reader["3!grad"]] == [0, 1, 2, 3, 4]


def test_threads_keep_their_gradients_apart(path):
    model = nn.Linear(4, 4)

    def one(k: int) -> None:
        for _ in range(20):
            (model(X + k) * k).sum().backward()

    with capture_activations(model, path, config=whole().with_inputs().with_gradients()):
        threads = [threading.Thread(target=one, args=(k,)) for k in range(1, 5)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    with ActivationReader(path) as reader:
        given = {a.step: int(a.to_torch()[0, 0]) for a in reader["!input"]}
        gradients = {a.step: a.to_torch().unique().tolist() for a in reader["!grad"]}
    assert sorted(given.values()) == sorted([1, 2, 3, 4] * 20)
    assert gradients == {step: [float(k)] for step, k in given.items()}


def test_outputs_that_lead_to_no_loss_have_no_gradient(path):
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.a(x), self.b(x).detach()

    model = Two()
    with capture_activations(model, path, config=whole().with_gradients()):
        first, _second = model(X)
        (first.sum() * 5).backward()
    got = captured(path)
    assert got.keys() == {"a", "b", "", "[1]", "a!grad", "!grad"}  # b leads to no loss
    assert got["!grad"][0].unique().tolist() == [5.0]


def test_only_the_parts_of_a_split_that_lead_to_a_loss_have_gradients(path):
    class Split(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            return x.split(2, dim=-1)  # one node of the autograd graph gives all parts

    model = nn.Sequential(nn.Linear(4, 4), Split())
    with capture_activations(model, path, config=whole().with_gradients()):
        first, _second = model(X)
        (first.sum() * 5).backward()
        _first, second = model(X)
        (second.sum() * 7).backward()
    with ActivationReader(path) as reader:
        for name, step, value in ("1!grad", 0, 5.0), ("1[1]!grad", 1, 7.0):
            (gradient,) = reader[name]
            assert (gradient.step, gradient.to_torch().unique().tolist()) == (step, [value])
        assert len(reader["0!grad"]) == 2


def test_a_capture_with_gradients_lets_go_of_the_model(path):
    model = nn.Sequential(nn.Linear(4, 4))
    with capture_activations(model, path, config=whole().with_gradients()) as framework:
        model(X).sum().backward()
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None and framework.stats().packets == 4


def test_a_call_that_raised_leaves_inputs_and_outputs_in_step(path):
    class Retries(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.may_fail = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            with contextlib.suppress(RuntimeError):
                self.may_fail(x[:, :3])  # this shape is wrong
            return self.may_fail(x)

    with (
        torch.no_grad(),
        capture_activations(model := Retries(), path, config=whole().with_inputs()),
    ):
        model(X)
    with ActivationReader(path) as reader:
        assert [(a.call, a.shape) for a in reader["may_fail!input"]] == [(0, (2, 3)), (1, (2, 4))]
        assert [a.call for a in reader["may_fail"]] == [1]


def test_inputs_of_a_module_that_calls_itself_are_told_apart(path):
    class Twice(nn.Module):
        def forward(self, x: Tensor, again: bool) -> Tensor:
            return self(x + 1, False) if again else x * 2

    with torch.no_grad(), capture_activations(model := Twice(), path, config=whole().with_inputs()):
        model(X, True)
        model(X, False)
    with ActivationReader(path) as reader:
        assert [(a.step, a.call) for a in reader["!input"]] == [(0, 0), (0, 1), (1, 0)]
        assert torch.equal(reader["!input"].at(step=0, call=1).to_torch(), X + 1)
        assert len({(a.step, a.call) for a in reader[""]}) == 3


def test_caches_are_no_inputs(llama, ids, path):
    config = whole().with_kv_cache().with_inputs()
    with torch.no_grad(), capture_activations(llama, path, config=config):
        llama.generate(ids, max_new_tokens=2, do_sample=False)
    with ActivationReader(path) as reader:
        caches = [name for name in reader.layers if f"['{CACHE_NAME}']" in name]
        assert caches and not [name for name in caches if "!input" in name]


@pytest.mark.parametrize("cut", ["with_last_position", "with_sampling"])
def test_batched_gradients_cannot_be_cut(path, cut):
    """With a vectorized Jacobian, sampled or last-position gradients are noted with a warning."""
    model = nn.Linear(2, 2)
    config = getattr(whole().with_gradients(), cut)(*([0.5] if cut == "with_sampling" else []))
    x = torch.ones(1, 3, 2)
    with (
        pytest.warns(RuntimeWarning, match="a gradient of layer '' is not captured"),
        capture_activations(model, path, config=config) as capture,
    ):
        torch.autograd.functional.jacobian(lambda x: model(x), x, vectorize=True)
        model(x)  # the capture goes on
    assert capture.stats().tensors == 2 and capture.stats().failed >= 1
