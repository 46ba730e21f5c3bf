"""Captures that take their tensors inside of compiled code, which goes on running."""

from __future__ import annotations

import copy
import gc
import pickle
import re
import threading
import time
import warnings
import weakref

import pytest
import torch
from llm_instrumentation import (
    ActivationReader,
    InstrumentationConfig,
    capture_activations,
    prepare,
)
from llm_instrumentation._native import view_function
from llm_instrumentation.core.files.calls_file import read_calls
from llm_instrumentation.core.hooking.module_hooks import ModuleHooks
from llm_instrumentation.core.recording import monitor
from llm_instrumentation.core.selection import LayerSelectionError
from llm_instrumentation.errors import CaptureError, InvalidArgumentError, UnsupportedError
from llm_instrumentation.interventions import intervene, zero
from torch import nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

pytestmark = pytest.mark.skipif(torch.__version__ < "2.13", reason="this torch captures eagerly")


def inside() -> InstrumentationConfig:
    return InstrumentationConfig.balanced().with_float32().with_compiled("inside")


def eagerly() -> InstrumentationConfig:
    return InstrumentationConfig.balanced().with_float32()


class Counter:
    """A backend that runs the traced graph and counts how often."""

    def __init__(self) -> None:
        self.runs = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[torch.Tensor]):
        def run(*args: torch.Tensor):
            self.runs += 1
            return graph(*args)

        return run


class Block(nn.Module):
    """A block that returns a pair, as the decoder layers of many models."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 16), nn.Linear(16, 6)

    def forward(self, x: torch.Tensor, *, scale: float = 1.0):
        return x + scale * self.down(torch.relu(self.up(x))), None


class Model(nn.Module):
    """Two blocks, of which the second runs twice."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        for block in (*self.blocks, self.blocks[1]):
            x, _ = block(x)
        return {"logits": self.head(x), "hidden": x}


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


@pytest.fixture
def model() -> Model:
    torch.manual_seed(0)
    return Model().eval()


def wrapped(model, **how):
    return torch.compile(model, **how)


def in_place(model, **how):
    model.compile(**how)
    return model


def as_its_forward(model, **how):
    model.forward = torch.compile(model.forward, **how)
    return model


def in_regions(model, **how):
    for block in model.blocks:
        block.compile(**how)
    return model


WAYS = [wrapped, in_place, as_its_forward, in_regions]


def state_of(model):
    """What a capture changes of modules."""
    return [
        (sorted(vars(module)), list(module._forward_hooks), list(module._forward_pre_hooks))
        for module in model.modules()
    ]


def contents(path):
    """The rows of a capture, in their order, and its tensors."""
    with ActivationReader(path) as reader:
        rows = [(a.name, a.step, a.token, a.call, a.shape) for a in reader]
        return rows, [a.to_torch() for a in reader]


def assert_same(path, other):
    rows, tensors = contents(path)
    other_rows, others = contents(other)
    assert rows == other_rows
    assert all(torch.equal(a, b) for a, b in zip(tensors, others, strict=True))


@pytest.mark.parametrize("compiled_by", WAYS)
def test_a_capture_has_what_an_eager_one_has(compiled_by, model, path, tmp_path):
    x, backend = torch.randn(4, 6), Counter()
    with torch.no_grad():
        with capture_activations(model, tmp_path / "eager.stream", config=eagerly()):
            model(x), model(x[:2])
        compiled = compiled_by(model, backend=backend, fullgraph=True)
        with capture_activations(compiled, path, config=inside()) as framework:
            compiled(x), compiled(x[:2])
    assert backend.runs >= 2
    assert framework.stats().silent == ()
    assert_same(path, tmp_path / "eager.stream")


@pytest.mark.parametrize("compiled_by", WAYS)
def test_captures_after_the_first_compile_nothing(compiled_by, model, path):
    x, backend = torch.randn(4, 6), Counter()
    compiled = compiled_by(model, backend=backend, fullgraph=True)
    with torch.no_grad():
        compiled(x)
        with capture_activations(compiled, path, config=inside()):
            compiled(x)
        graphs = counters["stats"]["unique_graphs"]
        for _ in range(20):
            with capture_activations(compiled, path, config=inside(), overwrite=True) as framework:
                compiled(x)
            assert framework.stats().tensors == len(contents(path)[0]) == 12
            compiled(x)
    assert counters["stats"]["unique_graphs"] == graphs
    assert not counters["graph_break"]


