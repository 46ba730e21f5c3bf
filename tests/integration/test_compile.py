"""Compiled models that run eagerly while they are captured, and compiled again afterwards."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
import warnings

import prepared
import pytest
import torch
from llm_instrumentation import ActivationReader, InstrumentationConfig, capture_activations
from llm_instrumentation.errors import UnsupportedError
from llm_instrumentation.mrm.collector import TorchTracer
from torch import nn

pytestmark = pytest.mark.skipif(
    not hasattr(torch.compiler, "set_stance"), reason="this torch cannot leave compiled code"
)

EAGER = InstrumentationConfig.balanced().with_compiled("eager")
EAGERLY = pytest.warns(RuntimeWarning, match="the model is compiled: it runs eagerly")


class Counter:
    """A backend that runs the traced graph and counts how often."""

    def __init__(self) -> None:
        self.runs = 0

    def __deepcopy__(self, memo: object) -> Counter:
        return self  # transformers copies its settings

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
        with EAGERLY, capture_activations(compiled, path, config=EAGER) as framework:
            assert torch.equal(compiled(x), expected)
        assert backend.runs == runs
        assert_captured(path, seen)
        assert framework.stats().steps == 1

        compiled(x)
        assert backend.runs == runs + 1


def test_the_warning_says_that_torch_is_too_old(mlp, path, monkeypatch):
    monkeypatch.setattr("llm_instrumentation.core.hooking.inside._OLDEST", "99.0")
    compiled, why = torch.compile(mlp, backend=Counter()), "torch .* is older than 99.0"
    with pytest.warns(RuntimeWarning, match=f"it runs eagerly during the capture, since {why}"):
        with torch.no_grad(), capture_activations(compiled, path):
            compiled(torch.randn(4, 6))
    config = InstrumentationConfig.balanced().with_compiled("inside")
    with pytest.raises(UnsupportedError, match=why):
        with capture_activations(compiled, path, config=config, overwrite=True):
            pass


def test_a_model_with_a_compiled_part(mlp, path, read):
    """The compiled part runs eagerly in the block, so its modules are captured."""
    backend = Counter()
    mlp[2] = torch.compile(mlp[2], backend=backend)
    x = torch.randn(4, 6)
    with torch.no_grad():
        mlp(x)
        with EAGERLY, capture_activations(mlp, path, config=EAGER):
            mlp(x)
        mlp(x)
    assert backend.runs == 2
    assert [name for name, _ in read(path)] == ["0", "1", "2", ""]


def test_the_original_of_a_compiled_model(mlp, path, read):
    """The original of a compiled model is captured like any other model."""
    torch.compile(mlp, backend=Counter())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with torch.no_grad(), capture_activations(mlp, path):
            mlp(torch.randn(4, 6))
    assert [name for name, _ in read(path)] == ["0", "1", "2", ""]


def test_a_compiled_decoder(llama, ids, path):
    """The capture has the names of the original model, without those of torch.compile's wrapper."""
    compiled = torch.compile(llama, backend=Counter())
    with torch.no_grad(), EAGERLY, capture_activations(compiled, path, config=EAGER):
        for length in (4, 5):
            output = compiled(ids[:, :length])
    with ActivationReader(path) as reader:
        assert reader.steps == (0, 1)
        assert {a.model for a in reader} == {"llama"}
        assert not any("_orig_mod" in name for name in reader.layers)
        assert torch.equal(reader["['logits']"][1].to_torch(), output.logits.half())


def test_layers_of_a_compiled_model_are_selected_by_their_own_names(mlp, path, read):
    compiled = torch.compile(mlp, backend=Counter())
    config = InstrumentationConfig.balanced().with_layers("2").with_compiled("eager")
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
        with pytest.raises(KeyError), EAGERLY, capture_activations(compiled, path, config=EAGER):
            raise KeyError
        compiled(x)
    assert backend.runs == 1


CC = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")


@pytest.mark.skipif(CC is None, reason="inductor needs a C++ compiler")
def test_generated_code_runs_again_afterwards(mlp, path, watching, assert_captured):
    # Plain C++. To compile headers beforehand, and to try instruction sets, takes 20 s of a core.
    options = {"cpp_cache_precompile_headers": False, "cpp.vec_isa_ok": True, "cpp.simdlen": 0}
    compiled, x = torch.compile(mlp, options=options), torch.randn(4, 6)
    with torch.no_grad():
        before = compiled(x)
        with watching(mlp) as seen:
            mlp(x)
        with EAGERLY, capture_activations(compiled, path, config=EAGER):
            compiled(x)
        assert torch.equal(compiled(x), before)
    assert_captured(path, seen)