@pytest.mark.parametrize("compiled_by", WAYS)
def test_captures_of_a_prepared_model_compile_nothing(compiled_by, model, path):
    x = torch.randn(4, 6)
    compiled = compiled_by(model, backend=Counter(), fullgraph=True)
    with torch.no_grad(), prepare(compiled, inside()):
        expected = compiled(x)["logits"]
        graphs = counters["stats"]["unique_graphs"]
        with capture_activations(compiled, path, config=inside()):
            compiled(x)
        compiled(x)
        assert len(contents(path)[0]) == 12
        with ActivationReader(path) as reader:
            assert torch.equal(reader["head"][0].to_torch(), expected)
    with torch.no_grad(), capture_activations(compiled, path, config=inside(), overwrite=True):
        compiled(x)
    assert len(contents(path)[0]) == 12
    assert counters["stats"]["unique_graphs"] == graphs


def test_captures_and_preparations_leave_the_configuration_as_it_is(model, path):
    compiled = torch.compile(model, backend=Counter(), fullgraph=True)
    for config in (eagerly(), eagerly().with_layers("blocks.*")):
        before = copy.deepcopy(config)
        with torch.no_grad(), prepare(compiled, config):
            compiled(torch.randn(4, 6))
            with capture_activations(compiled, path, config=config, overwrite=True):
                compiled(torch.randn(4, 6))
        assert config == before


def test_a_prepared_model_that_is_closed_runs_its_own_code_again(model):
    x = torch.randn(4, 6)
    compiled, before = torch.compile(model, backend=Counter(), fullgraph=True), state_of(model)
    with torch.no_grad():
        compiled(x)
        prepared = prepare(compiled, inside())
        compiled(x)
        prepared.close()
        prepared.close()
        graphs = counters["stats"]["unique_graphs"]
        compiled(x)
    assert counters["stats"]["unique_graphs"] == graphs
    assert state_of(model) == before


def test_what_cannot_be_prepared_is_an_error(model):
    with pytest.raises(InvalidArgumentError, match="the model is not compiled"):
        prepare(model)
    compiled = torch.compile(model, backend="eager")
    with pytest.raises(InvalidArgumentError, match="eager"):
        prepare(compiled, eagerly().with_compiled("eager"))
    with pytest.raises(UnsupportedError, match="gradients"):
        prepare(compiled, eagerly().with_gradients())
    with pytest.raises(LayerSelectionError, match="nowhere"):
        prepare(compiled, eagerly().with_layers("nowhere"))


@pytest.mark.skipif(not view_function(torch.Tensor), reason="nothing runs in C here")
def test_plain_tensors_of_compiled_code_run_no_python(model, path, monkeypatch):
    def in_python(*_: object) -> None:
        raise AssertionError("the operator in Python has run")

    monkeypatch.setattr(ModuleHooks, "output_emitted", in_python)
    compiled, x = torch.compile(model, backend="aot_eager", fullgraph=True), torch.randn(4, 6)
    with torch.no_grad(), capture_activations(compiled, path, config=inside()):
        compiled(x)
    assert len(contents(path)[0]) == 12


def test_the_progress_line_tells_of_a_compilation(model, path, monkeypatch):
    class Kept:
        def __init__(self):
            self.shown = []

        def show(self, text):
            self.shown.append(text)

        def close(self):
            pass

    def slow(graph, inputs):
        time.sleep(1.3)  # the line is renewed every half second
        return graph

    line = Kept()
    monkeypatch.setattr(monitor, "_line", lambda: line)
    compiled, x = torch.compile(model, backend=slow, fullgraph=True), torch.randn(4, 6)
    with torch.no_grad(), capture_activations(compiled, path, config=inside().with_progress(True)):
        compiled(x)
        told = len(line.shown)
        time.sleep(1.1)
    told_of = "torch compiles the model for the capture: "
    assert any(re.search(rf"{told_of}[1-9]\d* s", text) for text in line.shown[:told])
    assert "compiles" not in line.shown[-1]


def test_models_that_share_compiled_code_have_their_own_values(model, tmp_path):
    """torch shares the code of a forward between the instances of a class."""
    torch.manual_seed(1)
    models, x = [model, Model().eval()], torch.randn(4, 6)
    with torch.no_grad():
        for number, one in enumerate(models):
            with capture_activations(one, tmp_path / f"{number}.eager", config=eagerly()):
                one(x)
        compiled = [torch.compile(one, backend=Counter(), fullgraph=True) for one in models]
        with capture_activations(compiled[0], tmp_path / "0.inside", config=inside()):
            compiled[0](x)
        with capture_activations(compiled[1], tmp_path / "1.inside", config=inside()):
            compiled[0](x), compiled[1](x)
    for number in range(2):
        assert_same(tmp_path / f"{number}.inside", tmp_path / f"{number}.eager")


def test_two_captures_at_once_have_what_each_selects(model, tmp_path):
    x = torch.randn(4, 6)
    compiled = torch.compile(model, backend=Counter(), fullgraph=True)
    first = capture_activations(
        compiled, tmp_path / "first", config=inside().with_layers("blocks.*.up")
    )
    with torch.no_grad(), first:
        compiled(x)
        with capture_activations(compiled, tmp_path / "second", config=inside()):
            compiled(x)
        compiled(x)
    first_rows, _ = contents(tmp_path / "first")
    second_rows, _ = contents(tmp_path / "second")
    assert [step for name, step, *_ in first_rows if name == "blocks.1.up"] == [0, 0, 1, 1, 2, 2]
    assert {name for name, *_ in first_rows} == {"blocks.0.up", "blocks.1.up"}
    assert len(second_rows) == 12


def test_inputs(model, path, tmp_path):
    x = torch.randn(4, 6)
    with torch.no_grad():
        with capture_activations(model, tmp_path / "eager", config=eagerly().with_inputs()):
            model(x)
        compiled = torch.compile(model, backend=Counter(), fullgraph=True)
        with capture_activations(compiled, path, config=inside().with_inputs()):
            compiled(x)
    assert_same(path, tmp_path / "eager")


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_training(backend, model, path, tmp_path):
    """The operator is no part of the gradients, and the backward pass emits nothing."""
    x = torch.randn(4, 6)
    expected = copy.deepcopy(model)
    with capture_activations(expected, tmp_path / "eager", config=eagerly()):
        expected(x)["logits"].sum().backward()
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    with capture_activations(compiled, path, config=inside()):
        compiled(x)["logits"].sum().backward()
    assert_same(path, tmp_path / "eager")
    for own, other in zip(model.parameters(), expected.parameters(), strict=True):
        assert torch.equal(own.grad, other.grad)


class Checkpointed(nn.Module):
    """Two modules whose tensors the backward pass computes again."""

    def __init__(self, *, use_reentrant: bool) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 16), nn.Linear(16, 6)
        self.use_reentrant = use_reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for module in (self.up, self.down):
            x = checkpoint(module, x.sin(), use_reentrant=self.use_reentrant)
        return x


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_what_a_checkpoint_computes_again_is_not_mixed_with_the_step(
    backend, use_reentrant, path, tmp_path
):
    """The backend "eager" emits it a second time, under another name. AOTAutograd drops that."""
    model, x = Checkpointed(use_reentrant=use_reentrant), torch.randn(4, 6, requires_grad=True)
    expected = copy.deepcopy(model)
    with capture_activations(expected, tmp_path / "eager", config=eagerly()):
        expected(x).sum().backward()
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    with capture_activations(compiled, path, config=inside()):
        compiled(x).sum().backward()
    with ActivationReader(path) as reader, ActivationReader(tmp_path / "eager") as eager:
        names = [a.name for a in reader]
        assert [name for name in names if "!" not in name] == ["up", "down", ""]
        again = {"down!recomputed", "up!recomputed"} if backend == "eager" else set()
        assert {name for name in names if "!" in name} == again
        for name in ("up", "down", ""):
            (value,), (other,) = reader[name], eager[name]
            assert torch.equal(value.to_torch(), other.to_torch())
    for own, other in zip(model.parameters(), expected.parameters(), strict=True):
        assert torch.equal(own.grad, other.grad)