class InParts(nn.Module):
    """A model with two parts, which can also be called without the model."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(6, 16), nn.ReLU())
        self.head = nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x))


def in_a_function(model, backend):
    compiled = torch.compile(lambda x: model(x) + 1, backend=backend)
    return lambda x: compiled(x) - 1


def as_its_forward(model, backend):
    model.forward = torch.compile(model.forward, backend=backend)
    return model


def by_a_wrapper_of_a_part(model, backend):
    body = torch.compile(model.body, backend=backend)
    return lambda x: model.head(body(x))


def inside_a_larger_model(model, backend):
    return torch.compile(nn.Sequential(model), backend=backend)


@pytest.mark.filterwarnings("ignore:the model is compiled")
@pytest.mark.parametrize(
    ("compiled_by", "silent"),
    [
        (in_a_function, ()),
        (as_its_forward, ()),
        (by_a_wrapper_of_a_part, ("",)),  # the root is not called
        (inside_a_larger_model, ()),
    ],
)
def test_code_that_was_compiled_around_the_model(compiled_by, silent, path, watching,
                                                 assert_captured):  # fmt: skip
    """Compiled functions and models that contain the model run eagerly in the block too."""
    model, backend, x = InParts(), Counter(), torch.randn(4, 6)
    with torch.no_grad(), watching(model) as seen:
        model(x)
    call = compiled_by(model, backend)
    with torch.no_grad():
        expected = call(x)
        runs = backend.runs
        with capture_activations(model, path, config=EAGER) as framework:
            assert torch.equal(call(x), expected)
        assert backend.runs == runs
        assert_captured(path, [(name, tensor) for name, tensor in seen if name not in silent])
        assert framework.stats().silent == silent

        call(x)  # runs the code that was compiled before
        assert backend.runs == runs + 1
    assert compiled_by is as_its_forward or "forward" not in vars(model)


def test_other_compiled_models_stay_compiled(mlp, path):
    backend, x = Counter(), torch.randn(4, 6)
    other = torch.compile(nn.Linear(6, 3), backend=backend)
    with torch.no_grad():
        other(x)
        with capture_activations(mlp, path):
            mlp(x)
            other(x)
    assert backend.runs == 2


def test_captures_that_end_in_any_order_leave_the_models_compiled(mlp, tmp_path):
    backend, x = Counter(), torch.randn(4, 6)
    compiled = torch.compile(mlp, backend=backend)
    blocks = [
        capture_activations(compiled, tmp_path / f"{n}.stream", config=EAGER) for n in range(2)
    ]
    with torch.no_grad():
        compiled(x)
        with EAGERLY:
            for block in blocks:
                block.__enter__()
        for block in blocks:
            compiled(x)
            assert backend.runs == 1
            block.__exit__(None, None, None)
        compiled(x)
    assert backend.runs == 2


def test_models_compiled_within_the_block_run_eagerly(mlp, path, watching, assert_captured):
    backend, x = Counter(), torch.randn(4, 6)
    with torch.no_grad(), watching(mlp) as seen:
        mlp(x)
    compiled = torch.compile(mlp, backend=backend)
    with torch.no_grad():
        with capture_activations(mlp, path):
            compiled(x)
        assert backend.runs == 0
        assert_captured(path, seen)
        compiled(x)
    assert backend.runs == 1


FIRST_COMPILED_WITHIN = """
import sys, torch
from llm_instrumentation import ActivationReader, capture_activations

model, x = torch.nn.Sequential(torch.nn.Linear(6, 3), torch.nn.ReLU()), torch.ones(4, 6)
own = torch.compile
graphs = []
def backend(graph, inputs):
    graphs.append(graph)
    return graph

assert "torch._dynamo" not in sys.modules
with torch.no_grad(), capture_activations(model, sys.argv[1]) as outer:
    with capture_activations(model, sys.argv[1] + "2.stream"):
        {compiles}
        call(x)
    call(x)
assert torch.compile is own
assert not graphs and outer.stats().steps == 2, (graphs, outer.stats())
with ActivationReader(sys.argv[1]) as reader:
    assert [a.layer for a in reader] == ["0", "1", ""] * 2, list(reader)
call(x)
assert len(graphs) == 1
assert torch._dynamo.eval_frame._stance.stance == "default"
"""


@pytest.mark.parametrize(
    "compiles",
    [
        "call = torch.compile(model, backend=backend, fullgraph=True)",
        "call = model; model.compile(backend=backend, fullgraph=True)",
        "call = torch.compile(backend=backend, fullgraph=True)(lambda x: model(x))",
    ],
    ids=["wrapped", "in place", "decorator"],
)
def test_the_first_that_a_program_compiles_runs_eagerly_within_the_block(compiles, path):
    """This holds also if nothing has imported torch._dynamo when the block begins."""
    program = FIRST_COMPILED_WITHIN.replace("{compiles}", compiles)
    subprocess.run([prepared.python(prepared.TORCH), "-c", program, path], check=True, timeout=300)


def test_a_block_in_which_nothing_is_compiled_does_not_import_the_compiler(path):
    program = """