@pytest.mark.parametrize("error", [KeyboardInterrupt, CaptureError])
def test_what_the_operator_raises_reaches_the_caller(error, path, monkeypatch):
    """The exception comes from the middle of compiled code as it is, so Ctrl-C ends a wait."""

    class Pair(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return x + 1, x + 2  # the operator in Python takes the second one

    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.pair = Pair()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.pair(x)[0]

    def interrupted(*_: object) -> None:
        raise error("while the tensor waited")

    monkeypatch.setattr(ModuleHooks, "output_emitted", interrupted)
    compiled = torch.compile(Around(), backend="aot_eager", fullgraph=True)
    with torch.no_grad(), capture_activations(compiled, path, config=inside()):
        with pytest.raises(error, match="while the tensor waited"):
            compiled(torch.randn(4, 6))


def test_a_batch_of_another_size_is_no_new_code(model, path):
    """Dimensions that vary stay symbols in code with emissions."""
    compiled = torch.compile(model, backend=Counter(), fullgraph=True, dynamic=True)
    with torch.no_grad(), capture_activations(compiled, path, config=inside()):
        compiled(torch.randn(4, 6))
        graphs = counters["stats"]["unique_graphs"]
        for size in (2, 3, 9):
            compiled(torch.randn(size, 6))
    assert counters["stats"]["unique_graphs"] == graphs
    with ActivationReader(path) as reader:
        assert [a.shape[0] for a in reader["blocks.0.up"]] == [4, 2, 3, 9]


def test_what_a_module_changes_in_place_later_is_emitted_as_it_was(path):
    class InPlace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.doubled = nn.Identity()

        def forward(self, x):
            y = self.doubled(x * 2)
            return y.add_(1)

    model, x = InPlace(), torch.randn(4, 6)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with torch.no_grad(), capture_activations(compiled, path, config=inside()):
        compiled(x)
    with ActivationReader(path) as reader:
        assert torch.equal(reader["doubled"][0].to_torch(), x * 2)
        assert torch.equal(reader[""][0].to_torch(), x * 2 + 1)


def test_modules_without_a_tensor_have_run(path):
    class Nothing(nn.Module):
        def forward(self, x):
            return None

    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.nothing = Nothing()

        def forward(self, x):
            self.nothing(x)
            return x + 1

    compiled = torch.compile(Around(), backend=Counter(), fullgraph=True)
    with torch.no_grad(), capture_activations(compiled, path, config=inside()) as framework:
        compiled(torch.randn(4, 6))
    assert framework.stats().silent == ()


def test_a_copy_of_a_model_within_the_block_emits_nothing(model, path):
    x = torch.randn(4, 6)
    compiled = torch.compile(model, backend=Counter(), fullgraph=True)
    with torch.no_grad(), capture_activations(compiled, path, config=inside()) as framework:
        compiled(x)
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            torch.compile(other, backend=Counter(), fullgraph=True)(x)
    assert framework.stats().tensors == 12


def test_a_captured_model_is_freed(path):
    model = Model()
    compiled = torch.compile(model, backend=Counter(), fullgraph=True)
    with torch.no_grad(), capture_activations(compiled, path, config=inside()):
        compiled(torch.randn(4, 6))
    gone = weakref.ref(model)
    del model, compiled
    torch._dynamo.reset()
    gc.collect()
    assert gone() is None


def test_threads_have_steps_of_their_own(model, path):
    x = torch.randn(4, 6)
    compiled = torch.compile(model, backend=Counter(), fullgraph=True)

    def run() -> None:
        with torch.no_grad():
            compiled(x)

    with capture_activations(compiled, path, config=inside()) as framework:
        run()
        threads = [threading.Thread(target=run) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert framework.stats().steps == 5
    rows, _ = contents(path)
    assert {step: sum(at == step for _, at, *_ in rows) for step in range(5)} == dict.fromkeys(
        range(5), 12
    )


def test_generation_with_a_static_cache(llama, ids, path, tmp_path):
    asked = {"max_new_tokens": 4, "do_sample": False, "cache_implementation": "static"}
    with torch.no_grad():
        with capture_activations(llama, tmp_path / "eager", config=eagerly()):
            expected = llama.generate(ids, **asked)
        backend = Counter()
        llama.forward = torch.compile(llama.forward, backend=backend, fullgraph=True)
        with capture_activations(llama, path, config=inside()):
            assert torch.equal(llama.generate(ids, **asked), expected)
    assert backend.runs == 4
    with ActivationReader(path) as reader, ActivationReader(tmp_path / "eager") as eager:
        assert [(a.name, a.step, a.call) for a in reader] == [
            (a.name, a.step, a.call) for a in eager
        ]
        calls = [read_calls(of, None) for of in (path, tmp_path / "eager")]
        assert calls[0].equals(calls[1])
        for a, b in zip(reader, eager, strict=True):
            torch.testing.assert_close(a.to_torch(), b.to_torch())


def test_automatic_captures_are_inside_of_what_is_compiled(model, path):
    x, backend = torch.randn(4, 6), Counter()
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "Guards may run slower on Python")  # torch, of 3.13.0
        with capture_activations(compiled, path) as framework:
            compiled(x)
    assert backend.runs == 1 and framework.stats().tensors == 12


def test_gradients_are_captured_eagerly(model, path):
    compiled = torch.compile(model, backend=Counter())
    config = InstrumentationConfig.balanced().with_gradients()
    with pytest.raises(UnsupportedError, match="gradients are captured by hooks"):
        with capture_activations(compiled, path, config=config.with_compiled("inside")):
            pass
    with pytest.warns(RuntimeWarning, match="runs eagerly during the capture, since gradients are"):
        with capture_activations(compiled, path, config=config.with_compiled("auto")):
            compiled(torch.randn(4, 6))["logits"].sum().backward()


def test_a_model_of_torch_that_was_compiled_in_place_runs_eagerly(path, read):
    model = nn.Sequential(nn.Linear(6, 3), nn.ReLU())
    model.compile(backend=Counter())
    with pytest.raises(UnsupportedError, match="compiled in place"):
        with capture_activations(model, path, config=inside()):
            pass
    with pytest.warns(RuntimeWarning, match="it runs eagerly .* give torch.compile"):
        with torch.no_grad(), capture_activations(model, path):
            model(torch.randn(4, 6))
    assert [name for name, _ in read(path)] == ["0", "1", ""]


def test_a_model_of_torch_in_a_wrapper(path, read):
    backend = Counter()
    model = torch.compile(
        nn.Sequential(nn.Linear(6, 3), nn.ReLU()), backend=backend, fullgraph=True
    )
    with torch.no_grad(), capture_activations(model, path, config=inside()) as framework:
        model(torch.randn(4, 6))
    assert backend.runs == 1 and framework.stats().steps == 1
    assert [name for name, _ in read(path)] == ["0", "1", ""]


class Held:
    """A value that no walk enters."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


def test_a_type_that_cannot_be_walked_is_told(path):
    class Inner(nn.Module):
        def forward(self, x):
            return x + 1, Held(x)

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Inner()

        def forward(self, x):
            return self.inner(x)[0]

    compiled = torch.compile(Outer(), backend=Counter(), fullgraph=True)
    with torch.no_grad(), pytest.warns(RuntimeWarning, match=r"Held"):
        with capture_activations(compiled, path, config=inside()) as framework:
            compiled(torch.randn(4, 6))
    assert framework.stats().tensors == 2


def test_an_intervention_within_the_block_is_seen(model, path):
    """The model runs eagerly in the block of intervene, also the code that emits."""
    x, backend = torch.randn(4, 6), Counter()
    with torch.no_grad():
        with intervene(model, zero("blocks.0.up")):
            expected = model(x)["logits"]
        compiled = torch.compile(model, backend=backend, fullgraph=True)
        with capture_activations(compiled, path, config=inside()) as framework:
            first = compiled(x)["logits"]
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                with intervene(compiled, zero("blocks.0.up")):
                    assert torch.equal(compiled(x)["logits"], expected)
            assert torch.equal(compiled(x)["logits"], first)
    assert framework.stats().steps == 3 and framework.stats().tensors == 36
    assert backend.runs == 2
    with ActivationReader(path) as reader:
        logits = [a.to_torch() for a in reader["['logits']"]]
    assert torch.equal(logits[0], logits[2]) and torch.equal(logits[1], expected)


def test_an_eager_capture_beside_one_inside(model, tmp_path):
    """While the eager capture runs the model runs eagerly, and both have all tensors."""
    x, backend = torch.randn(4, 6), Counter()
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    eager = eagerly().with_compiled("eager")
    with torch.no_grad(), capture_activations(compiled, tmp_path / "in", config=inside()):
        compiled(x)
        with pytest.warns(RuntimeWarning, match="it runs eagerly"):
            with capture_activations(compiled, tmp_path / "out", config=eager):
                compiled(x)
        compiled(x)
    assert backend.runs == 2
    assert [len(contents(tmp_path / name)[0]) for name in ("in", "out")] == [36, 12]