import sys, torch
from llm_instrumentation import capture_activations
own = torch.compile
with capture_activations(torch.nn.Linear(6, 3), sys.argv[1]) as framework:
    pass
assert torch.compile is own and "torch._dynamo" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program, path], check=True, timeout=300)


def test_generation_that_compiles_the_model_by_itself(llama, ids, path):
    """transformers compiles the model in generate() on GPUs with a static cache."""
    from transformers import CompileConfig

    config = CompileConfig(backend=Counter(), mode=None)
    config._compile_all_devices = True
    asked = {
        "max_new_tokens": 4, "do_sample": False, "cache_implementation": "static",
        "compile_config": config,
    }  # fmt: skip
    with torch.no_grad():
        expected = llama.generate(ids, **asked)
        runs = config.backend.runs
        assert runs > 0
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with capture_activations(llama, path) as framework:
                assert torch.equal(llama.generate(ids, **asked), expected)
    assert config.backend.runs == runs
    assert framework.stats().silent == ()
    with ActivationReader(path) as reader:
        assert reader.steps == (0, 1, 2, 3)
        assert all(len(reader[name]) == 4 for name in reader.layers)


def test_generation_by_a_compiled_model_has_its_logits(llama, ids, path):
    compiled = torch.compile(llama, backend=Counter())
    with torch.no_grad(), EAGERLY, capture_activations(compiled, path, config=EAGER):
        compiled.generate(ids, max_new_tokens=3, do_sample=False)
    with ActivationReader(path) as reader:
        assert [a.step for a in reader["['logits']"]] == [0, 1, 2]


def test_a_capture_warns_of_exported_code(mlp, path):
    """Exported code has the model's weights, but does not call its modules."""
    model = nn.Sequential(mlp, nn.Linear(3, 2))
    exported = torch.export.export(mlp, (torch.randn(4, 6),)).module()
    model.forward = lambda x: model[1](exported(x))
    with torch.no_grad(), pytest.warns(RuntimeWarning, match="nothing is captured of '0': "):
        with capture_activations(model, path) as framework:
            model(torch.randn(4, 6))
    assert framework.stats().silent == ("0", "0.0", "0.1", "0.2")


def test_a_stance_that_the_user_chooses_stays(mlp, path):
    """A capture keeps the compiler's stance that the user sets before or within the block."""
    from torch._dynamo import eval_frame

    x, backend = torch.randn(4, 6), Counter()
    compiled = torch.compile(mlp, backend=backend)
    with torch.no_grad():
        compiled(x)
        with torch.compiler.set_stance("force_eager"), EAGERLY:
            with capture_activations(compiled, path, config=EAGER):
                compiled(x)
            compiled(x)
        assert backend.runs == 1
        with EAGERLY, capture_activations(compiled, path, config=EAGER):
            torch.compiler.set_stance("force_eager")
        try:
            assert eval_frame._stance.stance == "force_eager"
        finally:
            torch.compiler.set_stance("default")


def in_place(model, backend):
    model.compile(backend=backend)
    return model


@pytest.mark.parametrize("compiled_by", [in_place, as_its_forward])
def test_a_compiled_model_is_traced(compiled_by):
    model, backend, x = InParts(), Counter(), torch.randn(4, 6)
    call = compiled_by(model, backend)
    with torch.no_grad(), TorchTracer() as tracer:
        call(x)
        with pytest.warns(RuntimeWarning, match="it runs eagerly while it is traced, since"):
            attached = tracer.attach(model)
        with attached:
            call(x)
            rows = tracer.reader().read_all().to_pandas()
        assert backend.runs == 1
        call(x)
        assert backend.runs == 2
    assert list(dict.fromkeys(rows.symbol)) == ["aten::addmm", "aten::relu"]


def test_while_a_model_is_traced_others_in_other_threads_stay_compiled(mlp):
    backend, x = Counter(), torch.randn(4, 6)
    other = torch.compile(nn.Linear(6, 3), backend=backend)
    other(x)
    with TorchTracer() as tracer, tracer.attach(mlp):
        thread = threading.Thread(target=other, args=(x,))
        thread.start()
        thread.join()
    assert backend.runs == 2


def test_a_trace_leaves_a_capture_its_eager_model(mlp, path, read):
    """The model stays eager until both the trace and the capture have ended."""
    backend, x = Counter(), torch.randn(4, 6)
    compiled = torch.compile(mlp, backend=backend)
    with torch.no_grad(), EAGERLY, TorchTracer() as tracer:
        compiled(x)
        attached = tracer.attach(compiled)
        with capture_activations(compiled, path, config=EAGER):
            attached.detach()
            compiled(x)
    assert backend.runs == 1
    assert [name for name, _ in read(path)] == ["0", "1", "2", ""]
